"""Thin the recording of a run to columns of time: mean, minimum and maximum of each device, for figures over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.formats.limits import Limits
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.nodes import training_began
from kmatrix.report.gpu.numbers import GpuNumbers, RecordedPhase, is_incomplete
from kmatrix.report.gpu.parts import RecordingPart, gap_s, read_parts
from kmatrix.report.gpu.stream import BLOCK_ROWS

QUANTITIES = ("utilization", "power", "memory_used")  # columns of a recording; percent, W, MiB
COLUMNS = 180  # about one per 4 pixels of a figure


@dataclass(frozen=True, slots=True)
class Lane:
    """One quantity of one device per column of time, in its own unit. None: no sample, or unknown."""

    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimeline:
    """The lanes of one device."""

    name: str  # "GPU 2 on n1", "rank 0"
    memory_total: float | None  # MiB
    lanes: Mapping[str, Lane]  # by quantity; one that was never known is missing
    is_lost: bool  # it did not respond for some time


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingTimeline:
    """The recordings of all nodes of a run, on the time of the first one."""

    seconds: float  # length
    columns: int  # of equal width
    samples: int  # of all recordings of the first node
    devices: tuple[DeviceTimeline, ...]
    phases: tuple[RecordedPhase, ...]
    left_out: int = 0  # nodes whose recordings have no place on the time of the first one


def read_timeline(
    run_dir: RunDir, gpu: GpuNumbers, columns: int = COLUMNS, quantities: Sequence[str] = QUANTITIES
) -> RecordingTimeline | None:
    """Return the recordings of a run, thinned; None without a readable gpu_samples.bin.

    gpu: the numbers of the run as `read_gpu` returns them, with phases on the time of the last recording.
    quantities: columns of a recording.
    Recordings of earlier attempts on other devices come first, and all times count from the first of them.
    The nodes of a run have clocks of their own. The end of their set-up, which all share, places them on the time of
    the first node; a node that did not get that far is left out.
    """
    nodes: list[tuple[GpuNumbers, list[RecordingPart]]] = []
    folders = {0: run_dir, **run_dir.later_nodes()}
    for number, part in (gpu.nodes or {0: gpu}).items():
        if found := read_parts(folders[number]):
            nodes.append((part, found))
    if not nodes:
        return None
    first, parts = nodes[0]
    length = parts[-1].begin + parts[-1].clock.length
    if not 0 < length < math.inf:
        return None
    samples = sum(len(part.clock) for part in parts)
    count = min(columns, samples)
    began = training_began(first)
    devices: list[DeviceTimeline] = []
    left_out = 0
    for part, its_parts in nodes:
        there = training_began(part)
        if part is first:
            shift = 0.0
        elif began is None or there is None:
            left_out += 1
            continue
        else:
            shift = parts[-1].begin + began - its_parts[-1].begin - there
        devices += _devices(part, its_parts, _Columns(length, count, shift), quantities)
    begin = parts[-1].begin
    phases = tuple(replace(phase, begin=phase.begin + begin, end=phase.end + begin) for phase in first.phases)
    return RecordingTimeline(
        seconds=length, columns=count, samples=samples, devices=tuple(devices), phases=phases, left_out=left_out
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of equal width over `length` s. shift: added to the times of a recording, s."""

    length: float
    count: int
    shift: float

    @property
    def width(self) -> float:
        return self.length / self.count


