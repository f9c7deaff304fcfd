"""Measure what an attempt costs besides its training, next to a former commit.

    python bench/runner.py [--ranks 2] [--rounds 5] [--against ../former]

The trainer is a model of nothing: each rank notes when its first step would begin, and ends. So a figure is the time
from the start of the program to the first step of the last rank, and the CPU time of all processes of the attempt.
--against: another checkout, measured in the same run, in turns: `kmatrix run` of a checkout, or before it the runner
that starts torchrun. Each figure is the median of its rounds. The exit status is 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, environment, machine, run, table

from kmatrix.records.files import read_json, write_json

GOAL = 0.5  # of the other checkout's time and CPU time
TRAINER = """
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
(run / f"first.{os.environ['RANK']}").write_text(repr(time.time()))
if os.environ["RANK"] == "0":
    result = {"schema": 1, "run_id": "id", "attempt": 1, "status": "finished", "step": 0, "final_val_loss": 1.0}
    (run / "result.json").write_text(json.dumps(result))
"""
FORMER = """
import sys
from pathlib import Path
from kmatrix.engines.local.engine import LocalEngine
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.loop import drive
from kmatrix.status.state import RunPlan
matrix, root, ranks = MatrixDir(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
plan = RunPlan(
    name="a", run_id="id", dir=matrix.run("a"), ranks=ranks, command=(str(matrix.path / "code/gpt2/train.py"),)
)
drive(matrix, [plan], LocalEngine(Path(sys.executable), root), on_progress=lambda _: None)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args(argv)
    checkouts = [ROOT, *([args.against.resolve()] if args.against else [])]
    print(machine(), flush=True)
    rounds = [[attempt(checkout, args.ranks) for checkout in checkouts] for _ in range(args.rounds)]
    rows, is_missed = [], False
    for place, what in enumerate(("to the first step, wall", "whole attempt, CPU")):
        medians = [statistics.median(one[which][place] for one in rounds) for which in range(len(checkouts))]
        share = medians[0] / medians[1] if args.against else None
        is_missed |= share is not None and share > GOAL
        rows.append([what, *(f"{value:.2f} s" for value in medians), "" if share is None else f"{share:.0%}"])
    print(table([f"{args.ranks} ranks", "here", *(["against", "share"] if args.against else [""])], rows))
    return int(is_missed)


def attempt(checkout: Path, ranks: int) -> tuple[float, float]:
    """Run an attempt with the code of a checkout; return the time to the first step and the CPU time (s)."""
    with tempfile.TemporaryDirectory() as folder:
        matrix = Path(folder) / "m"
        train = {"device": "cpu", "num_gpus": ranks, "cpu_threads": 1, "max_iters": 0}
        one = {"name": "a", "run_id": "id", "train": train}
        write_json(matrix / "matrix.json", {"name": "m", "runs": [one]})
        (matrix / "config.txt").touch()
        (matrix / "code/gpt2").mkdir(parents=True)
        (matrix / "code/gpt2/__init__.py").touch()
        (matrix / "code/gpt2/train.py").write_text(TRAINER, encoding="utf-8")
        if (checkout / "lib/kmatrix/runner/program.py").exists():
            words = ["-m", "kmatrix", "run", str(matrix / "a")]
        else:
            write_json(matrix / "a/run.json", {**one, "matrix": "m"})
            words = ["-c", FORMER, str(matrix), str(checkout), str(ranks)]
        since = time.time()
        cost = run([sys.executable, *words], checkout, environment(checkout))
        assert read_json(matrix / "a/result.json")["status"] == "finished"
        firsts = [float((matrix / f"a/first.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
        return max(firsts) - since, cost.cpu


if __name__ == "__main__":
    sys.exit(main())
