"""The trainer in which a step that waits for the device is an error, and which counts graphs and waits for input.

On a GPU, PyTorch raises at each operation that waits for it; on the CPU the double of no_waits.py takes its place.
COUNTS: the file that gets, at the end, the graphs compiled after step 2 and at the end, the seconds in which the loop
waited for input, and those of all steps. WAITS=0: count only.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import counted_graphs
import no_waits
from gpt2 import dist, train
from gpt2.data.batches import Batches
from gpt2.model import compiled

FIRST = 3  # step from which no wait and no compilation is left; before it, the compiler and cuBLAS start
CHECKS = os.environ.get("WAITS", "1") == "1"
found: dict[str, float] = {"graphs_early": 0, "graphs": 0, "input_s": 0.0, "steps_s": 0.0, "checked": 0}


def graphs() -> int:
    """Return how many graphs were compiled until now."""
    return int(counters["stats"]["unique_graphs"])


def checked_step(step: Any) -> Any:
    """Return the step of the training loop with checks."""
    strict = no_waits.guarded(step)

    def run(self: Any, number: int) -> Any:
        if number == FIRST:
            found["graphs_early"] = graphs()
        is_gpu = self.between.training.world.device.type == "cuda"
        begin = time.perf_counter()
        if number < FIRST or not CHECKS:
            result = step(self, number)
        elif is_gpu:
            found["checked"] += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                result = step(self, number)
            finally:
                torch.cuda.set_sync_debug_mode("default")  # evaluations and checkpoints may wait
        else:
            found["checked"] += 1
            result = strict(self, number)
        if number >= FIRST:
            found["steps_s"] += time.perf_counter() - begin
        return result

    return run


def timed_next(next_batch: Any) -> Any:
    """Return the method that gives the next micro-batch, with its time counted: the loop does nothing else then."""

    def run(self: Batches) -> Any:
        begin = time.perf_counter()
        batch = next_batch(self)
        found["input_s"] += time.perf_counter() - begin
        return batch

    return run


def finish(code: int) -> None:
    found["graphs"] = graphs()
    Path(os.environ["COUNTS"]).write_text(json.dumps(found), encoding="utf-8")
    original_finish(code)


if __name__ == "__main__":
    if not torch.cuda.is_available():  # graphs are counted all the same, without a C++ compiler
        compiled.BACKEND = counted_graphs.backend([])
    train.TrainingLoop._step = checked_step(train.TrainingLoop._step)  # type: ignore[method-assign]
    Batches.next = timed_next(Batches.next)  # type: ignore[method-assign]
    original_finish, dist.finish = dist.finish, finish
    train.main()
