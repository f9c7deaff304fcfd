"""Measure the checkpoints of a run: what training waits for, until one is on disk, and what a resume takes.

    python bench/checkpoint.py [MODEL=124m] [--against ../former] [--rounds 3] [--threads 2] [--folder DISK]

Whole runs of a model with AdamW's states on the CPU, one sequence of 32 tokens per step, with a checkpoint after each
fourth step. Rounds alternate. Wall seconds:

step         time of a step
save         what training waits for a save: the time between two saves less that of its steps
on disk      from the end of the step to the last byte of its checkpoint, next to training
resume       from the start of the program to the first step, with a checkpoint less without one
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from common import ROOT, Figures, figures_table, in_turn, machine, options
from step import logged, make, settings_of, start

STEPS = 12
EVERY = 4
SMALL = {"MODEL": "124m", "BLOCK_SIZE": "32", "BATCH_SIZE": "1", "TOKENIZER": "gpt2", "DEVICE": "cpu"}
SAVING = {"SAVE_CHECKPOINT": "y", "CHECKPOINT_INTERVAL": str(EVERY), "KEEP_CHECKPOINTS": "2", "MAX_ITERS": str(STEPS)}
FORMS = dict.fromkeys(("step s", "save s", "on disk s", "resume s", "GB"), ".2f")


def main() -> None:
    args = options(__doc__, "settings", against=[], rounds=3, threads=os.cpu_count() or 1, folder=Path)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as name:
        symbols = settings_of(args.settings, Path(name), args.threads, **SMALL, **SAVING)
        checkouts = [*(Path(one).resolve() for one in args.against), ROOT]
        ways = {one.name: partial(measure, one, symbols, Path(name) / one.name, args.threads) for one in checkouts}
        print(figures_table("checkout", FORMS, in_turn(ways, args.rounds)))


def measure(checkout: Path, symbols: Mapping[str, str], folder: Path, threads: int, turn: int) -> Figures:
    """Train a run of a checkout with checkpoints, and then its last steps again, from one of them."""
    run_dir = make(checkout, {**symbols, "RESULTS_DIR": f"{folder}-{turn}"})
    begin = time.time()
    start(checkout, run_dir, device="cpu", threads=threads)
    lines = logged(run_dir)
    fresh = lines[0]["time"] - begin
    files = sorted(run_dir.glob("checkpoints/step_*.pt"), key=lambda path: path.stat().st_mtime)
    ends = {line["step"]: line["time"] for line in lines}
    took = {line["step"]: line["throughput/step_ms"] / 1e3 for line in lines}
    # All steps before a save are logged when it begins: from one to the next there are EVERY steps and a save.
    periods = [(first, [took[first + at] for at in range(EVERY)]) for first in range(EVERY, STEPS - EVERY + 1, EVERY)]
    saves = [ends[first + EVERY - 1] - ends[first - 1] - sum(steps) for first, steps in periods]
    on_disk = [path.stat().st_mtime - ends[int(path.stem.rpartition("_")[2]) - 1] for path in files]
    (run_dir / "result.json").unlink()
    begin = time.time()
    start(checkout, run_dir, "--attempt", "2", "--resume", str(files[0]), device="cpu", threads=threads)
    resumed = next(line["time"] for line in logged(run_dir) if line["attempt"] == 2) - begin
    return {
        "step s": statistics.median(list(took.values())[1:]),
        "save s": statistics.median(saves),
        "on disk s": statistics.median(on_disk),
        "resume s": resumed - fresh,
        "GB": files[0].stat().st_size / 1e9,
    }


if __name__ == "__main__":
    main()
