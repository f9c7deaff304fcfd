"""Measure the reports of a large matrix: time, memory and size, next to their goals.

    python bench/report_page.py [--runs 1000] [--lines 20000] [--gpus 4] [--rounds 3] [--keep FOLDER] [--uncached]

The runs have logs of about so many lines, and recordings of their GPUs at one sample per second; the seeds of a
configuration share them as hard links. Each command is its own process, and the medians of several rounds count.
--keep: the folder in which the matrix is made; it stays, and is used again.
--uncached: one round without any curves.json too: every log is read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "bench")]
COMMANDS = ("summary", "report")
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The limits of `make report` of 1,000 runs."""

    wall: float = 6.0  # s
    memory: float = 250.0  # MiB, peak
    page: float = 4.0  # MB, 10**6 bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per command. Returns 1 if a goal is missed at full size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--lines", type=int, default=20_000, help="of each log")
    parser.add_argument("--gpus", type=int, default=4, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per command; the medians are printed")
    parser.add_argument("--keep", type=Path, help="the folder of the matrix, which stays")
    parser.add_argument("--uncached", action="store_true", help="also the first report of a matrix without curves")
    args = parser.parse_args(argv)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with _folder(args.keep) as folder:
        since = time.perf_counter()
        matrix = _matrix(folder, args.runs, args.lines, args.gpus)
        print(f"{args.runs:,} runs x {args.lines:,} lines, {args.gpus} GPUs each: {time.perf_counter() - since:.0f} s")
        missed = [_print(command, matrix, args.rounds) for command in COMMANDS]
        if args.uncached:
            for path in matrix.glob("*/curves.json"):
                path.unlink()
            _print("report", matrix, 1, " without curves")
    return int(any(missed) and args.runs == parser.get_default("runs"))


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder of the matrix: the one to keep, or a temporary one."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _matrix(folder: Path, runs: int, lines: int, gpus: int) -> Path:
    """Make the matrix if the folder does not have it, and return its directory."""
    from large_matrix import make_logged_matrix

    there = [path for path in folder.glob("test_matrix_results_*") if (path / "status.json").exists()]
    return there[0] if there else make_logged_matrix(folder, runs, lines=lines, gpus=gpus).path


def _print(command: str, matrix: Path, rounds: int, note: str = "") -> bool:
    """Measure a command, and print its median cost; return whether it misses a goal."""
    from reports import Cost, measure

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "lib"), str(ROOT)])
    goals = Goals()
    costs: list[Cost] = [
        measure([sys.executable, "-m", "kmatrix", command, f"TARGET={matrix}"], ROOT) for _ in range(max(1, rounds))
    ]
    for failed in {cost.failed for cost in costs if cost.failed}:
        sys.exit(f"{command}: {failed}")
    wall, cpu = (statistics.median(values) for values in zip(*((cost.wall, cost.cpu) for cost in costs), strict=True))
    memory = max(cost.memory for cost in costs)
    page = matrix / "report.html"
    size = page.stat().st_size / 1e6 if command == "report" and page.exists() else 0.0
    missed = wall > goals.wall or memory > goals.memory or size > goals.page
    text = f"{wall:6.2f} s of {goals.wall:g} {cpu:8.2f} s CPU {memory:6.0f} MiB of {goals.memory:g}"
    text += f" {size:6.2f} MB of {goals.page:g}" if size else ""
    print(f"  {command + note:24}{text}{'' if note else '  MISSED' if missed else '  met'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
