"""Runs that have finished, here and in earlier matrices: how long they took, for what is still to come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.estimate import Measured
from kmatrix.records import MatrixDir, RunDir, Status, matrix_dirs, read_json

MOST = 50  # matrices that are looked through, the newest


def measured_here(matrix: MatrixDir) -> list[Measured]:
    """Return the finished runs of a matrix. What cannot be read is left out: an estimate is worth no error."""
    return [found for run in matrix.runs() if (found := measured(run)) is not None]


def measured_before(matrix: MatrixDir) -> list[Measured]:
    """Return the finished runs of the other matrices beside this one that were made on a machine like its own."""
    ours = _machine(matrix.runs())
    others = [other for other in matrix_dirs(matrix.path.parent) if other.name != matrix.name]
    return [
        found
        for other in others[-MOST:]
        for run in _runs(other)
        if _machine([run]) == ours and (found := measured(run)) is not None
    ]


def measured(run: RunDir) -> Measured | None:
    """Return how long a finished run took, its start included where that is known, None of any other."""
    try:
        result, record = read_json(run.result), read_json(run.run_json)
        status = read_json(run.status) if run.status.exists() else {}
    except RecordError:
        return None
    steps, train = result.get("step"), record.get("train")
    if result.get("status") != Status.FINISHED or not isinstance(train, Mapping) or not steps:
        return None
    seconds = _elapsed(status.get("attempts") or []) or result.get("seconds")
    return Measured(train, float(seconds), int(steps)) if seconds else None


def _elapsed(attempts: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of a run that one attempt brought to its end; more than one trained some steps twice."""
    if len(attempts) != 1 or attempts[0].get("started") is None or attempts[0].get("ended") is None:
        return None
    return float(attempts[0]["ended"]) - float(attempts[0]["started"])


def _machine(runs: Iterable[RunDir]) -> tuple[Any, ...]:
    """What runs were planned for: the processor, its cores, and the kinds of GPUs."""
    for run in runs:
        try:
            about = read_json(run.run_json).get("provenance") or {}
        except RecordError:
            continue
        return about.get("cpu"), about.get("cores"), tuple(sorted({gpu["name"] for gpu in about.get("gpus") or []}))
    return ()


def _runs(matrix: MatrixDir) -> list[RunDir]:
    try:
        return matrix.runs()
    except (RecordError, KeyError, TypeError):
        return []
