"""Commands, arguments, links, files and printed examples in README.md, CHANGELOG.md and docs/ are correct.

In a block marked `console`, each line that starts with `$ ` is executed in a directory of the page, and its
output is compared with the page. `--update-golden` writes the new outputs to the page.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from format_tables import page_with_tables
from kmatrix.cli.commands import GROUPS, MAKE_ONLY, PLACES, find_command
from kmatrix.errors import KmatrixError
from kmatrix.kconfig.assignments import SETS, parse_set
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import parse_override
from pages import DOCS, FENCE, INLINE, LINK, PAGES, ROOT, commands, page_text, prose, target_exists
from programs import give_gpus, run

ENGLISH = {"it", "one", "room", "the"}  # words after the verb that are no target

REPOSITORY_PATH = re.compile(r"(?:lib|gpt2|docs|tests|scripts|bench|defconfigs|\.ci)/[\w./+*-]*")
RUN_ID = re.compile(r"^run [0-9a-f]{10}\b", re.MULTILINE)
MAKE_OPTIONS = re.compile(r"-\w+")

# Pages whose console examples are executed.
EXECUTED = (DOCS / "configuration.md", DOCS / "matrix.md", DOCS / "quickstart.md")


@cache
def tree() -> Tree:
    return Tree.parse(srctree=ROOT)


def is_placeholder(argument: str) -> bool:
    return "<" in argument or "..." in argument or argument.endswith("=")


def why_refused(target: str, argument: str) -> str | None:
    """Return why a target does not accept NAME=value, or None if it does."""
    name, _, value = argument.partition("=")
    if name in MAKE_ONLY or any(target in group and name in group[target].takes for group in GROUPS.values()):
        return None
    try:
        command = find_command(target)
    except KmatrixError:
        return f"{target} is not a command of kmatrix, so it has no arguments"
    if name in (*command.takes, *PLACES):
        return None
    if not command.assigns:
        return f"{target} does not take {name}"
    try:
        parse_set(name, value) if name in SETS else parse_override(tree(), name, value)
    except KmatrixError as error:
        return None if is_placeholder(argument) and "unknown symbol" not in error.what else str(error)
    return None


def errors_in(arguments: list[str], target_known: Callable[[str], object] = target_exists) -> list[str]:
    """Return the errors in the arguments of one make command line."""
    arguments = [argument for argument in arguments if not MAKE_OPTIONS.fullmatch(argument)]
    targets = [argument for argument in arguments if "=" not in argument]
    found = [f"there is no target {target}" for target in targets if not target_known(target)]
    for argument in (argument for argument in arguments if "=" in argument):
        why = [why_refused(target, argument) for target in targets or ["help"]]
        if all(why):
            found.append(str(why[0]))
    return found


def intended_errors(page: Path) -> set[tuple[str, ...]]:
    """Return the commands of console blocks whose output on the page is an error; the console test checks those."""
    return {
        tuple(shlex.split(command)[1:])
        for language, body in FENCE.findall(page_text(page))
        if language == "console"
        for command, output in examples(body)
        if output.startswith("error: ") and command.startswith("make ")
    }


@pytest.mark.process
def test_every_command_on_a_page_exists_with_its_arguments():
    found = {}
    for page in PAGES:
        calls = [arguments for arguments in commands(page, "make") if tuple(arguments) not in intended_errors(page)]
        found |= {(page.name, *call): errors for call in calls if (errors := errors_in(call))}
        # `run` is what the background process and jobs start; nobody types it.
        calls = [arguments for arguments in commands(page, "kmatrix") if arguments[0] not in ("COMMAND", "help", "run")]
        found |= {(page.name, *call): errors for call in calls if (errors := errors_in(call, find_command))}
    assert not found


@pytest.mark.process
def test_every_command_in_a_hint_exists():
    sources = [path.read_text() for folder in ("lib", "gpt2") for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(source) for source in sources if "hint=" in source]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    hints = [ast.unparse(word.value) for call in calls for word in call.keywords if word.arg == "hint"]
    targets = {name for hint in hints for name in re.findall(r"\bmake ([a-z][\w-]*)", hint)}
    assert len(targets) > 10
    assert {name for name in targets if not target_exists(name)} <= {"defconfig-", *ENGLISH}


@pytest.mark.process
def test_an_invalid_target_argument_or_value_is_detected():
    assert errors_in(["test-matrix", "MAX_ITERS=500"]) == []
    assert errors_in(["test-matrx"]) == ["there is no target test-matrx"]
    assert errors_in(["defconfig-gpt2-nothing"]) == ["there is no target defconfig-gpt2-nothing"]
    assert errors_in(["savedefconfig", "LR=1"]) == ["savedefconfig does not take LR"]
    assert "unknown symbol NO_SUCH" in errors_in(["test-matrix", "NO_SUCH=1"])[0]
    assert "expected one of" in errors_in(["test-matrix", "OPTIMIZER=nothing"])[0]


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return plain.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(title) for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)}


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]


def test_every_link_leads_to_an_existing_file_and_heading():
    for page in PAGES:
        for link in links(page):
            path, _, fragment = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, link)
            assert not fragment or fragment in anchors(target), (page, link)


def test_every_repository_file_named_on_a_page_exists():
    for page in PAGES:
        words = [word for code in INLINE.findall(prose(page)) for word in code.split()]
        named = [word for word in words if REPOSITORY_PATH.fullmatch(word)]
        missing = [word for word in named if not any(ROOT.glob(word.rstrip("/"))) and not (ROOT / word).exists()]
        assert not missing, page


def test_every_page_is_reachable_from_the_index():
    seen, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link[0] != "#"]
    assert set(DOCS.rglob("*.md")) <= seen
    assert "docs/index.md" in links(ROOT / "README.md")


def examples(body: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with its output."""
    found: list[tuple[str, str]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            command, output = found[-1]
            found[-1] = (command, f"{output}{line}\n")
    return found


def as_in_the_checkout(output: str) -> str:
    """Return an output without what printed commands have because the example runs in another folder."""
    places = (f" DATA_DIR={Path.cwd() / 'data'}", f" O={Path.cwd()}", f" -C {ROOT}", f"{ROOT}/")
    return functools.reduce(lambda text, place: text.replace(place, ""), places, output)


def output_of(command: str) -> str:
    """Return the output of a command in the current directory: make targets in this process, others by the shell."""
    if command.startswith("make "):
        arguments = shlex.split(command)[1:]
        no_data = (
            [f"DATA_DIR={Path.cwd() / 'data'}"] if arguments[0] == "plan" else []
        )  # without the datasets of this checkout
        result = run(*arguments, *no_data, *(["O=."]))
        return as_in_the_checkout(result.out + result.err)
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False).stdout


