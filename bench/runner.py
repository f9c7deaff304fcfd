"""Measure what an attempt costs besides its training.

    python bench/runner.py [--rounds 5]

The trainer is a model of nothing: each rank notes when its first step would begin, and ends. So a figure is the time
from the start of the program to the first step of the last rank, and the CPU time of all processes of the attempt.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import Found, compare_with_goals, run

from kmatrix.records.files import read_json, write_json

TRAINER = """
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
(run / f"first.{os.environ['RANK']}").write_text(repr(time.time()))
if os.environ["RANK"] == "0":
    result = {"schema": 1, "run_id": "id", "attempt": 1, "status": "finished", "step": 0, "final_val_loss": 1.0}
    (run / "result.json").write_text(json.dumps(result))
"""


def measure(smallest: bool) -> Iterator[Found]:
    """Measure an attempt once."""
    first, cpu = attempt(1 if smallest else 2)
    yield Found(what="to the first step, wall", value=first, unit="s")
    yield Found(what="whole attempt, CPU", value=cpu, unit="s")


def attempt(ranks: int) -> tuple[float, float]:
    """Run an attempt; return the time to the first step and the CPU time (s)."""
    with tempfile.TemporaryDirectory() as folder:
        matrix = Path(folder) / "m"
        train = {"device": "cpu", "num_gpus": ranks, "cpu_threads": 1, "max_iters": 0}
        one = {"name": "a", "run_id": "id", "train": train}
        write_json(matrix / "matrix.json", {"name": "m", "runs": [one]})
        (matrix / "config.txt").touch()
        (matrix / "code/gpt2").mkdir(parents=True)
        (matrix / "code/gpt2/__init__.py").touch()
        (matrix / "code/gpt2/train.py").write_text(TRAINER, encoding="utf-8")
        words = ["-m", "kmatrix", "run", str(matrix / "a")]
        since = time.time()
        cost = run([sys.executable, *words])
        assert read_json(matrix / "a/result.json")["status"] == "finished"
        firsts = [float((matrix / f"a/first.{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
        return max(firsts) - since, cost.cpu


if __name__ == "__main__":
    sys.exit(compare_with_goals(__doc__, measure))
