"""The spans of a recording in which its run did not train: set-up, evaluations, checkpoints and ending."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import attrgetter

import numpy as np

from kmatrix.records.events import PhaseLine
from kmatrix.report.gpu.samples import Samples

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

    lines: Sequence[PhaseLine]  # without its ending, as they were written
    ending: PhaseLine | None  # begins with the end of its training; None: it was killed
    last: float | None  # Unix s of its last training line; None: unknown

    @property
    def end(self) -> float | None:
        """The end of its training, Unix s; None if that is unknown."""
        if self.ending is not None:
            return self.ending.begin
        return None if self.last is None else max(self.last, self.lines[-1].end)

    def seconds(self) -> dict[str, float]:
        """Return phase -> its time in this attempt, s; without the training if its end is unknown."""
        found = {
            phase: math.fsum(line.duration_s for line in self.lines if line.phase == phase) for phase in PHASES[:-1]
        }
        if self.end is not None:
            begun = self.lines[0]
            whole = PhaseLine(
                phase=TRAINING,
                begin=begun.end,
                end=self.end,
                begin_monotonic=begun.end_monotonic,
                end_monotonic=self.ending.begin_monotonic if self.ending else None,
            ).duration_s
            found[TRAINING] = max(0.0, whole - found[EVALUATION] - found[CHECKPOINT])
        return found


def trained_attempts(lines: Iterable[PhaseLine], last: Mapping[int, float] | None) -> list[Trained]:
    """Return the attempts that logged phases. last: attempt -> Unix s of its last training line; None: unknown."""
    found = []
    for attempt, group in groupby(sorted(lines, key=attrgetter("attempt")), key=attrgetter("attempt")):
        own = list(group)
        ending = next((line for line in own if line.phase == ENDING), None)
        others = [line for line in own if line.phase in PHASES[:-1]]
        if others:
            known = None if last is None else last.get(attempt, others[-1].end)
            found.append(Trained(others, ending, known))
    return found


def spans_of(samples: Samples, attempts: Sequence[Trained], *, running: bool) -> list[Span]:
    """Return the spans of a recording without training, in order of time. running: the last attempt has not ended.

    An attempt trains from the end of its set-up to the begin of its ending, or to its last training line if it was
    killed. Between two attempts, the first gap ends the ending of one, and begins the set-up of the next.
    """
    gaps = samples.time[:-1][np.diff(samples.time) > samples.gap_s]
    found: list[Span] = []
    ended: float | None = None  # s, end of the training of the attempt before

    def first_gap(begin: float, end: float) -> float | None:
        return next((float(gap) for gap in gaps if begin <= gap < end), None)

    for one, later in zip_longest(attempts, attempts[1:]):
        begun = math.inf if later is None else later.lines[0].begin  # Unix s
        if not _overlaps(one, begun, samples):
            continue
        own = [
            Span(line.phase, samples.at(line.begin, line.begin_monotonic), samples.at(line.end, line.end_monotonic))
            for line in one.lines
        ]
        begin = min(0.0, own[0].begin) if own[0].phase == SET_UP else own[0].begin
        if ended is not None:
            begin = own[0].begin if (gap := first_gap(ended, own[0].end)) is None else gap
            found.append(Span(ENDING, ended, begin))
        found += [Span(own[0].phase, begin, own[0].end), *own[1:]]
        if running and one is attempts[-1]:
            ended = math.inf
        elif one.ending is not None:
            ended = samples.at(one.ending.begin, one.ending.begin_monotonic)
        elif one.end is not None:
            ended = max(samples.at(one.end), own[-1].end)
        else:
            ended = math.inf if later is None else samples.at(begun, later.lines[0].begin_monotonic)
            gap = first_gap(own[-1].end, ended)
            ended = ended if gap is None else gap
    if ended is None:
        return [Span(SET_UP, 0.0, math.inf)]  # of an attempt that was killed in its set-up
    gap = first_gap(ended, math.inf)
    found.append(Span(ENDING, ended, math.inf if gap is None else gap))
    if gap is not None:
        found.append(Span(SET_UP, gap, math.inf))  # the same
    return sorted(found, key=attrgetter("begin"))


def training_of(spans: Sequence[Span], end: float) -> list[Interval]:
    """Return the time up to `end` (s) that no span covers: the training, in order of time."""
    found: list[Interval] = []
    covered = 0.0
    for span in spans:
        if span.begin > covered:
            found.append((covered, min(span.begin, end)))
        covered = max(covered, span.end)
    found.append((covered, end))
    return [(first, last) for first, last in found if first < last]


def _overlaps(one: Trained, later: float, samples: Samples) -> bool:
    """Return whether an attempt and a recording overlap, by the wall clock. later: begin of the next one, Unix s."""
    end = later if one.end is None else one.end
    return one.lines[0].begin <= float(samples.wall.max()) and end >= float(samples.wall.min())
