"""curves.json: the thinned curves of a run, from which reports draw without parsing its log again.

It is a cache of metrics.jsonl and of the recording. It counts if it names their sizes, the digest of the ends of
metrics.jsonl, and the last attempt; otherwise it is made again. It guards against files of another run,
not against somebody who may write into the folder: such a person could change metrics.jsonl as well.
"""

from __future__ import annotations

import json
from operator import lt

from kmatrix.records.decode import SCHEMA, Amount, Count, Number, Record, UnixTime, as_json, decode_optional
from kmatrix.records.decode import field as record_field
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult


class AttemptSpan(Record, frozen=True, kw_only=True):
    """What the lines of one attempt say about it, those of lost work included."""

    attempt: Count
    first_step: Count  # of its first line: 0 if it started from scratch
    last_time: UnixTime | None = None  # of its last training line, Unix s


class EvaluationColumns(Record, frozen=True, kw_only=True):
    """The evaluations, as columns. Of more than MOST_EVALUATIONS, every n-th, the last and the lowest."""

    step: tuple[Count, ...] = ()  # ascending
    loss: tuple[Number, ...] = ()  # nats/token
    tokens: tuple[Number | None, ...] = ()  # trained on so far
    seconds: tuple[Number | None, ...] = ()  # of training, over all attempts
    joules: tuple[Amount | None, ...] = ()  # of all devices since the training began; empty: unknown
    total: Count = 0  # evaluations before they were thinned

    def __post_init__(self) -> None:
        _check(self.step, self.loss, self.tokens, self.seconds, self.joules or self.step)


class TrainingColumns(Record, frozen=True, kw_only=True):
    """The training loss in columns of equal width, without those that have no value. A column of one point is it."""

    width: Count = 1  # steps
    step: tuple[Count, ...] = ()  # first step of each column, a multiple of the width; ascending
    mean: tuple[Number, ...] = ()  # nats/token
    minimum: tuple[Number, ...] = ()  # nats/token; empty, like the next two: each column is one point
    maximum: tuple[Number, ...] = ()  # nats/token
    count: tuple[Count, ...] = ()  # points per column
    total: Count = 0  # points before they were thinned

    def __post_init__(self) -> None:
        _check(self.step, self.mean)
        if self.minimum or self.maximum or self.count:
            _check(self.step, self.minimum, self.maximum, self.count)
        if self.width == 0 or 0 in self.count:
            raise ValueError("a column has no step or no point")


class KnotColumns(Record, frozen=True, kw_only=True):
    """A quantity over steps as a piecewise straight line. Empty: unknown."""

    step: tuple[Count, ...] = ()  # ascending
    value: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        _check(self.step, self.value)


class CurvesFile(Record, frozen=True, kw_only=True):
    """curves.json. The first four fields say what it was made from."""

    metrics_bytes: Count  # size of metrics.jsonl
    metrics_ends: str = ""  # `digest_of_ends` of metrics.jsonl; "": there is none, or it cannot be read
    samples_bytes: Count = 0  # size of all recordings of GPUs
    attempt: Count | None = None  # the last one of the run
    lines: Count = 0  # sound lines of metrics.jsonl
    damaged: Count = 0  # other lines
    attempts: tuple[AttemptSpan, ...] = ()
    measured: RunResult = record_field(default_factory=RunResult)  # as far as metrics.jsonl knows the numbers
    val: EvaluationColumns = record_field(default_factory=EvaluationColumns)
    train: TrainingColumns = record_field(default_factory=TrainingColumns)
    seconds: KnotColumns = record_field(default_factory=KnotColumns)  # of training, over all attempts
    tokens: KnotColumns = record_field(default_factory=KnotColumns)
    joules: KnotColumns = record_field(default_factory=KnotColumns)  # of all devices since the training began
    simulated: bool = False  # the joules are those of simulated GPUs


def read_curves_file(run_dir: RunDir) -> CurvesFile | None:
    """Return curves.json, valid or not; None if it is missing, damaged, or from a newer version."""
    return decode_optional(run_dir.curves, CurvesFile)


def curves_text(curves: CurvesFile) -> bytes:
    """Return the text of curves.json, without the numbers that are not known."""
    value = {"schema": SCHEMA, **as_json(curves)}
    value["measured"] = {name: number for name, number in value["measured"].items() if number is not None}
    return f"{json.dumps(value, separators=(',', ':'))}\n".encode()


def _check(steps: tuple[int, ...], *columns: tuple[object, ...]) -> None:
    """Raise ValueError if columns differ in length, or the steps do not ascend."""
    if any(len(column) != len(steps) for column in columns):
        raise ValueError("columns differ in length")
    if not all(map(lt, steps, steps[1:])):
        raise ValueError("steps do not ascend")
