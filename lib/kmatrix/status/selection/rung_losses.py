"""Read the validation losses of runs at the rungs of successive halving."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from kmatrix.own_file import may_exist
from kmatrix.records.decode import Count, Number, Record, decode_blocks
from kmatrix.records.decode import field as record_field
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import VALIDATION_LOSS, Status
from kmatrix.status.state import RunState

START = 0  # step of the evaluation before the training


class EvaluationLine(Record, frozen=True, kw_only=True):
    """A line of metrics.jsonl. NaN: it has no loss; None: the loss is not finite."""

    step: Count
    attempt: Count | None = None
    loss: Number | None = record_field(name=VALIDATION_LOSS, default=math.nan)


def first_losses(path: Path, steps: Collection[int], archived: int = 0) -> dict[int, float]:
    """Return the losses at these steps of metrics.jsonl, as they were recorded first; infinity: it diverged.

    An attempt that continues from an older checkpoint evaluates the same step again. Its loss must not change what
    was decided, so it does not count. A run whose loss is not below that before its first step has diverged, too.
    archived: number of the last attempt whose lines do not count.
    """
    rungs, found = {START, *steps}, dict[int, float]()
    with suppress(OSError):  # missing: it has not started
        for lines, _ in decode_blocks(path, EvaluationLine, path.stat().st_size):
            for line in lines:
                counts = line.step in rungs and line.step not in found and (line.attempt or 1) > archived
                if counts and (line.loss is None or not math.isnan(line.loss)):
                    found[line.step] = math.inf if line.loss is None else line.loss
            if found.keys() == rungs:
                break
    start = found.get(START, math.inf)
    return {step: loss if loss < start else math.inf for step, loss in found.items() if step in steps}


class RungLosses:
    """The losses of all runs at their rungs; the file of a run is read once per attempt and state."""

    def __init__(self, matrix: MatrixDir) -> None:
        """Create the losses of a matrix."""
        self._matrix = matrix
        self._read: dict[str, tuple[int, int, bool]] = {}  # run -> its state at that time
        self._known: dict[str, dict[int, float]] = {}

    def of(self, run: str, state: RunState, steps: Collection[int]) -> Mapping[int, float]:
        """Return the losses of a run at these steps, as far as they are recorded."""
        if not state.attempts and not state.reused_from:
            self._known.pop(run, None)  # it has not started, or its results were archived
            return {}
        now = (state.number, state.archived, state.status is Status.RUNNING)
        known = self._known.get(run, {})
        if self._read.get(run) != now and not known.keys() >= set(steps):
            path = self._matrix.run(run).metrics
            known = first_losses(path, steps, state.archived) if may_exist(path) else {}
            self._read[run], self._known[run] = now, known
        return {step: known[step] for step in steps if step in known}
