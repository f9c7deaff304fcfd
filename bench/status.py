"""Measure `make status` on a matrix of many runs: the median time of a process, its start included.

    python bench/status.py [CHECKOUT] [--runs 100] [--rounds 9]

The goal is less than 0.3 s for 100 runs on an idle machine. With CHECKOUT, its code is measured on the same matrix.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT / "tests" / "support")]
from records_factory import make_matrix, runs_with_seeds

GOAL_S = 0.3


def seconds(checkout: Path, target: Path) -> float:
    """Return the wall time (s) of one `kmatrix status`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "lib")}
    command = [sys.executable, "-m", "kmatrix", "status", f"TARGET={target}"]
    since = time.perf_counter()
    subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - since


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses = [3.2 + 0.001 * number for number in range(asked.runs)]
        matrix = make_matrix(Path(folder), runs_with_seeds(asked.runs, losses))
        checkout = asked.checkout.resolve()
        seconds(checkout, matrix.path)  # byte code and the page cache
        times = sorted(seconds(checkout, matrix.path) for _ in range(asked.rounds))
    print(
        f"status of {asked.runs} runs: median {statistics.median(times):.3f} s of {asked.rounds} rounds "
        f"({times[0]:.3f} to {times[-1]:.3f} s), goal {GOAL_S} s for 100 runs; "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
