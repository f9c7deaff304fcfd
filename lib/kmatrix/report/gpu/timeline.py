"""A run over time: the spans in which it did not train, and its recordings in columns of time for pictures.

A column has the mean, the lowest and the highest value of each device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from operator import attrgetter

import numpy as np

from kmatrix.records.decode import decode_lines
from kmatrix.records.events import PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.energy import Interval
from kmatrix.report.gpu.recordings import Node
from kmatrix.report.gpu.samples import QUANTITIES, Array, Samples
from kmatrix.report.metrics import Log

COLUMNS = 360  # about one per 3 pixels of a picture
MOST_LINES = 8  # devices that are drawn as lines; more are a band
SET_UP, EVALUATION, CHECKPOINT, ENDING = "set-up", "evaluation", "checkpoint", "ending"


@dataclass(frozen=True, slots=True)
class Span:
    """A span without training. Times are s since the first sample; they may be before the first or after the last."""

    phase: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One quantity of one device, or of all, per column of time. NaN: no sample, or unknown."""

    label: str
    time: Array  # middle of each column, s since the first sample of the run
    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run over time; its nodes are placed by the wall clocks of their machines."""

    seconds: float  # length
    lanes: dict[str, list[Lane]]  # quantity -> a lane per device
    capacity: float | None  # MiB of the largest GPU; None: unknown, or ranks, which share the memory of their machine
    spans: list[Span]  # phases without training of the first node

    def knows(self, quantity: str) -> bool:
        """Return whether a quantity was recorded."""
        return not all(np.isnan(one.mean).all() for one in self.lanes[quantity])

    def lines(self, quantity: str) -> tuple[list[Lane], str]:
        """Return the lines of a quantity: each device; of many, their range and the one farthest off, named second."""
        every = self.lanes[quantity]
        if len(every) <= MOST_LINES:
            return every, ""
        band = range_of("mean, lowest and highest of all", every)
        distances = np.ma.masked_invalid([one.mean for one in every] - band.mean)
        worst = every[int(np.argmax(np.abs(distances).mean(axis=1)))]
        return [band, replace(worst, label="the one farthest from the mean")], worst.label


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


def timeline_of(nodes: Sequence[Node], *, running: bool = False) -> Timeline | None:
    """Return a run in columns of equal time; None without two samples. running: it has not ended."""
    known = [(node, one) for node in nodes if (one := node.samples)]
    zero = min((float(one.wall[0]) for _, one in known), default=0.0)
    length = max((float(one.wall[0] - zero + one.time[-1]) for _, one in known), default=0.0)
    if not length:
        return None
    edges = np.linspace(0.0, length, min(COLUMNS, max(len(one) for _, one in known)) + 1)
    lanes: dict[str, list[Lane]] = {quantity: [] for quantity in QUANTITIES}
    spans: list[Span] = []
    for node, one in known:
        begin, last = float(one.wall[0]) - zero, len(one.parts[-1].places)
        labels = [each.name_on(node.host) for each in one.devices]
        labels[last:] = [f"{label}, earlier attempt" for label in labels[last:]]
        for quantity, mine in lanes.items():
            columns = zip(labels, _thinned(one, quantity, edges - begin), strict=True)
            mine += [Lane(label, (edges[1:] + edges[:-1]) / 2, *values) for label, values in columns]
        for span in spans_of(one, node.folder, running=running) if node.number == 0 else ():
            ends = np.clip([span.begin, span.end], 0.0, one.time[-1]) + begin
            spans += [Span(span.phase, *ends.tolist())] if ends[0] < ends[1] else []
    totals = [each.memory_total or 0.0 for _, one in known for each in one.devices if each.unit == "GPU"]
    return Timeline(seconds=length, lanes=lanes, capacity=max(totals, default=0.0) or None, spans=spans)


def range_of(label: str, lanes: Sequence[Lane]) -> Lane:
    """Return the mean, the lowest and the highest of the devices that are known in each column."""
    means = np.ma.masked_invalid([one.mean for one in lanes])
    of_all = (means.mean(axis=0), means.min(axis=0), means.max(axis=0))
    return Lane(label, lanes[0].time, *(each.filled(np.nan) for each in of_all))


def _thinned(samples: Samples, quantity: str, edges: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield mean, lowest and highest of a quantity in columns of each device. edges: of the columns (s)."""
    firsts = np.searchsorted(samples.time, edges[:-1])
    values = np.vstack([samples[quantity], np.full(len(samples.devices), np.nan)])  # the end of the last column
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), firsts) / np.add.reduceat(known, firsts, dtype=float)
    found = (mean, np.fmin.reduceat(values, firsts), np.fmax.reduceat(values, firsts))
    # A column that just missed a sample shows the one before.
    is_empty = np.append(firsts[1:], len(samples)) == firsts
    before = np.maximum(firsts - 1, 0)
    age = (edges[1:] + edges[:-1]) / 2 - samples.time[before]
    is_near = (age >= 0) & (age <= max(samples.gap_s, edges[1] - edges[0]))
    for each in found:
        each[is_empty] = np.where(is_near[:, None], values[before], np.nan)[is_empty]
    return zip(*(each.T for each in found), strict=True)
