"""Count the files that a reader opens to follow one command of kmatrix, and how often one of them again.

    python bench/trace_files.py [CHECKOUT] [--part NAME=FROM..UNTIL] [--brief] -- COMMAND [NAME=value ...]

Visit: the first call of a function of lib/kmatrix or gpt2 from another file, in the main thread, imports excluded.
A function with a body of one statement does not count: its name is enough. Path: the files of the visits in order,
consecutive duplicates merged. Return: a step of the path to a file that was left before. Control that comes back to the
caller is not a return, because the caller's page is still open. Two stricter counts follow in parentheses: with
one-line functions, and with first calls from the same file.

A part is the piece of the path between two visits. FROM and UNTIL are names of functions or prefixes of files;
alternatives are separated by commas, and the first that occurs counts.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
OURS = ("lib/kmatrix/", "gpt2/")
# A run starts where the runner reads the matrix that the plan created, and ends before its report. Version 0.1
# called that end `send_rest`.
RUNNING = "running=reopen..send_rest,wait_for_sync,report,report_in_short"
IS_FUNCTION = 1  # CO_OPTIMIZED: set in the code of functions, not of modules and class bodies


@dataclass(frozen=True)
class Visit:
    """The first call of a function."""

    file: str  # relative to the checkout
    name: str  # qualified
    caller: str  # file of the calling function, "" outside the project


class Tracer:
    """A profile function that records the first call of each function below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = f"{root.resolve()}/"
        self.visits: list[Visit] = []
        self._seen: set[object] = set()
        self._importing: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and self._importing and self._importing[-1] is frame:
            self._importing.pop()
        if event != "call":
            return
        if code.co_name == "<module>":
            self._importing.append(frame)
        elif not self._importing and code not in self._seen:
            self._seen.add(code)
            file = self._file(frame)
            if file and code.co_flags & IS_FUNCTION and not code.co_name.startswith("<"):
                self.visits.append(Visit(file, code.co_qualname, self._caller(frame)))

    def _caller(self, frame: FrameType) -> str:
        above = frame.f_back
        while above is not None and not self._file(above):  # a library in between, such as functools
            above = above.f_back
        return self._file(above) if above else ""

    def _file(self, frame: FrameType) -> str:
        file = frame.f_code.co_filename.removeprefix(self.root)
        return file if file.startswith(OURS) and file.endswith(".py") else ""  # not a template


def trace(root: Path, words: Sequence[str]) -> tuple[list[Visit], int]:
    """Run a command of a checkout in this process. Return its visits and its exit status."""
    sys.path[:0] = [str(root / "lib"), str(root)]
    from kmatrix.__main__ import main

    sys.argv = ["kmatrix", *words]
    tracer, status = Tracer(root), 0
    sys.setprofile(tracer)
    try:
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.setprofile(None)
    return tracer.visits, status


@cache
def statements(path: Path) -> Mapping[str, int]:
    """Return the statements in the body of each function, docstring excluded and nested ones included."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                body = child.body[1:] if ast.get_docstring(child, clean=False) is not None else child.body
                found[prefix + child.name] = sum(isinstance(one, ast.stmt) for part in body for one in ast.walk(part))
                visit(child, f"{prefix}{child.name}.<locals>.")
            else:
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def path_of(visits: Iterable[Visit], *, strict: bool = False) -> list[tuple[str, list[str]]]:
    """Return the files in order, each with the functions read there. strict: also first calls from the same file."""
    found: list[tuple[str, list[str]]] = []
    for visit in visits:
        if not strict and visit.caller == visit.file:
            continue
        if not found or found[-1][0] != visit.file:
            found.append((visit.file, []))
        found[-1][1].append(visit.name)
    return found


def count(path: Sequence[tuple[str, list[str]]]) -> str:
    """Return the number of different files and of returns."""
    files = len({file for file, _ in path})
    return f"{files} files, {len(path) - files} returns"


def between(visits: Sequence[Visit], bounds: str) -> Sequence[Visit]:
    """Return the visits of a part: from FROM, up to and without UNTIL."""
    first, _, last = bounds.partition("..")

    def find(names: str, start: int) -> Iterator[int]:
        wanted = tuple(filter(None, names.split(",")))
        for at, visit in enumerate(visits[start:], start):
            if visit.name in wanted or any("/" in one and visit.file.startswith(one) for one in wanted):
                yield at

    begin = next(find(first, 0), 0)
    return visits[begin : next(find(last, begin), len(visits))]


def show(root: Path, title: str, visits: Sequence[Visit], *, brief: bool) -> None:
    """Print the counts of a path, and its files with the functions that are read there."""
    kept = [visit for visit in visits if statements(root / visit.file).get(visit.name, 2) > 1]
    print(f"{title}: {count(path_of(kept))} (with one-line functions: {count(path_of(visits))}; ", end="")
    print(f"with calls from the same file: {count(path_of(kept, strict=True))})")
    seen: set[str] = set()
    for file, names in () if brief else path_of(kept):
        print(f"  {'again' if file in seen else '     '} {file}: {' '.join(names)}")
        seen.add(file)


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--part", action="append", default=[RUNNING], help="NAME=FROM..UNTIL: also count this part")
    parser.add_argument("--brief", action="store_true", help="counts only")
    asked = parser.parse_args(sys.argv[1:at])
    root = asked.checkout.resolve()
    os.chdir(root)
    visits, status = trace(root, sys.argv[at + 1 :])
    show(root, "all", visits, brief=asked.brief)
    for part in asked.part:
        title, _, bounds = part.partition("=")
        if (some := between(visits, bounds)) != visits:
            show(root, title, some, brief=asked.brief)
    sys.exit(status)


if __name__ == "__main__":
    main()
