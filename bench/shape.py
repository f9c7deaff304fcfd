"""Measure the shape of a checkout: modules, functions, imports in functions, untyped mappings, comments, paths.

    python bench/shape.py [CHECKOUT] [--no-run]

`__init__` and `__main__` modules are not counted. The lines of a function include its docstring. A comment line is one
that holds a comment and nothing else. --no-run leaves out the path of a run, which trains two runs on the CPU.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRACE = Path(__file__).with_name("trace_files.py")
DEFCONFIG = "defconfig-gpt2-cpu-quick"
SHORT = ("MAX_ITERS=10", "EVAL_INTERVAL=5", "EVAL_SAMPLES=12", "NUM_GPUS=1")  # with the defconfig: two runs


@dataclass(frozen=True)
class Module:
    """One source file."""

    package: str  # `kmatrix/cli`; `kmatrix` and `gpt2` for the modules next to the packages
    lines: int
    comments: int  # lines that hold only a comment
    functions: tuple[int, ...]  # lines of each
    imports_in_functions: int  # statements
    untyped: int  # occurrences of Mapping[str, Any]


def read(root: Path, path: Path, source: str) -> Module:
    """Measure one file."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    nested = {
        id(inner)
        for function in functions
        for inner in ast.walk(function)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }
    parts = path.relative_to(root).parts[:-1]
    return Module(
        package="/".join(parts[:2]),
        lines=len(source.splitlines()),
        comments=sum(line.lstrip().startswith("#") for line in comment_lines(source)),
        functions=tuple((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions),
        imports_in_functions=len(nested),
        untyped=len(re.findall(r"Mapping\[str, Any\]", source)),
    )


def comment_lines(source: str) -> Iterator[str]:
    """Yield each line with a comment; a `#` in a string is not one."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.line


def modules(root: Path) -> list[Module]:
    """Measure every module of the control side and of the trainer."""
    found = []
    for base, folder in ((root / "lib", root / "lib" / "kmatrix"), (root, root / "gpt2")):
        for path in sorted(folder.rglob("*.py")):
            if path.stem not in ("__init__", "__main__"):
                found.append(read(base, path, path.read_text(encoding="utf-8")))
    return found


def row(title: str, some: Sequence[Module]) -> str:
    lengths = [module.lines for module in some]
    return f"{title:22}{len(some):>8}{sum(lengths):>8}{statistics.median(lengths):>8.0f}{max(lengths):>8}"


def totals(title: str, some: Sequence[Module]) -> Iterator[str]:
    """Yield the totals of one side."""
    lengths = sorted(length for module in some for length in module.functions)
    lines, comments = sum(module.lines for module in some), sum(module.comments for module in some)
    yield (
        f"{title}: {len(lengths)} functions, median {statistics.median(lengths):.0f}, "
        f"p90 {lengths[int(0.9 * len(lengths))]}, longest {lengths[-1]} lines"
    )
    yield (
        f"{title}: {sum(module.imports_in_functions for module in some)} imports in functions, "
        f"{sum(module.untyped for module in some)} x Mapping[str, Any], "
        f"{100 * comments / lines:.1f} % comment lines ({comments} of {lines})"
    )


def paths(root: Path, *, run: bool) -> Iterator[str]:
    """Yield the counts of trace_files.py for a dry run and for a run, in a directory without data."""
    with tempfile.TemporaryDirectory() as folder:
        place = (f"O={folder}", f"DATA_DIR={folder}/data", f"RESULTS_DIR={folder}")
        traced(root, DEFCONFIG, place[0])
        yield f"dry run: {counts(traced(root, 'test-matrix-dry-run', *place), 'all')}"
        if run:
            yield f"run of two: {counts(traced(root, 'test-matrix', *SHORT, *place), 'running')}"


def traced(root: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(TRACE), str(root), "--brief", "--", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed in {root}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def counts(output: str, title: str) -> str:
    """Return the counts of one part."""
    (line,) = (line for line in output.splitlines() if re.match(rf"{title}: \d+ files", line))
    return line.partition(": ")[2]


def report(root: Path, *, run: bool) -> Iterable[str]:
    """Yield the lines of the table."""
    found = modules(root)
    control = [module for module in found if module.package.startswith("kmatrix")]
    trainer = [module for module in found if module.package.startswith("gpt2")]
    yield f"{'package':22}{'modules':>8}{'lines':>8}{'median':>8}{'longest':>8}"
    for package in sorted({module.package for module in found}):
        yield row(package, [module for module in found if module.package == package])
    for title, some in (("all of lib/kmatrix", control), ("all of gpt2", trainer)):
        yield row(title, some)
    for title, some in (("lib/kmatrix", control), ("gpt2", trainer)):
        yield from totals(title, some)
    yield from paths(root, run=run)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--no-run", action="store_true", help="leave out the path of a run")
    asked = parser.parse_args()
    for line in report(asked.checkout.resolve(), run=not asked.no_run):
        print(line, flush=True)


if __name__ == "__main__":
    main()
