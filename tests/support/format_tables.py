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
    """Return the fields of a type as a table: name in the file, type, and the comment of the source."""
    module, _, of = name.rpartition(".")
    lines = inspect.getsource(getattr(import_module(module), of)).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    rows = ["| field | type | meaning |", "|---|---|---|"]
    for node in body.body:
        if isinstance(node, ast.AnnAssign):
            rows.append(f"| `{_name(node)}` | {_type(node.annotation)} | {_comment(lines, node)} |")
    return "\n".join([*rows, ""])


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


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment behind a field, else the ones above it."""
    if behind := re.search(r"  # (.*)$", lines[node.end_lineno - 1]):
        return behind[1].replace("|", "\\|").replace("<", "&lt;").replace("None", "null")
    above, at = [], node.lineno - 2
    while (found := re.fullmatch(r"\s+# (.*)", lines[at])) is not None:
        above.insert(0, found[1])
        at -= 1
    return " ".join(above)
