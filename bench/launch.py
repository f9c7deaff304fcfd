"""Measure the overhead of the runner: the same trivial trainer started by torchrun alone and by kmatrix, interleaved.

    python bench/launch.py [--rounds 7]

Prints median, minimum and maximum in seconds. The goal is an overhead below 1.5 s per run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "lib")]

from kmatrix.engines.local.engine import LocalEngine
from kmatrix.records.files import write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.loop import drive
from kmatrix.status.state import RunPlan

TRAINER = ROOT / "tests" / "support" / "fakes.py"


def main() -> None:
    """Measure both, interleaved, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    alone, launched = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            alone.append(torchrun(Path(folder) / f"torchrun{number}"))
            launched.append(launcher(Path(folder) / f"launcher{number}"))
    # Per round, because the speed of the machine drifts: the difference of the medians would include the drift.
    overheads = [ours - theirs for ours, theirs in zip(launched, alone, strict=True)]
    print(f"rounds            {rounds}")
    print(f"torchrun alone    {statistics.median(alone):.3f} s  ({min(alone):.3f} to {max(alone):.3f})")
    print(f"kmatrix           {statistics.median(launched):.3f} s  ({min(launched):.3f} to {max(launched):.3f})")
    print(f"overhead per run  {statistics.median(overheads):.3f} s  ({min(overheads):.3f} to {max(overheads):.3f})")


def torchrun(folder: Path) -> float:
    """Return the wall time (s) of one run with torchrun called directly."""
    plan = make(folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    begun = time.perf_counter()
    with plan.dir.output_log.open("wb") as log:
        subprocess.run(
            [*command, *plan.command, str(plan.dir.path)], cwd=ROOT, env=env, stdout=log, stderr=log, check=True
        )
    return time.perf_counter() - begun


def launcher(folder: Path) -> float:
    """Return the wall time (s) of one run in a matrix of one run."""
    plan = make(folder)
    begun = time.perf_counter()
    outcome = drive(MatrixDir(folder), [plan], LocalEngine(Path(sys.executable), ROOT), on_progress=lambda _: None)
    seconds = time.perf_counter() - begun
    if outcome.exit_code:
        raise SystemExit(plan.dir.status.read_text())
    return seconds


def make(folder: Path) -> RunPlan:
    """Create a run of zero steps and return its plan."""
    run = MatrixDir(folder).run("a")
    write_json(run.run_json, {"run_id": "id", "name": "a", "train": {"max_iters": 0, "peak_tflops": None}})
    return RunPlan(name="a", run_id="id", dir=run, ranks=1, command=(str(TRAINER), "--behave=quick"))


if __name__ == "__main__":
    main()