def without_changing_parts(page: str) -> str:
    """Return a page without what new symbols change: ids, which are numbered as they occur, and .config lines."""
    seen: dict[str, str] = {}
    numbered = RUN_ID.sub(lambda match: seen.setdefault(match[0], f"run #{len(seen)}"), page)
    return re.sub(r"(?<=\.config:)\d+", "#", numbered)


def with_current_outputs(page: Path) -> str:
    """Return a page with the current outputs of its console blocks."""

    def block(match: re.Match[str]) -> str:
        if match[1] != "console":
            return match[0]
        return "```console\n" + "".join(f"$ {c}\n{output_of(c)}" for c, _ in examples(match[2])) + "```"

    return FENCE.sub(block, page_text(page))


@pytest.mark.process
@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_every_console_example_prints_what_the_page_says(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "C")
    give_gpus(monkeypatch, 0)
    now = with_current_outputs(page)
    if request.config.getoption("--update-golden"):
        page.write_text(now, encoding="utf-8")
    same = without_changing_parts(now) == without_changing_parts(page.read_text(encoding="utf-8"))
    assert same, f"{page.name} differs: pytest tests/project/test_docs.py --update-golden, then read the diff"


def test_the_tables_of_files_are_those_of_the_types_that_read_them(request):
    page = DOCS / "formats.md"
    now = page_with_tables(page.read_text(encoding="utf-8"))
    if request.config.getoption("--update-golden"):
        page.write_text(now, encoding="utf-8")
    assert now.count("<!-- fields of") > 10
    assert now == page.read_text(encoding="utf-8"), "pytest tests/project/test_docs.py --update-golden"


def test_every_json_example_is_valid_json():
    bodies = [body for page in PAGES for language, body in FENCE.findall(page_text(page)) if language == "json"]
    assert bodies
    for body in bodies:
        json.loads(body)
