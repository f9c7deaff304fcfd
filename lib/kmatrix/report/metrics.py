"""Read metrics.jsonl of a run: the numbers that it has so far, and its loss curves with few points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from kmatrix.records.decode import Amount, Count, Number, Record, UnixTime, decode_lines, replaced
from kmatrix.records.decode import field as record_field
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunNumbers, merged_lines
from kmatrix.report.gpu.energy import joules_at
from kmatrix.report.gpu.samples import Samples

MOST_POINTS = 200  # of a curve
TYPICAL = ("tokens_per_second", "mfu", "step_ms")  # numbers of a run: medians


class TrainingLosses(Record, frozen=True, kw_only=True):
    """The training losses of a run as columns: all of up to MOST_POINTS, else those of `thinned`."""

    step: Annotated[tuple[Count, ...], Meta(description="optimizer steps done, ascending")] = ()
    loss: Annotated[tuple[Number, ...], Meta(description="nats/token")] = ()


class Evaluations(TrainingLosses, frozen=True, kw_only=True):
    """The validation losses of a run in the same way, and what it had taken by then."""

    tokens: Annotated[tuple[Count | None, ...], Meta(description="trained on so far, all ranks")] = ()
    seconds: Annotated[tuple[Number | None, ...], Meta(description="of training so far, over all attempts")] = ()
    joules: Annotated[tuple[Amount | None, ...], Meta(description="of all devices since the training began")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What the log of a run says."""

    numbers: RunNumbers = field(default_factory=RunNumbers)
    val: Evaluations = field(default_factory=Evaluations)
    train: TrainingLosses = field(default_factory=TrainingLosses)


class LossLine(Record, frozen=True, kw_only=True, gc=False):
    """The values of a line of metrics.jsonl that reports need. NaN: not in this line; None: not finite."""

    step: Count
    attempt: Count = 1
    resumed: bool = False
    time: UnixTime | None = None
    elapsed_s: Number | None = nan
    tokens: Number | None = nan
    val_loss: Number | None = record_field(name="val/loss", default=nan)
    train_loss: Number | None = record_field(name="train/loss", default=nan)
    bits_per_byte: Number | None = record_field(name="val/bits_per_byte", default=nan)
    tokens_per_second: Number | None = record_field(name="throughput/tokens_per_s", default=nan)
    mfu: Number | None = record_field(name="throughput/mfu", default=nan)
    step_ms: Number | None = record_field(name="throughput/step_ms", default=nan)

    def merged(self, later: LossLine) -> LossLine:
        """Return this line with the values of a later line of the same step."""
        found = ((name, getattr(later, name)) for name in self.__struct_fields__)
        return replaced(self, **{name: value for name, value in found if _is_there(value)})


