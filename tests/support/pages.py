"""The pages of the documentation, the code on them, and the targets that make knows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from skips import need

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def make(*words: str) -> str:
    """Return the output of GNU make."""
    command = [str(need("make")), "--no-print-directory", *words]
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False).stdout


@cache
def make_targets() -> frozenset[str]:
    """Every target that make itself knows, from its database."""
    files = make("-npq", "help").partition("# Files")[2]
    return frozenset(re.findall(r"^([\w.+-]+):(?!=)", re.sub(r"# Not a target:\n.*", "", files), re.MULTILINE))


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", text(page))


def code(page: Path) -> Iterator[str]:
    """Every line of code of a page that could be a command, and every inline code."""
    for language, body in FENCE.findall(text(page)):
        yield from (line for line in body.splitlines() if language != "console" or line.startswith("$ "))
    yield from INDENTED.findall(prose(page))
    yield from INLINE.findall(prose(page))


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """Return the arguments of each command of a page that starts a program."""
    for line in code(page):
        for part in re.split(r"&&|\|\||[;|] ", line.strip().removeprefix("$ ")):
            command = re.sub(r"<[^>]*>", "<>", re.sub(r"\s+#.*", "", part.strip()))
            if re.fullmatch(rf"{program}( -?[a-z][\w.+<>-]*| [A-Z_]+=.*)+", command):
                yield shlex.split(command)[1:]


def target_exists(name: str) -> bool:
    """Whether make has the target; a defconfig needs its files too."""
    if name in make_targets():
        return True
    if name.startswith("defconfig-"):
        base, *fragments = name.removeprefix("defconfig-").split("+")
        files = [ROOT / "defconfigs" / base]
        files += [ROOT / "defconfigs" / "fragments" / f"{fragment}.config" for fragment in fragments]
        return "<" in name or all(file.is_file() for file in files)
    return False


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language."""
    return [body for found, body in FENCE.findall(text(page)) if found == language]
