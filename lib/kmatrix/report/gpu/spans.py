"""The spans of a recording in which its run did not train: set-up, evaluations, checkpoints and ending."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import attrgetter

import numpy as np

from kmatrix.records.decode import decode_lines
from kmatrix.records.events import PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.samples import Samples
from kmatrix.report.metrics import Log

SET_UP, EVALUATION, CHECKPOINT, ENDING = PHASES = ("set-up", "evaluation", "checkpoint", "ending")
TRAINING = "training"
Interval = tuple[float, float]  # s since the first sample


@dataclass(frozen=True, slots=True)
class Span:
    """A span without training. Times are s since the first sample; they may be before the first or after the last."""

    phase: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Trained:
    """One attempt that logged its phases."""

    lines: Sequence[PhaseLine]  # without its ending, as they were written; the first one is its set-up
    end: float | None  # of its training, Unix s; None: unknown
    end_monotonic: float | None  # the same, s since the boot; None: unknown

    def seconds(self) -> dict[str, float]:
        """Return phase -> its time in this attempt, s; without the training if its end is unknown."""
        took = {name: math.fsum(line.duration_s for line in self.lines if line.phase == name) for name in PHASES[:-1]}
        if self.end is not None:
            begin, begin_monotonic = self.lines[0].end, self.lines[0].end_monotonic
            whole = PhaseLine(
                phase=TRAINING,
                begin=begin,
                end=self.end,
                begin_monotonic=begin_monotonic,
                end_monotonic=self.end_monotonic,
            )
            took[TRAINING] = max(0.0, whole.duration_s - took[EVALUATION] - took[CHECKPOINT])
        return took


def attempts_of(folder: RunDir, last_times: Mapping[int, float] | None, *, is_first: bool) -> list[Trained]:
    """Return the attempts of a node by its log of phases.

    An attempt trains until its ending begins, or if it was killed, until its last training line.
    last_times: attempt -> Unix s of that line; None: read them. is_first: it is the node whose log has these lines; the
    end of an attempt that was killed is unknown on the others, whose clocks may differ.
    """
    lines = sorted(decode_lines(folder.phases, PhaseLine), key=attrgetter("attempt"))
    attempts = {attempt: list(own) for attempt, own in groupby(lines, key=attrgetter("attempt"))}
    endings = {line.attempt: line for line in reversed(lines) if line.phase == ENDING}
    if is_first and last_times is None and len(endings) < len(attempts):
        last_times = Log(folder.metrics).last_times
    found = []
    for attempt, every in attempts.items():
        own = [line for line in every if line.phase in PHASES[:-1]]
        if own and attempt in endings:
            found.append(Trained(own, endings[attempt].begin, endings[attempt].begin_monotonic))
        elif own:
            last = max((last_times or {}).get(attempt, 0.0), own[-1].end)
            found.append(Trained(own, last if is_first else None, None))
    return found


def spans_of(samples: Samples, attempts: Sequence[Trained], *, running: bool) -> list[Span]:
    """Return the spans of a recording without training, in order of time. running: the last attempt has not ended.

    An attempt trains from the end of its set-up to the end of its training. Between two attempts, the first gap ends
    the ending of one, and begins the set-up of the next.
    """
    gaps = samples.time[:-1][np.diff(samples.time) > samples.gap_s]
    found: list[Span] = []
    ended: float | None = None  # s, end of the training of the attempt before

    def first_gap(begin: float, end: float, default: float) -> float:
        return next((float(gap) for gap in gaps if begin <= gap < end), default)

    for one, later in zip_longest(attempts, attempts[1:]):
        last = one.end if one.end is not None else math.inf if later is None else later.lines[0].begin  # Unix s
        if one.lines[0].begin > samples.wall.max() or last < samples.wall.min():
            continue  # it is not of this recording
        own = [
            Span(line.phase, samples.at(line.begin, line.begin_monotonic), samples.at(line.end, line.end_monotonic))
            for line in one.lines
        ]
        if ended is None:
            begin = min(0.0, own[0].begin)
        else:
            begin = first_gap(ended, own[0].end, own[0].begin)
            found.append(Span(ENDING, ended, begin))
        found += [Span(own[0].phase, begin, own[0].end), *own[1:]]
        if running and later is None:
            ended = math.inf
        elif one.end is not None:
            ended = max(samples.at(one.end, one.end_monotonic), own[-1].end)
        else:
            until = math.inf if later is None else samples.at(last, later.lines[0].begin_monotonic)
            ended = first_gap(own[-1].end, until, until)
    if ended is None:
        return [Span(SET_UP, 0.0, math.inf)]  # of an attempt that was killed in its set-up
    begin = first_gap(ended, math.inf, math.inf)
    return sorted([*found, Span(ENDING, ended, begin), Span(SET_UP, begin, math.inf)], key=attrgetter("begin"))


def training_of(spans: Sequence[Span], end: float) -> list[Interval]:
    """Return the time up to `end` (s) that no span covers: the training, in order of time."""
    begins = [span.begin for span in spans] + [end]
    covered = np.maximum.accumulate([0.0, *(span.end for span in spans)])
    pairs = ((float(first), min(last, end)) for first, last in zip(covered, begins, strict=True))
    return [(first, last) for first, last in pairs if first < last]
