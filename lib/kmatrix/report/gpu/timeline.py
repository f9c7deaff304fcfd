"""Thin the recordings of a run to columns of time, for figures: mean, lowest and highest value of each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from kmatrix.report.gpu.recordings import Recording, RunRecordings
from kmatrix.report.gpu.samples import CPU, Array, DeviceFacts, Samples, label_of
from kmatrix.report.gpu.spans import Span, attempts_of, spans_of

COLUMNS = 180  # about one per 4 pixels of a figure
MOST_LINES = 8  # devices that are drawn as lines; more are a band


@dataclass(frozen=True, slots=True)
class Lane:
    """One quantity of one device, or of all, per column of time. NaN: no sample, or unknown."""

    mean: Array
    low: Array
    high: Array

    def over(self, other: Lane) -> Lane:
        """Return this lane, and the other one where it is unknown."""
        pairs = ((self.mean, other.mean), (self.low, other.low), (self.high, other.high))
        return Lane(*(np.where(np.isnan(mine), its, mine) for mine, its in pairs))


@dataclass(frozen=True, slots=True)
class DeviceTimeline:
    """One device over time, in all recordings; where two have a value, the later one counts."""

    label: str  # "GPU 2 on n1", "rank 0", "mean of 64, lowest to highest"
    memory_total: float | None  # MiB of a GPU; None for ranks, which share that of their machine
    lanes: dict[str, Lane] = field(repr=False)  # by quantity; one that was never known is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All recordings of a run, placed by the wall clocks of their machines."""

    seconds: float  # length
    centres: Array  # (columns,), s since the start of the first recording
    devices: tuple[DeviceTimeline, ...]
    spans: tuple[Span, ...]  # phases without training of the first node, within the timeline


def timeline_of(
    found: RunRecordings,
    quantities: Sequence[str],
    columns: int = COLUMNS,
    *,
    last_times: Mapping[int, float] | None = None,
    running: bool = False,
) -> Timeline | None:
    """Return the recordings of a run in columns of equal time; None without two samples.

    last_times, running: as of `kmatrix.report.gpu.measure.TrainingTotals`.
    Devices of the last attempt come first, those of others have the word "earlier" in their label.
    """
    placed = _placed(found.recordings)
    length = max((begin + one.samples.time[-1] for one, begin in placed), default=0.0)
    if not length:
        return None
    count = min(columns, max(len(one.samples) for one, _ in placed))
    edges = np.linspace(0.0, length, count + 1)
    attempts = attempts_of(found.folders[0], last_times, is_first=True) if 0 in found.folders else []
    newest = {one.node: one.samples.devices for one, _ in placed}  # of each node, the last one stays
    drawn: dict[tuple[bool, int, int, DeviceFacts], DeviceTimeline] = {}
    spans: list[Span] = []
    for one, begin in reversed(placed):
        is_cpu = one.samples.device_type == CPU
        thinned = _thinned(one.samples, begin, quantities, edges)
        for at, facts in enumerate(one.samples.devices):
            is_earlier = facts not in newest[one.node]
            label = label_of(facts, one.host, is_cpu=is_cpu) + (", earlier attempt" if is_earlier else "")
            empty = DeviceTimeline(label, None if is_cpu else facts.memory_total, {})
            device = drawn.setdefault((is_earlier, one.node, facts.index, facts), empty)
            for quantity, lane in thinned[at].items():
                device.lanes[quantity] = device.lanes.get(quantity, lane).over(lane)
        if one.node == 0 and attempts:
            spans += _within(spans_of(one.samples, attempts, running=running), one.samples, begin)
    devices = tuple(drawn[key] for key in sorted(drawn, key=lambda key: key[:3]))
    spans.sort(key=attrgetter("begin"))
    return Timeline(seconds=length, centres=(edges[1:] + edges[:-1]) / 2, devices=devices, spans=tuple(spans))


def range_of(lanes: Sequence[Lane]) -> Lane:
    """Return the mean, the lowest and the highest of the devices that are known in each column."""
    means = np.ma.masked_invalid([lane.mean for lane in lanes])
    return Lane(*(each.filled(np.nan) for each in (means.mean(axis=0), means.min(axis=0), means.max(axis=0))))


def banded(timeline: Timeline, quantity: str) -> list[DeviceTimeline]:
    """Return the lines of one quantity: each device, or of many their mean with the lowest and highest, and the worst.

    The worst is the device whose mean is farthest from that of all.
    """
    known = [one for one in timeline.devices if quantity in one.lanes]
    if len(known) <= MOST_LINES:
        return known
    every = range_of([one.lanes[quantity] for one in known])
    distances = [abs(np.ma.masked_invalid(one.lanes[quantity].mean - every.mean).mean()) for one in known]
    label = f"mean of {len(known)}, lowest to highest"
    return [DeviceTimeline(label, None, {quantity: every}), known[int(np.argmax(distances))]]


def _placed(recordings: Sequence[Recording]) -> list[tuple[Recording, float]]:
    """Return recordings with their begin, s since the first one: by the wall clock, in the order of each node."""
    if not recordings:
        return []
    zero = min(float(one.samples.wall[0]) for one in recordings)
    ends: dict[int, float] = {}  # node -> end of its recording before
    found = []
    for one in recordings:
        begin = max(ends.get(one.node, 0.0), float(one.samples.wall[0]) - zero)
        found.append((one, begin))
        ends[one.node] = begin + float(one.samples.time[-1])
    return found


def _thinned(samples: Samples, begin: float, quantities: Sequence[str], edges: Array) -> list[dict[str, Lane]]:
    """Return the quantities of each device of a recording in columns.

    begin: of the recording (s). edges: of the columns (s).
    """
    time, centres = samples.time + begin, (edges[1:] + edges[:-1]) / 2
    firsts = np.searchsorted(time, edges[:-1])
    is_empty = np.append(firsts[1:], len(time)) == firsts
    # A column that just missed a sample shows the one before.
    before = np.maximum(0, np.searchsorted(time, centres, side="right") - 1)
    near = (time[before] <= centres) & (centres - time[before] <= max(samples.gap_s, edges[1] - edges[0]))
    lanes: list[dict[str, Lane]] = [{} for _ in samples.devices]
    for quantity in quantities:
        values = np.vstack([samples.values[quantity], np.full(len(lanes), np.nan)])  # the end of the last column
        known = ~np.isnan(values)
        number = np.add.reduceat(known, firsts, axis=0, dtype=float)
        with np.errstate(invalid="ignore"):
            mean = np.add.reduceat(np.where(known, values, 0.0), firsts, axis=0) / number
        found = (mean, np.fmin.reduceat(values, firsts, axis=0), np.fmax.reduceat(values, firsts, axis=0))
        for each in found:
            each[is_empty] = np.where(near[:, None], values[before], np.nan)[is_empty]
        for device in np.flatnonzero(known.any(axis=0)):
            lanes[device][quantity] = Lane(*(each[:, device] for each in found))
    return lanes


def _within(spans: Sequence[Span], samples: Samples, begin: float) -> list[Span]:
    """Return spans within a recording, on the time of the run. begin: of the recording (s)."""
    last = float(samples.time[-1])
    cut = (Span(one.phase, max(0.0, one.begin), min(last, one.end)) for one in spans)
    return [Span(one.phase, one.begin + begin, one.end + begin) for one in cut if one.begin < one.end]
