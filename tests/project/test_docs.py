"""Commands, arguments, links, files and printed examples in README.md, CHANGELOG.md and docs/ are correct.

In a block marked `console`, each line that starts with `$ ` is executed in a directory of the page, and its
output is compared with the page. `--update-golden` writes the new outputs to the page.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from factories import train_config
from kmatrix.cli.commands import ALIASES, COMMANDS, GROUPS, MAKE_ONLY, OF_SCHEDULER, find_command
from kmatrix.errors import KmatrixError
from kmatrix.kconfig.assignments import SETS, parse_set
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import parse_override
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.report.analysis import analyse
from kmatrix.report.write import write_summary
from pages import DOCS, FENCE, INLINE, LINK, PAGES, ROOT, commands, page_text, prose, run_make, target_exists
from programs import give_gpus, run
from records_factory import FakeRun, make_matrix

# Every clone downloads the images, so they must stay small.
MAX_IMAGE_BYTES = 150_000

REPOSITORY_PATH = re.compile(r"(?:lib|gpt2|docs|tests|scripts|bench|defconfigs|\.ci)/[\w./+*-]*")
RUN_ID = re.compile(r"^run [0-9a-f]{10}\b", re.MULTILINE)
MAKE_OPTIONS = re.compile(r"-\w+")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


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
    if name in command.names:
        return None
    if not command.assigns and not (command.settings and OF_SCHEDULER.fullmatch(name)):
        return f"{target} does not take {name}"
    try:
        parse_set(tree(), name, value) if name in SETS else parse_override(tree(), name, value)
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


@pages
def test_every_make_target_and_argument_on_a_page_exists(page):
    calls = [arguments for arguments in commands(page, "make") if tuple(arguments) not in intended_errors(page)]
    found = {" ".join(arguments): errors for arguments in calls if (errors := errors_in(arguments))}
    assert not found


@pages
def test_every_kmatrix_command_on_a_page_exists(page):
    for name, *arguments in commands(page, "kmatrix"):
        if name in ("COMMAND", "help"):
            continue
        assert errors_in([name, *arguments], find_command) == []


@pages
def test_every_folder_for_rendered_scripts_on_a_page_is_new(page):
    words = [word.partition("=") for arguments in commands(page, "make") for word in arguments]
    assert [folder for name, _, folder in words if name == "RENDER" and folder and (ROOT / folder).exists()] == []


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


@pages
def test_every_link_leads_to_an_existing_file_and_heading(page):
    for link in links(page):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


@pages
def test_every_repository_file_named_on_a_page_exists(page):
    named = [word for words in INLINE.findall(prose(page)) for word in words.split() if REPOSITORY_PATH.fullmatch(word)]
    missing = [word for word in named if not any(ROOT.glob(word.rstrip("/"))) and not (ROOT / word).exists()]
    assert not missing


@pages
def test_every_page_starts_with_one_title_and_closes_all_blocks(page):
    assert page_text(page).startswith("# ")
    assert page_text(page).count("\n```") % 2 == 0


def test_every_page_is_reachable_from_the_index():
    seen, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link[0] != "#"]
    assert set(DOCS.rglob("*.md")) <= seen
    assert "docs/index.md" in links(ROOT / "README.md")


def test_developing_lists_every_package_and_module_of_kmatrix():
    listed = set(re.findall(r"`lib/kmatrix/(\w+)(?:/|\.py)`", page_text(DOCS / "developing.md")))
    existing = {path.stem for path in (ROOT / "lib" / "kmatrix").iterdir() if path.suffix in ("", ".py")}
    assert listed == existing - {"Kconfig", "__init__", "__main__", "__pycache__"}


def test_decisions_are_numbered_without_gaps():
    numbers = sorted(int(path.name[:4]) for path in (DOCS / "decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_decision_names_the_rejected_options_and_what_would_change_it():
    for page in (DOCS / "decisions").glob("*.md"):
        assert page_text(page).startswith(f"# {page.name[:4]}: "), page.name
        assert {"context", "choice", "turned-down", "what-would-change-our-mind"} <= anchors(page), page.name


def test_images_are_used_and_small():
    used = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    pictures = set((DOCS / "images").iterdir())
    assert pictures
    assert pictures <= used
    assert all(picture.stat().st_size < MAX_IMAGE_BYTES for picture in pictures)


def test_the_changelog_has_an_unreleased_section():
    assert re.search(r"^## Unreleased$", page_text(ROOT / "CHANGELOG.md"), re.MULTILINE)


def test_make_help_lists_every_command_and_every_public_target():
    listed = set(re.findall(r"[\w-]+", run_make("help")))
    phony = re.search(r"^\.PHONY: (.*)$", run_make("-npq", "help"), re.MULTILINE)
    assert phony
    defconfigs = re.compile(r"defconfig-.+|.+_defconfig")
    public = {name for name in phony[1].split() if not defconfigs.fullmatch(name) and not name.startswith(".")}
    assert public - set(ALIASES) | set(COMMANDS) <= listed
    assert set(ALIASES) <= public  # old names still work, but only the new ones are listed


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
        result = run(*arguments, *no_data, *(["O=."] if "O" in find_command(arguments[0]).names else []))
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


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "```console" in page_text(page)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_every_console_example_prints_what_the_page_says(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "C")
    give_gpus(monkeypatch, 0)
    now = with_current_outputs(page)
    if request.config.getoption("--update-golden"):
        page.write_text(now, encoding="utf-8")
    same = without_changing_parts(now) == without_changing_parts(page.read_text(encoding="utf-8"))
    assert same, f"{page.name} differs: pytest tests/project/test_docs.py --update-golden, then read the diff"


def test_formats_names_every_file_of_a_matrix_and_of_a_run():
    names = [getattr(RunDir(Path("run")), name).name for name in dir(RunDir) if is_property(RunDir, name)]
    names += [getattr(MatrixDir(Path("matrix")), name).name for name in dir(MatrixDir) if is_property(MatrixDir, name)]
    missing = [name for name in set(names) - {"run", "matrix"} if f"`{name}" not in page_text(DOCS / "formats.md")]
    assert not missing


def is_property(owner: type, name: str) -> bool:
    return isinstance(getattr(owner, name), property) and name not in ("name", "path")


def test_every_json_example_is_valid_json():
    bodies = [body for page in PAGES for language, body in FENCE.findall(page_text(page)) if language == "json"]
    assert bodies
    for body in bodies:
        json.loads(body)


def test_every_jsonl_example_has_one_object_per_line():
    bodies = [body for page in PAGES for language, body in FENCE.findall(page_text(page)) if language == "jsonl"]
    assert bodies
    assert all("schema" in json.loads(line) for body in bodies for line in body.splitlines())


def example(heading: str) -> dict[str, object]:
    """Return the first JSON example below a heading of docs/formats.md."""
    section = page_text(DOCS / "formats.md").partition(f"\n### {heading}\n")[2]
    return json.loads(next(body for language, body in FENCE.findall(section) if language == "json"))


def test_the_example_of_a_run_has_every_field_of_the_trainer():
    from kmatrix.records.train_config import TrainConfig

    assert example("`run.json`")["train"].keys() == {field.name for field in dataclasses.fields(TrainConfig)}


def test_the_example_of_a_result_has_the_keys_that_the_trainer_writes(tmp_path):
    from gpt2.log import RunLog

    written = RunLog(RunDir(tmp_path), "id", 1, main=False).result("failed", "error", "why")
    assert example("`result.json`").keys() == written.keys() | {"schema"}


def test_the_examples_of_the_results_have_the_keys_of_written_files(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(gpus=2), FakeRun(optimizer="muon")])
    write_summary(analyse(matrix))
    results, (original, *_) = (json.loads(path.read_text()) for path in (matrix.results, matrix.all_results))
    section = page_text(DOCS / "formats.md").partition("\n### `summary_report.txt`")[2].partition("\n### ")[0]
    bodies = [json.loads(body) for language, body in FENCE.findall(section) if language == "json"]
    whole, run, ranking, settings, one = (value.keys() for value in bodies)
    assert whole == results.keys()
    assert run == results["runs"][0].keys()
    assert ranking == results["rankings"][0].keys()
    assert settings == results["settings"][0].keys()
    # The fake trainer writes a part of its file; the whole has an example of its own.
    assert one == original.keys() | example("`training_metrics.json`").keys() - {"schema"}


def test_the_example_of_the_training_metrics_has_the_keys_that_the_trainer_writes(tmp_path):
    import torch

    from gpt2.dist import World
    from gpt2.log import RunLog

    log = RunLog(RunDir(tmp_path), "id", 1, main=False)
    log.config, log.world = train_config(), World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    written = log.training_metrics(log.result("failed", "error", "why"))
    assert example("`training_metrics.json`").keys() == written.keys() | {"schema"}
