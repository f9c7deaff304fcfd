"""Measure the checkpoints of a run: what training waits for, until one is on disk, and what a resume takes.

    python bench/checkpoint.py [--against ../former] [MODEL=124m] [--rounds 3] [--folder DISK]

Whole runs of a model with AdamW's states on the CPU, one sequence of 32 tokens per step, with a checkpoint after each
fourth step. Rounds alternate. Wall seconds:

step         time of a step
save         what training waits for a save: the time between two saves less that of its steps
on disk      from the end of the step to the last byte of its checkpoint, next to training
resume       from the start of the program to the first step, with a checkpoint less without one
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from common import ROOT, machine, table
from step import logged, make, settings_of, start

STEPS = 12
EVERY = 4
SMALL = {"MODEL": "124m", "BLOCK_SIZE": "32", "BATCH_SIZE": "1", "TOKENIZER": "gpt2", "DEVICE": "cpu"}
SAVING = {"SAVE_CHECKPOINT": "y", "CHECKPOINT_INTERVAL": str(EVERY), "KEEP_CHECKPOINTS": "2", "MAX_ITERS": str(STEPS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The medians of one run, in s, and the size of a checkpoint in GB."""

    step: float
    save: float
    on_disk: float
    resume: float
    size: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="NAME=VALUE, as of make")
    parser.add_argument("--against", type=Path, action="append", default=[], help="another checkout of kmatrix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads")
    parser.add_argument("--folder", type=Path, help="the disk that is measured")
    args = parser.parse_args(argv)
    settings = SMALL | SAVING | dict(word.split("=", 1) for word in args.settings)
    checkouts = {checkout.name: checkout for checkout in [*(one.resolve() for one in args.against), ROOT]}
    found: dict[str, list[Measured]] = {name: [] for name in checkouts}
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as name:
        symbols = settings_of(settings, Path(name), args.threads)
        for turn in range(args.rounds):
            for checkout in found if turn % 2 == 0 else reversed(found):
                place = Path(name) / f"{checkout}{turn}"
                found[checkout].append(measure(checkouts[checkout], symbols, place, args.threads))
    rows = [
        [name, *(f"{statistics.median(column):.2f}" for column in zip(*map(astuple, runs), strict=True))]
        for name, runs in found.items()
    ]
    print(table(["checkout", "step s", "save s", "on disk s", "resume s", "GB"], rows))


def measure(checkout: Path, symbols: Mapping[str, str], folder: Path, threads: int) -> Measured:
    """Train a run of a checkout with checkpoints, and then its last steps again, from one of them."""
    run_dir = make(checkout, {**symbols, "RESULTS_DIR": str(folder)})
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
    size = files[0].stat().st_size / 1e9
    (run_dir / "result.json").unlink()
    begin = time.time()
    start(checkout, run_dir, "--attempt", "2", "--resume", str(files[0]), device="cpu", threads=threads)
    resumed = next(line["time"] for line in logged(run_dir) if line["attempt"] == 2) - begin
    return Measured(
        step=statistics.median(list(took.values())[1:]),
        save=statistics.median(saves),
        on_disk=statistics.median(on_disk),
        resume=resumed - fresh,
        size=size,
    )


if __name__ == "__main__":
    main()