def _devices(
    node: GpuNumbers, parts: Sequence[RecordingPart], columns: _Columns, quantities: Sequence[str]
) -> list[DeviceTimeline]:
    """Return the lanes of all devices of one node: those of its last recording first."""
    current = {(device.gpu_index, device.uuid): device for device in node.devices}
    found: dict[tuple[int, str], DeviceTimeline] = {}
    for part in reversed(parts):
        recording = part.recording
        shifted = replace(columns, shift=columns.shift + part.begin)
        cells, last = _cells(part.clock, shifted)
        longest = max(gap_s(recording), columns.width)
        repeated = _repeated(last, shifted, longest)
        for header, values, limits in zip(recording.header["gpus"], recording.columns, recording.limits, strict=True):
            key = int(header["gpu_index"]), str(header.get("uuid") or "")
            found_lanes = {
                quantity: _lane(values[quantity], limits[quantity], cells, repeated)
                for quantity in quantities
                if quantity in values
            }
            lanes = {quantity: lane for quantity, lane in found_lanes.items() if lane is not None}
            if key in found:
                found[key] = replace(found[key], lanes=_joined(found[key].lanes, lanes))
                continue
            device = current.get(key)
            name = node.label(device) if device else f"{node.unit} {header['gpu_index']}"
            found[key] = DeviceTimeline(
                name=name if part is parts[-1] else f"{name}, earlier attempt",
                memory_total=header.get("memory_total"),
                lanes=lanes,
                is_lost=device is not None and is_incomplete(device),
            )
    return list(found.values())


def _joined(later: Mapping[str, Lane], earlier: Mapping[str, Lane]) -> dict[str, Lane]:
    """Return the lanes of a device of two recordings. In a column that both have, the later one counts."""

    def values(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(b if a is None else a for a, b in zip(one, other, strict=True))

    found = {**earlier, **later}
    for quantity in earlier.keys() & later.keys():
        one, other = later[quantity], earlier[quantity]
        found[quantity] = Lane(values(one.mean, other.mean), values(one.low, other.low), values(one.high, other.high))
    return found


def _cells(clock: RecordingClock, columns: _Columns) -> tuple[Any, Any]:
    """Return the column of each sample (-1: outside of all), and the time of the last sample of each column (s)."""
    import numpy as np

    cells = np.empty(len(clock), dtype=np.int16)
    last = np.full(columns.count, np.nan)
    for begin in range(0, len(clock), BLOCK_ROWS):
        times = np.array(clock.between(begin, begin + BLOCK_ROWS)) + columns.shift
        inside = (times >= 0) & (times <= columns.length)
        cell = np.minimum(np.where(inside, times, 0.0) / columns.width, columns.count - 1).astype(np.int16)
        cells[begin : begin + len(times)] = np.where(inside, cell, -1)
        last[cell[inside]] = times[inside]  # ascending: the last assignment to a column stays
    return cells, last


def _repeated(last: Any, columns: _Columns, longest: float) -> list[int]:
    """Return the column whose values each column shows: its own, or those before it if it just missed a sample.

    A column without a sample for longer than `longest` (s) shows nothing (-1): that is a gap of the recording.
    """
    found, newest = [], -1
    for column in range(columns.count):
        if not math.isnan(last[column]):
            newest = column
        near = newest >= 0 and columns.width * (column + 0.5) - last[newest] <= longest
        found.append(newest if near else -1)
    return found


def _lane(values: Sequence[float], limits: Limits, cells: Any, repeated: Sequence[int]) -> Lane | None:
    """Return one quantity of one device; None if it was never known. Impossible values are unknown."""
    import numpy as np

    count = len(repeated)
    total, number = np.zeros(count), np.zeros(count)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    lowest, highest = limits
    for begin in range(0, len(cells), BLOCK_ROWS):
        # A copy of one block: the file may be larger than the memory.
        block = np.array(values[begin : begin + BLOCK_ROWS], dtype=float)
        cell = cells[begin : begin + BLOCK_ROWS]
        with np.errstate(invalid="ignore"):
            good = (cell >= 0) & (block >= lowest) & (block <= highest)
        block, cell = block[good], cell[good]
        total += np.bincount(cell, weights=block, minlength=count)
        number += np.bincount(cell, minlength=count)
        np.minimum.at(low, cell, block)
        np.maximum.at(high, cell, block)
    if not number.any():
        return None

    def column(of: Any) -> tuple[float | None, ...]:
        return tuple(float(of[at]) if at >= 0 and number[at] else None for at in repeated)

    return Lane(column(total / np.maximum(number, 1)), column(low), column(high))
