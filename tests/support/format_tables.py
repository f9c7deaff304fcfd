"""The tables of docs/formats.md, made of the types that read the files and their comments."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module

MARK = re.compile(r"<!-- fields of (?P<type>[\w.]+) -->\n(?P<table>(?:\|.*\n)*)")
# How the page calls what an annotation allows.
WORDS = {
    "Count": "count", "Size": "count", "Int": "integer", "int": "integer", "Number": "number", "Amount": "number",
    "float": "number", "UnixTime": "Unix s", "str": "text", "RunName": "text", "bool": "true or false", "None": "null",
    "Scalar": "value", "Any": "value", "Nanoseconds": "ns", "SyncState": "text",
}  # fmt: skip


def page_with_tables(text: str) -> str:
    """Return a page with the table of each type that it marks by <!-- fields of module.Type -->."""
    return MARK.sub(lambda match: f"<!-- fields of {match['type']} -->\n{table(match['type'])}", text)


def table(name: str) -> str:
    """Return the fields of a type as a table: name in the file, type, and what the source says about it."""
    module, _, of = name.rpartition(".")
    rows: dict[str, str] = {}
    for kind in reversed(getattr(import_module(module), of).__mro__):  # inherited fields first
        if kind.__module__.startswith("kmatrix."):
            rows |= _rows(inspect.getsource(kind).splitlines())
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows.values(), ""])


def _rows(lines: list[str]) -> dict[str, str]:
    """Return the row of each field of a class."""
    (body,) = ast.parse("\n".join(lines)).body
    fields = [node for node in body.body if isinstance(node, ast.AnnAssign)]
    return {
        node.target.id: f"| `{_name(node)}` | {_type(node.annotation)} | {_meaning(lines, node)} |" for node in fields
    }


def _name(node: ast.AnnAssign) -> str:
    """Return the name of a field in the file, which `field(name=...)` may change."""
    words = {word.arg: word.value.value for word in getattr(node.value, "keywords", ()) if word.arg == "name"}
    return words.get("name", node.target.id)


def _type(node: ast.expr) -> str:
    """Return an annotation in words."""
    if isinstance(node, ast.BinOp):
        return f"{_type(node.left)} or {_type(node.right)}"
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "Annotated":
            return _type(inner[0])
        if node.value.id == "dict":
            return "object"
        if node.value.id == "tuple" and not isinstance(inner[-1], ast.Constant):
            return " and ".join(map(_type, inner))
        return f"list of {_type(inner[0])}"
    text = ast.unparse(node)
    return WORDS.get(text, "object")


def _meaning(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the description of a field, or the comment behind it, else the ones above it."""
    for call in ast.walk(node.annotation):
        if isinstance(call, ast.Call) and (found := [w.value for w in call.keywords if w.arg == "description"]):
            return _escaped("".join(part.value for part in ast.walk(found[0]) if isinstance(part, ast.Constant)))
    return _comment(lines, node)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("None", "null")


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment behind a field, else the ones above it."""
    if behind := re.search(r"  # (.*)$", lines[node.end_lineno - 1]):
        return _escaped(behind[1])
    above, at = [], node.lineno - 2
    while (found := re.fullmatch(r"\s+# (.*)", lines[at])) is not None:
        above.insert(0, found[1])
        at -= 1
    return " ".join(above)
