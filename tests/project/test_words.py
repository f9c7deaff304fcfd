"""Check the English of all text that a person reads: retired terms, first words of docstrings, rewritten sentences.

docs/developing.md, "Words", explains how we write. words.toml has the lists, and each exception with its reason.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

RULES = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
VERBS = frozenset(RULES["verbs"].split())
EXCEPTIONS = RULES.get("exceptions", [])
_JS_TEXT = re.compile(
    r"""(?P<comment>//.*|/\*(?s:.*?)\*/)|(?P<string>(["'`])(?:\\.|(?!\3)(?s:.))*\3)|(?P<name>(?<=function )\w+)"""
)
_CSS_COMMENT = re.compile(r"/\*.*?\*/|{#.*?#}", re.DOTALL)
READ = (".py", ".md", ".c", ".h", ".j2", ".js", ".css")
QUESTIONS = frozenset(("What", "Which", "Where", "Whether", "How", "Why", "When", "Of", "It", "That", "Those", "There"))


class Text(NamedTuple):
    """A piece of text that a person reads. kind: docstring, comment, string, name, prose (a whole line)."""

    path: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {' '.join(self.text.split())[:120]}"


def areas() -> dict[str, list[Path]]:
    """Return the parts of the project by name, each small enough for one reader."""
    found: dict[str, list[Path]] = {}
    for folder in ("lib/kmatrix", "gpt2", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if "vendor" in path.parts:
                continue  # the words of other projects
            if path.suffix in READ or path.name.startswith("Kconfig"):
                inside = path.relative_to(ROOT / folder).parts[0].removesuffix(".py")
                name = "Kconfig" if path.name.startswith("Kconfig") else inside if folder == "lib/kmatrix" else folder
                found.setdefault(name, []).append(path)
    found["project"] = [ROOT / "README.md", ROOT / "Makefile", ROOT / "Kconfig", *(ROOT / "scripts").glob("*.*")]
    found["bench"] = sorted((ROOT / "bench").glob("*.py"))
    # This file and words.toml quote what they forbid.
    found["tests"] = sorted(path for path in (ROOT / "tests").rglob("*.py") if path.name != Path(__file__).name)
    return found


@cache
def texts(path: Path) -> tuple[Text, ...]:
    name = str(path.relative_to(ROOT))
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return tuple(_of_python(name, source))
    if path.suffix == ".js":
        return tuple(_of_script(name, source))
    if ".css" in path.suffixes:
        found = _CSS_COMMENT.finditer(source)
        return tuple(Text(name, 1 + source.count("\n", 0, one.start()), "comment", one[0]) for one in found)
    return tuple(Text(name, at, "prose", line) for at, line in enumerate(source.splitlines(), 1))


def _of_python(name: str, source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(name, node.lineno, "docstring" if id(node) in docs else "string", node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Text(name, node.lineno, "name", node.name.replace("_", " "))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(name, token.start[0], "comment", token.string)


def _of_script(name: str, source: str) -> Iterator[Text]:
    """Yield the comments, strings of more than one word, and names of functions of a script (JavaScript)."""
    for found in _JS_TEXT.finditer(source):
        kind, text = found.lastgroup or "", found[0]
        if kind == "name":
            text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
        if kind != "string" or " " in text:
            yield Text(name, 1 + source.count("\n", 0, found.start()), kind, text)


def is_exception(text: Text) -> bool:
    return any(
        text.path.startswith(exception["path"]) and re.search(exception["text"], text.text) for exception in EXCEPTIONS
    )


@pytest.mark.parametrize("area", areas())
def test_no_retired_term(area):
    found = []
    for path in areas()[area]:
        for text in texts(path):
            for term, instead in RULES["terms"].items():
                hit = re.search(rf"(?<![\w-])(?:{term})", text.text, re.IGNORECASE)
                if hit and not is_exception(text):
                    found.append(f"{text}\n    {hit[0]!r}: say {instead}")
    assert not found, f"{len(found)} places\n" + "\n".join(found)


@pytest.mark.parametrize("area", areas())
def test_no_sentence_of_version_0_1_that_was_a_riddle(area):
    found = []
    for path in areas()[area]:
        whole = " ".join(path.read_text(encoding="utf-8").split())
        found += [f"{path.relative_to(ROOT)}: {sentence}" for sentence in RULES["sentences"] if sentence in whole]
    assert not found, "\n".join(found)


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [getattr(decorator, "attr", getattr(decorator, "id", "")) for decorator in node.decorator_list]
    return any(name in ("property", "cached_property") for name in names)


@pytest.mark.parametrize("area", [name for name in areas() if name not in ("docs", "Kconfig", "project", "tests")])
def test_a_functions_docstring_begins_with_a_verb(area):
    """The docstring of a property begins with a noun; no docstring begins with a question word.

    Tests are excluded: the docstring of a fixture describes a value, that of a test explains its rule.
    """
    found = []
    for path in areas()[area]:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (doc := ast.get_docstring(node)):
                continue
            first = doc.split()[0].rstrip(".,:;")
            if first in QUESTIONS or (not _is_property(node) and first not in VERBS):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {doc.splitlines()[0]}")
    assert not found, f"{len(found)} docstrings\n" + "\n".join(found)


def test_the_name_of_a_test_begins_with_its_subject():
    """Say `unknown_values_are_dashes` instead of `what_is_unknown_is_a_dash`."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in areas()["tests"]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if node.name.split("_")[1].capitalize() in QUESTIONS
    ]
    assert not found, "\n".join(found)


def test_no_retired_class_or_module():
    classes = {
        node.name: path
        for name, paths in areas().items()
        for path in paths
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert not set(RULES["classes"]) & set(classes)
    modules = {path.stem for folder in ("lib", "gpt2") for path in (ROOT / folder).rglob("*.py")}
    assert not set(RULES["modules"]) & modules


def test_each_class_name_is_used_once():
    seen: dict[str, list[str]] = {}
    for folder in ("lib/kmatrix", "gpt2"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    seen.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in seen.items() if len(paths) > 1} == {}


def test_each_exception_is_needed():
    all_texts = [text for paths in areas().values() for path in paths for text in texts(path)]
    for exception in EXCEPTIONS:
        assert exception["reason"]
        assert any(
            text.path.startswith(exception["path"]) and re.search(exception["text"], text.text) for text in all_texts
        ), exception
