"""Read metrics.jsonl as columns: one row per step, 8 bytes per number."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kmatrix.records.decode import Count, Number, Record, UnixTime, as_tuple, decoded_lines
from kmatrix.records.decode import field as record_field

NAN = math.nan

R = TypeVar("R")
BLOCK_BYTES = 1 << 20  # of a log that is read in blocks
MOST_LINE_BYTES = 1 << 24  # of a line in it


def decode_blocks(path: Path, kind: type[R], size: int) -> Iterator[tuple[list[R], int]]:
    """Yield the complete lines in the first `size` bytes of a log as records, with the number of damaged ones.

    In blocks of a fixed size: a log may have any. Raises OSError if the file is missing or cannot be read.
    """
    with path.open("rb") as file:
        rest, is_long = b"", False  # the beginning of the next line; whether what precedes it was dropped
        while data := file.read(min(BLOCK_BYTES, size)):
            size -= len(data)
            data = rest + data
            end = data.rfind(b"\n") + 1
            data, rest = data[:end], data[end:]
            if is_long and data:  # the end of a line that is too long: one damaged line
                data = data[data.index(b"\n") + 1 :]
                is_long = False
                yield [], 1
            if len(rest) > MOST_LINE_BYTES or (is_long and not data):
                rest, is_long = b"", True
            if data:
                yield decoded_lines(data, kind)


class LossLine(Record, frozen=True, kw_only=True):
    """The values of a line of metrics.jsonl that reports need. NaN: not in this line; None: not finite."""

    step: Count
    resumed: bool = False
    attempt: Count | None = None
    time: UnixTime | None = NAN
    elapsed_s: Number | None = NAN
    tokens: Number | None = NAN
    val_loss: Number | None = record_field(name="val/loss", default=NAN)
    train_loss: Number | None = record_field(name="train/loss", default=NAN)
    bits_per_byte: Number | None = record_field(name="val/bits_per_byte", default=NAN)
    accuracy: Number | None = record_field(name="hellaswag/accuracy", default=NAN)
    accuracy_norm: Number | None = record_field(name="hellaswag/accuracy_norm", default=NAN)
    core_metric: Number | None = record_field(name="core/metric", default=NAN)
    core_standard_error: Number | None = record_field(name="core/standard_error", default=NAN)
    sparsity: Number | None = NAN
    tokens_per_s: Number | None = record_field(name="throughput/tokens_per_s", default=NAN)
    mfu: Number | None = record_field(name="throughput/mfu", default=NAN)
    step_ms: Number | None = record_field(name="throughput/step_ms", default=NAN)


BEFORE = 3  # fields of a line before its values
NAMES = LossLine.__struct_fields__[BEFORE:]


@dataclass(slots=True)
class MetricColumns:
    """The lines of metrics.jsonl that count, merged by step: of a step those of the last attempt."""

    step: array[int] = field(default_factory=lambda: array("q"))  # ascending
    attempt: array[int] = field(default_factory=lambda: array("q"))  # 0: not recorded
    columns: tuple[array[float], ...] = field(default_factory=lambda: tuple(array("d") for _ in NAMES))
    first_steps: dict[int, int] = field(default_factory=dict)  # attempt -> step of its first line
    last_times: dict[int, float] = field(
        default_factory=dict
    )  # attempt -> Unix s of its last training line, lost or not
    lines: int = 0
    damaged: int = 0

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> array[float]:
        """Return a column by the name of its field in `LossLine`. NaN: unknown."""
        return self.columns[NAMES.index(name)]

    def add(self, line: LossLine) -> None:
        """Add a line. One with "resumed" starts an attempt at its step, and voids earlier lines of later steps."""
        step, resumed, recorded, *values = as_tuple(line)
        self.lines += 1
        self.first_steps.setdefault(recorded or 1, step)
        if line.time is not None and _is_there(line.time) and _is_there(line.train_loss):
            self.last_times[recorded or 1] = line.time
        if resumed:
            self._void(bisect_right(self.step, step))
        elif not self.step or step > self.step[-1]:
            self.step.append(step)
            self.attempt.append(recorded or 0)
            for column, value in zip(self.columns, values, strict=True):
                column.append(NAN if value is None else value)
        else:
            self._merge(step, recorded or 0, values)

    def _merge(self, step: int, attempt: int, values: list[float | None]) -> None:
        """Merge a line into the row of its step; insert one if there is none."""
        at = bisect_left(self.step, step)
        if self.step[at] != step:
            self.step.insert(at, step)
            self.attempt.insert(at, 0)
            for column in self.columns:
                column.insert(at, NAN)
        # A line of an earlier attempt must not replace one of the attempt that trained the final weights.
        if max(attempt, 1) < self.attempt[at]:
            return
        self.attempt[at] = attempt or self.attempt[at]
        for column, value in zip(self.columns, values, strict=True):
            if _is_there(value):
                column[at] = NAN if value is None else value

    def _void(self, end: int) -> None:
        """Drop the rows from an index on."""
        del self.step[end:], self.attempt[end:]
        for column in self.columns:
            del column[end:]


def _is_there(value: float | None) -> bool:
    """Return whether a line has this value: NaN stands for a missing key."""
    return value is None or not math.isnan(value)


def read_metrics(path: Path, size: int) -> MetricColumns:
    """Return the lines in the first `size` bytes of metrics.jsonl; no rows if it is missing.

    Raises OSError if it cannot be read.
    """
    found = MetricColumns()
    for lines, damaged in decode_blocks(path, LossLine, size) if size else ():
        found.damaged += damaged
        for line in lines:
            found.add(line)
    return found
