"""Every error message is documented, and every command in a hint exists."""

from __future__ import annotations

import ast
import re
from functools import cache

from kmatrix import errors
from pages import DOCS, INLINE, ROOT, page_text, prose, target_exists

SOURCES = sorted([*(ROOT / "lib").rglob("*.py"), *(ROOT / "gpt2").rglob("*.py")])
ERRORS = {name for name in dir(errors) if name.endswith("Error")}
SHORTEST_WORDS = 7  # minimum length of a text that is searched for
VALUES = re.compile(  # values that examples of the page insert into messages
    r"\.\.\.|'[^']*'|\"[^\"]*\"|\b[A-Z][A-Z0-9_]*\b|[\d.]+|[$:;,\[\]()<>=]+"
    r"|\b(?:stdlib|gpt2|nan|step|s|stopped at|label|float|string|bool|symbol|name|menuconfig|train)\b"
)
ENGLISH = {"it", "one", "room", "the"}  # words after a verb that do not name a program
MAKE_MESSAGES = {"No rule to make target"}  # messages of make itself


def literal_parts(node: ast.expr) -> list[str]:
    """Return the parts of a string expression in the source, without the inserted values."""
    if isinstance(node, ast.IfExp):
        return literal_parts(node.body) + literal_parts(node.orelse)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


@cache
def source_nodes() -> list[ast.AST]:
    return [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def test_every_message_in_troubleshooting_is_printed_by_the_code():
    """The words between the values of a message (numbers, NAMES, quoted words, dots) must be in the sources."""
    texts = [text for node in source_nodes() if isinstance(node, ast.expr) for text in literal_parts(node)]
    sources = "\n".join([*texts, (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")])
    rows = re.findall(r"^\| (`.*?) \| ", prose(DOCS / "troubleshooting.md"), re.MULTILINE)
    for message in (message for row in rows for message in INLINE.findall(row)):
        for words in filter(None, (part.strip() for part in VALUES.split(message))):
            assert words in sources or message in MAKE_MESSAGES, f"{message!r}: {words!r}"


def test_every_error_is_documented():
    """Some words of its first two parts, what and why, must be on a page."""
    known = "\n".join(page_text(page) for page in DOCS.glob("*.md"))
    calls = [node for node in source_nodes() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    missing = []
    for call in (call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ERRORS):
        parts = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "why")]
        words = [words.strip(" :,") for part in parts for words in literal_parts(part)]
        words = [text for text in words if len(text) >= SHORTEST_WORDS]
        if words and not any(text in known for text in words):
            missing.append(words)
    assert not missing, "add a row to docs/troubleshooting.md"


def test_every_command_in_a_hint_exists():
    calls = [node for node in source_nodes() if isinstance(node, ast.Call)]
    hints = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "hint"]
    targets = {
        name for hint in hints for words in literal_parts(hint) for name in re.findall(r"\bmake ([a-z][\w-]*)", words)
    }
    missing = {name for name in targets - ENGLISH if not target_exists(name) and name != "defconfig-"}
    assert not missing
