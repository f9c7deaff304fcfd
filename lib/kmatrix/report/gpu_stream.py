"""A recording, as text or binary -> the numbers of its devices, in one pass and bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kmatrix.gpu.formats import Loss
from kmatrix.gpu.formats.blocks import MEASURED, Block, Part
from kmatrix.gpu.formats.columns import read_columns
from kmatrix.report.gpu_values import CPU, SIMULATED, DeviceNumbers, GpuNumbers
from kmatrix.report.spread import SpreadOf, TimelineOf

Floats = NDArray[np.float64]
QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")
RANK_NAME = "CPU rank "  # how a recorder names a rank of a run on the CPU
HOLE_S = 60.0  # longest time between two samples over which power is taken to go straight


def read_stream(path: Path, *, cpu: bool = False) -> GpuNumbers:
    """Return the numbers of a recording as text; no devices where it holds no sample. cpu: its devices are ranks."""
    reader = read_columns(path)
    numbers = numbers_of(reader, path.name, cpu=cpu)
    return replace(numbers, notes=_notes(path, numbers.samples, reader.loss))


def numbers_of(blocks: Iterable[Block], name: str, *, cpu: bool = False) -> GpuNumbers:
    """Return the numbers of the devices of a recording. name: of its file.

    Energy is the difference of the counter where the file has one, else the area under the power (trapezoids);
    over a hole of more than HOLE_S nothing is assumed, and none is counted.
    """
    devices: dict[int, _Device] = {}
    timeline, total = TimelineOf(), SpreadOf()
    first = last = math.nan
    samples = 0
    for block in blocks:
        first = first if samples else float(block.times[0])
        last = float(block.times[-1])
        samples += len(block)
        for part in block.parts:
            devices.setdefault(part.gpu_index, _Device()).add(block.times, part)
        memory = memory_of(block)
        timeline.add(block.times - first, memory)
        total.add(_totals(memory))
    order = sorted(devices)
    numbers = tuple(devices[index].numbers() for index in order)
    seconds = last - first if samples > 1 and last >= first else None
    ranks = cpu or (bool(numbers) and all(device.gpu_name.startswith(RANK_NAME) for device in numbers))
    spread, used = total.spread(), [device.memory_used.mean for device in numbers if device.memory_used]
    joules = [device.joules for device in numbers if device.joules is not None]
    return GpuNumbers(
        evidence=name,
        device_type=CPU if ranks else "",
        devices=numbers,
        samples=samples,
        seconds=seconds,
        hz=(samples - 1) / seconds if seconds else None,
        simulated=any(device.gpu_name.endswith(SIMULATED) for device in numbers),
        energy_source=_source(devices) if joules else None,
        total_mean=math.fsum(used) if used and len(used) == len(numbers) else None,
        total_high=spread.high if spread else None,
        joules=math.fsum(joules) if joules and len(joules) == len(numbers) else None,
        timeline=timeline.moments(order),
    )


class _Device:
    """The samples of one device, folded up as they come."""

    def __init__(self) -> None:
        self._of = {name: SpreadOf() for name in QUANTITIES}
        self._samples = 0
        self._counted, self.differences = 0.0, 0  # joules by the counter, and how often it gave a difference
        self._area, self._slices = 0.0, 0  # joules under the power, and trapezoids
        self._last: Part | None = None
        self._power: Floats = np.empty((2, 0))  # the time and the watts of the last sample
        self._counter: Floats = np.empty(0)  # its last known value

    def add(self, times: Floats, part: Part) -> None:
        """Take in what a block holds of the device. times: of the block."""
        self._last = part
        for name, spread in self._of.items():
            spread.add(part.columns[name])
        self._samples += int((~np.isnan([part.columns[name] for name in MEASURED])).any(axis=0).sum())
        self._integrate(times[part.rows], part.columns["power"])
        self._count(part.columns["energy_j"])

    def _integrate(self, times: Floats, power: Floats) -> None:
        """Sum up power between samples that both know it."""
        x, y = np.concatenate([self._power, [times, power]], axis=1)
        apart, area = np.diff(x), np.diff(x) * (y[1:] + y[:-1]) / 2
        near = (apart >= 0) & (apart <= HOLE_S) & ~np.isnan(area)
        self._area += float(area[near].sum())
        self._slices += int(near.sum())
        self._power = np.array([x[-1:], y[-1:]])

    def _count(self, energy: Floats) -> None:
        """Take in the counter; one that fell begins anew."""
        known = np.concatenate([self._counter, energy[~np.isnan(energy)]])
        grown = np.diff(known)
        self._counted += float(grown[grown >= 0].sum())
        self.differences += int((grown >= 0).sum())
        self._counter = known[-1:]

    def numbers(self) -> DeviceNumbers:
        assert self._last is not None
        return DeviceNumbers(
            gpu_index=self._last.gpu_index,
            gpu_name=self._last.gpu_name,
            uuid=self._last.uuid,
            samples=self._samples,
            memory_total=self._last.memory_total,
            memory_used=self._of["memory_used"].spread(),
            utilization=self._of["utilization"].spread(),
            power=self._of["power"].spread(),
            temperature=self._of["temperature"].spread(),
            sm_clock=self._of["sm_clock"].spread(),
            joules=self._counted if self.differences else self._area if self._slices else None,
        )


def memory_of(block: Block) -> dict[int, Floats]:
    """Return the memory of each device at each moment of a block; NaN: not known, or not there."""
    memory = {}
    for part in block.parts:
        values = np.full(len(block), np.nan)
        values[part.rows] = part.columns["memory_used"]
        memory[part.gpu_index] = values
    return memory


def _totals(memory: Mapping[int, Floats]) -> Floats:
    """Return the memory of all devices together at the moments at which one is known."""
    values = np.array(list(memory.values()))
    known = ~np.isnan(values)
    return np.where(known, values, 0.0).sum(axis=0)[known.any(axis=0)]  # type: ignore[no-any-return]


def _source(devices: Mapping[int, _Device]) -> str:
    return "counter" if all(device.differences for device in devices.values()) else "power"


def _notes(path: Path, samples: int, loss: Loss | None) -> tuple[str, ...]:
    if loss:
        return (str(loss),)
    return () if samples else (f"{path.name} holds no sample",)
