"""Read metrics.jsonl of a run: the numbers that it has so far, and its loss curves with few points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from kmatrix.records.decode import Amount, Count, Number, Record, decode_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import MetricValues, RunNumbers, merged_lines, metric_line_of
from kmatrix.report.gpu.energy import joules_at
from kmatrix.report.gpu.samples import Samples

MOST_POINTS = 200  # of a curve
VAL, TRAIN, BITS = "val/loss", "train/loss", "val/bits_per_byte"
NEWEST = {  # number of a run -> metric whose newest value it is
    "final_val_loss": VAL,
    "final_train_loss": TRAIN,
    "hellaswag_accuracy": "hellaswag/accuracy",
    "hellaswag_accuracy_norm": "hellaswag/accuracy_norm",
    "core_metric": "core/metric",
    "core_standard_error": "core/standard_error",
    "sparsity": "sparsity",
}
TYPICAL = {  # -> metric whose median it is
    "tokens_per_second": "throughput/tokens_per_s",
    "mfu": "throughput/mfu",
    "step_ms": "throughput/step_ms",
}


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


class Log:
    """The lines of metrics.jsonl that count, merged by step; of each attempt the time of lost work, too."""

    def __init__(self, path: Path) -> None:
        """Read a file; a missing one has no lines. Damaged lines are noted."""
        lines = [line for values in decode_lines(path, MetricValues) if (line := metric_line_of(values)) is not None]
        # attempt -> Unix s of its last training line
        self.last_times = {line.attempt: line.time for line in lines if line.time is not None and TRAIN in line.values}
        self.lines = merged_lines(lines)
        self.step = np.array([line.step for line in self.lines], np.int64)
        self.time = np.array([line.time for line in self.lines], np.float64)
        self.attempt = np.array([line.attempt for line in self.lines], np.int64)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the values of a metric, one per step; NaN: unknown or not finite."""
        return np.array([line.values.get(name, nan) for line in self.lines], np.float64)

    def at(self, place: int, name: str) -> Any:
        """Return the value of a metric at a step (its index)."""
        return self.lines[place].values.get(name)

    def newest(self, name: str) -> float | None:
        """Return the newest known value of a metric."""
        return next((value for line in reversed(self.lines) if (value := line.values.get(name)) is not None), None)


def read(run_dir: RunDir, samples: Samples | None) -> Metrics:
    """Return what the log of a run says, with the energy in its recordings; samples: None for several nodes."""
    log = Log(run_dir.metrics)
    elapsed, val, train = log["elapsed_s"], log[VAL], log[TRAIN]
    seconds = _seconds(elapsed)
    evaluated, trained = np.flatnonzero(~np.isnan(val)), np.flatnonzero(~np.isnan(train))
    kept = evaluated[thinned(val[evaluated])]
    drawn = trained[thinned(train[trained])]
    return Metrics(
        numbers=_numbers(log, val, seconds, evaluated, trained),
        val=Evaluations(
            step=tuple(log.step[kept].tolist()),
            loss=tuple(val[kept].tolist()),
            tokens=tuple(log.at(place, "tokens") for place in kept),
            seconds=tuple(map(_number, seconds[kept])),
            joules=tuple(map(_number, _joules(samples, log, elapsed, kept))),
        ),
        train=TrainingLosses(step=tuple(log.step[drawn].tolist()), loss=tuple(train[drawn].tolist())),
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


def _joules(samples: Samples | None, log: Log, elapsed: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the energy (J) of all devices since the training began at some steps (indices); NaN: unknown.

    Evaluations and checkpoints are included; what an attempt trained and lost, and the time between attempts, are not.
    """
    if samples is None or not len(wanted):
        return np.full(len(wanted), np.nan)
    # Each attempt needs its own ends: the time between two of them was not training.
    first = 1 + np.flatnonzero(log.attempt[1:] != log.attempt[:-1])
    at = np.unique(np.concatenate([wanted, first, first - 1]))
    ends, clock, before = log.time[at], elapsed[at], np.append(0.0, elapsed[at][:-1])
    goes_on = np.append(False, log.attempt[at][1:] == log.attempt[at][:-1])
    begins = np.where(goes_on, np.append(np.nan, ends[:-1]), ends - np.where(clock >= before, clock - before, clock))
    begun, ended = np.split(joules_at(samples, [*begins, *ends]), 2)
    return np.cumsum(ended - begun)[np.searchsorted(at, wanted)].round(1)


def _numbers(log: Log, val: np.ndarray, seconds: np.ndarray, evaluated: np.ndarray, trained: np.ndarray) -> RunNumbers:
    """Return the numbers in a log, which are used until the run has a result. evaluated, trained: steps (indices)."""
    if not log.lines:
        return RunNumbers()
    found: dict[str, Any] = {name: log.newest(metric) for name, metric in NEWEST.items()}
    found |= {name: _typical(log[metric]) for name, metric in TYPICAL.items()}
    if measured := [*evaluated[-1:], *trained[-1:]]:
        found["seconds"] = _number(seconds[max(measured)])
    if len(evaluated):
        best = int(evaluated[val[evaluated].argmin()])
        found |= {"best_val_loss": float(val[best]), "best_val_step": int(log.step[best])}
        found |= {"best_bits_per_byte": log.at(best, BITS), "final_bits_per_byte": log.at(evaluated[-1], BITS)}
    return RunNumbers(
        attempt=log.lines[-1].attempt,
        step=log.lines[-1].step,
        tokens=log.at(-1, "tokens"),
        initial_val_loss=log.at(0, VAL) if log.step[0] == 0 else None,
        **found,
    )


def _typical(values: np.ndarray) -> float | None:
    """Return the median of the known values. The first one is excluded if there are more: it includes warm-up."""
    known = values[~np.isnan(values)]
    return float(np.median(known[1:] if len(known) > 1 else known)) if len(known) else None


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
