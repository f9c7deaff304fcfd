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
from kmatrix.report.gpu.energy import Interval
from kmatrix.report.gpu.samples import Samples
from kmatrix.report.metrics import Log

SET_UP, EVALUATION, CHECKPOINT, ENDING = "set-up", "evaluation", "checkpoint", "ending"


@dataclass(frozen=True, slots=True)
class Span:
    """A span without training. Times are s since the first sample; they may be before the first or after the last."""

    phase: str
    begin: float
    end: float


def spans_of(samples: Samples, folder: RunDir, *, node: int = 0, running: bool = False) -> list[Span]:
    """Return the spans without training of a node in order of time; none without a log of its phases.

    An attempt trains from the end of its set-up, which is its first line, to the begin of its ending. If it was killed,
    it trained until its last training line, or on the nodes after the first, whose clocks may differ, until the next
    attempt. Between two attempts is the ending of one, and before the first one its set-up.
    running: the last attempt has not ended.
    """
    lines = sorted(decode_lines(folder.phases, PhaseLine), key=attrgetter("attempt"))
    attempts = [list(own) for _, own in groupby(lines, key=attrgetter("attempt"))]
    last_times: Mapping[int, float] = {}
    found: list[Span] = []
    for own, later in zip_longest(attempts, attempts[1:]):
        until = math.inf if later is None else samples.at(later[0].begin, later[0].begin_monotonic)
        spans = [
            Span(line.phase, samples.at(line.begin, line.begin_monotonic), samples.at(line.end, line.end_monotonic))
            for line in own
        ]
        endings = [span.begin for span in spans if span.phase == ENDING]
        if endings:
            ended = endings[0]
        elif node or (running and later is None):
            ended = until
        else:
            last_times = last_times or Log(folder.metrics).last_times
            last = last_times.get(own[0].attempt)
            ended = max(spans[-1].end, -math.inf if last is None else samples.at(last))
        found += [span for span in spans if span.phase != ENDING]
        if ended < until:
            found.append(Span(ENDING, ended, until))
    if found:
        found.insert(0, Span(SET_UP, -math.inf, found[0].begin))
    return sorted(found, key=attrgetter("begin"))


def training_of(spans: Sequence[Span], now: float) -> list[Interval]:
    """Return the time that no span covers, in order of time. now: s, the end of a training that goes on."""
    covered = np.maximum.accumulate([span.end for span in spans])
    begins = [*(span.begin for span in spans), now][1:]
    return [(float(begin), end) for begin, end in zip(covered, begins, strict=True) if begin < end]
