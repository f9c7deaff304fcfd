"""What a run costs beyond torchrun itself: the same trivial trainer by hand and by the launcher, in turns.

    python bench/launch.py [--rounds 7]

Prints medians, smallest and greatest, in seconds. The aim: an overhead below 1.5 s a run.
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
    """Measure in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    by_hand, by_launcher = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            by_hand.append(hand(Path(folder) / f"hand{number}"))
            by_launcher.append(launcher(Path(folder) / f"launcher{number}"))
    differences = [ours - theirs for ours, theirs in zip(by_launcher, by_hand, strict=True)]
    print(f"rounds          {rounds}")
    print(f"torchrun alone  {statistics.median(by_hand):.3f} s  ({min(by_hand):.3f} to {max(by_hand):.3f})")
    print(f"by the launcher {statistics.median(by_launcher):.3f} s  ({min(by_launcher):.3f} to {max(by_launcher):.3f})")
    print(f"overhead a run  {statistics.median(differences):.3f} s  ({min(differences):.3f} to {max(differences):.3f})")


def hand(folder: Path) -> float:
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
    """Return the wall time (s) of one run in a matrix of its own size."""
    plan = make(folder)
    begun = time.perf_counter()
    outcome = drive(MatrixDir(folder), [plan], LocalEngine(Path(sys.executable), ROOT), show=lambda _: None)
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
