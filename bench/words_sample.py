"""Print a random sample of docstrings and messages, for a review of the English.

    python bench/words_sample.py [SEED] [--count 60] [--checkout DIR]

Messages: the strings of errors, of print, say and tell, the help of commands and options, and Kconfig prompts.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAYS = frozenset({"print", "say", "tell", "Command", "add_argument", "ArgumentParser"})
ERROR = re.compile(r"(Error|Failure|Refused)$")
PROMPT = re.compile(r'^\s*(?:bool|string|int|hex|prompt|menu|comment|mainmenu)\s+"(.+)"')
HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_files(root: Path) -> list[Path]:
    folders = (root / "lib" / "kmatrix", root / "gpt2", root / "scripts")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, HOLDERS) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each message, with values as {expression}."""
    if path.name.startswith("Kconfig"):
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if found := PROMPT.match(line):
                yield at, found[1]
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and is_message(node.func):
            parts = [
                text for value in (*node.args, *(word.value for word in node.keywords)) if (text := text_of(value))
            ]
            if any(" " in text for text in parts):
                yield node.lineno, " / ".join(parts)


def is_message(function: ast.expr) -> bool:
    """Return whether a call of this function takes text for the user."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in SAYS or bool(ERROR.search(name))


def text_of(value: ast.expr) -> str:
    """Return a string, or a formatted one with its expressions in braces; "" for anything else."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else ""
    if isinstance(value, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else text_of(part)
            for part in value.values
        )
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seed", type=int, nargs="?", default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    asked = parser.parse_args()
    root, dice = asked.checkout.resolve(), random.Random(asked.seed)
    sources = python_files(root)
    kconfig = sorted(path for folder in (root / "lib", root / "gpt2") for path in folder.rglob("Kconfig*"))
    for title, read, paths in (("docstrings", docstrings, sources), ("messages", messages, [*sources, *kconfig])):
        found = [(path.relative_to(root), line, text) for path in paths for line, text in read(path)]
        print(f"{asked.count} of {len(found)} {title}, seed {asked.seed}\n")
        for path, line, text in sorted(dice.sample(found, min(asked.count, len(found)))):
            print(f"{path}:{line}: {text}\n")


if __name__ == "__main__":
    main()
