"""Read the documentation pages, the code on them, and the targets of the Makefile."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from skips import require_program

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@cache
def page_text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def run_make(*arguments: str) -> str:
    """Return the output of GNU make."""
    command = [str(require_program("make")), "--no-print-directory", *arguments]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout


@cache
def make_targets() -> frozenset[str]:
    """Return every target in make's own database."""
    files = run_make("-npq", "help").partition("# Files")[2]
    return frozenset(re.findall(r"^([\w.+-]+):(?!=)", re.sub(r"# Not a target:\n.*", "", files), re.MULTILINE))


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page_text(page))


def code_of(page: Path) -> Iterator[str]:
    """Yield every line of code on a page that could be a command, and every inline code."""
    for language, body in FENCE.findall(page_text(page)):
        yield from (line for line in body.splitlines() if language != "console" or line.startswith("$ "))
    yield from INDENTED.findall(prose(page))
    yield from INLINE.findall(prose(page))


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """Yield the arguments of each command on a page that starts `program`."""
    for line in code_of(page):
        for part in re.split(r"&&|\|\||[;|] ", line.strip().removeprefix("$ ")):
            command = re.sub(r"<[^>]*>", "<>", re.sub(r"\s+#.*", "", part.strip()))
            if re.fullmatch(rf"{program}( -?[a-z][\w.+<>-]*| [A-Z_]+=.*)+", command):
                yield shlex.split(command)[1:]


def target_exists(name: str) -> bool:
    """Return whether make has the target; the files of a defconfig must exist too."""
    if name in make_targets():
        return True
    if name.startswith("defconfig-"):
        base, *fragments = name.removeprefix("defconfig-").split("+")
        files = [ROOT / "defconfigs" / base]
        files += [ROOT / "defconfigs" / "fragments" / f"{fragment}.config" for fragment in fragments]
        return "<" in name or all(file.is_file() for file in files)
    return False


def fenced_blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page that are in `language`."""
    return [body for block_language, body in FENCE.findall(page_text(page)) if block_language == language]