class Log:
    """The lines of metrics.jsonl that count, merged by step; of each attempt the time of lost work, too."""

    def __init__(self, path: Path) -> None:
        """Read a file; a missing one has no lines. Damaged lines are noted."""
        lines = decode_lines(path, LossLine)
        # attempt -> Unix s of its last training line
        self.last_times = {one.attempt: one.time for one in lines if one.time and _is_there(one.train_loss)}
        self.lines = merged_lines(lines)
        self.step, self.elapsed = self["step"].astype(np.int64), self["elapsed_s"]
        self.val, self.train = self["val_loss"], self["train_loss"]
        # Steps (indices) with a validation loss, and with a training loss
        self.evaluated, self.trained = (np.flatnonzero(~np.isnan(losses)) for losses in (self.val, self.train))

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the values of a field of `LossLine`, one per step; NaN: unknown or not finite."""
        return np.array([*map(attrgetter(name), self.lines)], np.float64)


def read(run_dir: RunDir, samples: Samples | None) -> Metrics:
    """Return what the log of a run says, with the energy in its recordings; samples: None for several nodes."""
    log = Log(run_dir.metrics)
    seconds = _seconds(log.elapsed)
    kept = log.evaluated[thinned(log.val[log.evaluated])]
    drawn = log.trained[thinned(log.train[log.trained])]
    return Metrics(
        numbers=_numbers(log, seconds),
        val=Evaluations(
            step=tuple(log.step[kept].tolist()),
            loss=tuple(log.val[kept].tolist()),
            tokens=tuple(map(_integer, log["tokens"][kept])),
            seconds=tuple(map(_number, seconds[kept])),
            joules=tuple(map(_number, _joules(samples, log, kept))),
        ),
        train=TrainingLosses(step=tuple(log.step[drawn].tolist()), loss=tuple(log.train[drawn].tolist())),
    )


def thinned(values: np.ndarray | Sequence[float], most: int = MOST_POINTS) -> np.ndarray:
    """Return the indices of at most `most` values (16 or more), ascending: all, or a part that shows their course.

    They are every n-th, the last, the lowest, and those that are farthest from the line through these: a spike of one
    step stays. n is a power of two, so that seeds have common steps, whenever they ended.
    """
    values = np.asarray(values, np.float64)
    count = len(values)
    if count <= most:
        return np.arange(count)
    stride = 1
    while 4 * count > 3 * most * stride:
        stride *= 2
    line = np.unique([*range(0, count, stride), count - 1, int(values.argmin())])
    distance = np.abs(values - np.interp(np.arange(count), line, values[line]))
    return np.union1d(line, np.argsort(distance, kind="stable")[len(line) - most :])


def _seconds(elapsed: np.ndarray) -> np.ndarray:
    """Return the training time at each step in s. It adds up over attempts: the clock of some starts at 0."""
    known = ~np.isnan(elapsed)
    clock = elapsed[known]
    before = np.append(0.0, clock)[:-1]
    found = elapsed.copy()
    found[known] += np.cumsum(np.where(clock < before, before, 0.0))
    return found


def _joules(samples: Samples | None, log: Log, wanted: np.ndarray) -> np.ndarray:
    """Return the energy (J) of all devices since the training began at some steps (indices); NaN: unknown.

    Evaluations and checkpoints are included; what an attempt trained and lost, and the time between attempts, are not.
    """
    if samples is None or not len(wanted):
        return np.full(len(wanted), np.nan)
    attempt, elapsed = log["attempt"], log.elapsed
    # Each attempt needs its own ends: the time between two of them was not training.
    first = 1 + np.flatnonzero(attempt[1:] != attempt[:-1])
    at = np.unique(np.concatenate([wanted, first, first - 1]))
    ends, clock, before = log["time"][at], elapsed[at], np.append(0.0, elapsed[at][:-1])
    goes_on = np.append(False, attempt[at][1:] == attempt[at][:-1])
    begins = np.where(goes_on, np.append(np.nan, ends[:-1]), ends - np.where(clock >= before, clock - before, clock))
    begun, ended = np.split(joules_at(samples, [*begins, *ends]), 2)
    return np.cumsum(ended - begun)[np.searchsorted(at, wanted)].round(1)


def _numbers(log: Log, seconds: np.ndarray) -> RunNumbers:
    """Return the numbers in a log, which are used until the run has a result. seconds: at each step."""
    if not log.lines:
        return RunNumbers()
    bits = log["bits_per_byte"]
    found: dict[str, Any] = {name: _typical(log[name]) for name in TYPICAL}
    if measured := [*log.evaluated[-1:], *log.trained[-1:]]:
        found["seconds"] = _number(seconds[max(measured)])
    if len(log.evaluated):
        best, last = log.evaluated[log.val[log.evaluated].argmin()], log.evaluated[-1]
        found |= {"best_val_loss": _number(log.val[best]), "best_val_step": int(log.step[best])}
        found |= {"best_bits_per_byte": _number(bits[best]), "final_bits_per_byte": _number(bits[last])}
    return RunNumbers(
        attempt=log.lines[-1].attempt,
        step=log.lines[-1].step,
        tokens=_integer(log.lines[-1].tokens),
        initial_val_loss=_number(log.val[0]) if log.step[0] == 0 else None,
        final_val_loss=_newest(log.val),
        final_train_loss=_newest(log.train),
        **found,
    )


def _newest(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else None


def _is_there(value: float | None) -> bool:
    """Return whether a line has this value: NaN stands for a missing key."""
    return value is None or not isnan(value)


def _typical(values: np.ndarray) -> float | None:
    """Return the median of the known values. The first one is excluded if there are more: it includes warm-up."""
    known = values[~np.isnan(values)]
    return float(np.median(known[1:] if len(known) > 1 else known)) if len(known) else None


def _number(value: float | None) -> float | None:
    return None if value is None or isnan(value) else float(value)


def _integer(value: float | None) -> int | None:
    return None if value is None or isnan(value) else int(value)
