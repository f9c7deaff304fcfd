"""Thin the recordings of a run to columns of time, for pictures: mean, lowest and highest value of each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kmatrix.report.gpu.recordings import Node
from kmatrix.report.gpu.samples import QUANTITIES, Array, Samples
from kmatrix.report.gpu.spans import Span, spans_of

COLUMNS = 360  # about one per 3 pixels of a picture
MOST_LINES = 8  # devices that are drawn as lines; more are a band


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
