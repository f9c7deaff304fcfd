"""A recording as text, ours or the original project's -> the numbers of its devices, in one pass and bounded memory."""

from __future__ import annotations

import math
from pathlib import Path

from kmatrix.gpu.formats import GpuSample, Loss, read_stats
from kmatrix.report.gpu_values import CPU, SIMULATED, DeviceNumbers, GpuNumbers
from kmatrix.report.spread import CHUNK, SpreadOf, TimelineOf

QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")
RANK_NAME = "CPU rank "  # how a recorder names a rank of a run on the CPU
HOLE_S = 60.0  # longest time between two samples over which power is taken to go straight


def read_stream(path: Path, *, cpu: bool = False) -> GpuNumbers:
    """Return the numbers of a recording; without devices where it holds no sample. cpu: its devices are ranks.

    Energy is the difference of the counter where the file has one, else the area under the power (trapezoids);
    over a hole of more than HOLE_S nothing is assumed, and none is counted.
    """
    devices: dict[int, _Device] = {}
    timeline, total = TimelineOf(), SpreadOf()
    first = last = math.nan
    samples = 0
    reader = read_stats(path)
    for snapshot in reader:
        last = snapshot.time
        if not samples:
            first = last
        samples += 1
        memory: dict[int, float | None] = {}
        for sample in snapshot.samples:
            index = sample.gpu_index
            device = devices.get(index)
            if device is None:
                device = devices[index] = _Device()
            device.add(last, sample)
            memory[index] = sample.memory_used
        known = [value for value in memory.values() if value is not None]
        if known:
            total.add(math.fsum(known))
        timeline.add(last - first, memory)
    order = sorted(devices)
    numbers = tuple(devices[index].numbers() for index in order)
    seconds = last - first if samples > 1 and last >= first else None
    ranks = cpu or (bool(numbers) and all(device.gpu_name.startswith(RANK_NAME) for device in numbers))
    spread, used = total.spread(), [device.memory_used.mean for device in numbers if device.memory_used]
    joules = [device.joules for device in numbers if device.joules is not None]
    return GpuNumbers(
        evidence=path.name,
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
        notes=_notes(path, samples, reader.loss),
        timeline=timeline.moments(order),
    )


class _Device:
    """The samples of one device, folded up as they come."""

    def __init__(self) -> None:
        self.of = {name: SpreadOf() for name in QUANTITIES}
        self.memory, self.utilization, self.power, self.temperature, self.clock = (
            of.waiting for of in self.of.values()
        )
        self.samples, self._added = 0, 0
        self.counted = 0.0  # joules by the counter
        self.area = 0.0  # joules under the power
        self.steps = 0  # differences that the counter gave
        self.slices = 0  # trapezoids
        self.latest: GpuSample | None = None
        self._power: tuple[float, float] | None = None
        self._counter: float | None = None

    def add(self, time: float, sample: GpuSample) -> None:
        """Take in one sample. Values go straight into the lists that wait: this runs for every sample of a file."""
        self.latest = sample
        self.samples += sample.is_known
        if (value := sample.memory_used) is not None:
            self.memory.append(value)
        if (value := sample.utilization) is not None:
            self.utilization.append(value)
        if (value := sample.temperature) is not None:
            self.temperature.append(value)
        if (value := sample.sm_clock) is not None:
            self.clock.append(value)
        if (value := sample.energy_j) is not None:
            self._count(value)
        before, self._power = self._power, None
        if (value := sample.power) is not None:
            self.power.append(value)
            if before is not None and 0 <= time - before[0] <= HOLE_S:
                self.area += (time - before[0]) * (value + before[1]) / 2
                self.slices += 1
            self._power = (time, value)
        self._added += 1
        if self._added % CHUNK == 0:
            for spread in self.of.values():
                spread.fold()

    def _count(self, energy: float) -> None:
        """Take in the counter; one that fell begins anew."""
        if self._counter is not None and energy >= self._counter:
            self.counted += energy - self._counter
            self.steps += 1
        self._counter = energy

    def numbers(self) -> DeviceNumbers:
        assert self.latest is not None
        return DeviceNumbers(
            gpu_index=self.latest.gpu_index,
            gpu_name=self.latest.gpu_name,
            uuid=self.latest.uuid,
            samples=self.samples,
            memory_total=self.latest.memory_total,
            memory_used=self.of["memory_used"].spread(),
            utilization=self.of["utilization"].spread(),
            power=self.of["power"].spread(),
            temperature=self.of["temperature"].spread(),
            sm_clock=self.of["sm_clock"].spread(),
            joules=self.counted if self.steps else self.area if self.slices else None,
        )


def _source(devices: dict[int, _Device]) -> str:
    return "counter" if all(device.steps for device in devices.values()) else "power"


def _notes(path: Path, samples: int, loss: Loss | None) -> tuple[str, ...]:
    if loss:
        return (str(loss),)
    return () if samples else (f"{path.name} holds no sample",)
