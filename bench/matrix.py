"""Measure time and memory of the expansion of large matrices. Each size runs in its own process.

python bench/matrix.py [CELLS ...]
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = (100, 1_000, 10_000, 100_000)
LIMIT_S, LIMIT_MIB = 5.0, 500.0  # for 100,000 cells


def expand_cells(cells: int) -> None:
    """Expand 5 optimizers x 4 schedules x 2 precisions x seeds, and print one row of the table."""
    from kmatrix.config import RULES
    from kmatrix.kconfig.tree import Tree
    from kmatrix.matrix.axes import parse_override, plan_axes
    from kmatrix.matrix.expand import expand

    tree = Tree.parse(srctree=ROOT)
    seeds = ",".join(map(str, range(max(1, cells // 40))))
    words = {
        "OPTIMIZER": "sgd,adam,adamw,muon,adafactor",
        "SCHEDULE": "cosine,linear,constant,wsd",
        "DTYPE": "fp32,bf16",
        "SEED": seeds,
        "DEVICE": "cpu",
        "NUM_GPUS": "1",
    }
    asked = dict(parse_override(tree, name, text) for name, text in words.items())
    base = [values[0] for values in asked.values() if len(values) == 1]
    axes = plan_axes(tree, base, asked)
    started, used = time.perf_counter(), time.process_time()
    matrix = expand(tree, base, axes, RULES)
    seconds, used = time.perf_counter() - started, time.process_time() - used
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    assert len({run.name for run in matrix.runs}) == len(matrix.runs)
    kept = seconds < LIMIT_S and memory < LIMIT_MIB
    mark = (" kept" if kept else " NOT KEPT") if matrix.cells == SIZES[-1] else ""
    numbers = f"{seconds:10.3f}{used:10.3f}{1e6 * used / matrix.cells:10.1f}{memory:10.0f}"
    print(f"{matrix.cells:9,}{len(matrix.runs):9,}{numbers}{mark}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", type=int, nargs="*", default=SIZES)
    parser.add_argument("--worker", action="store_true", help="measure one size in this process")
    args = parser.parse_args()
    if args.worker:
        expand_cells(args.cells[0])
        return
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"limit for {SIZES[-1]:,} cells: {LIMIT_S:.0f} s, {LIMIT_MIB:.0f} MiB")
    print(f"{'cells':>9}{'runs':>9}{'s':>10}{'CPU s':>10}{'us/cell':>10}{'MiB':>10}", flush=True)
    for size in args.cells:  # in a process each: ru_maxrss is the peak of the whole life of a process
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}:{ROOT}"}
        subprocess.run([sys.executable, __file__, "--worker", str(size)], env=environment, check=True)


if __name__ == "__main__":
    main()
