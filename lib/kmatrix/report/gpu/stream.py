"""Compute the numbers of a recording's devices in one pass and bounded memory, from text and binary recordings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kmatrix.errors import RecordError, SchemaError
from kmatrix.gpu.formats.binary import Recording, read_samples
from kmatrix.gpu.formats.columns import MEASURED, DeviceColumns, SampleBlock, read_columns
from kmatrix.gpu.formats.text import ReadErrors
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.numbers import CPU, SIMULATED, DeviceNumbers, GpuNumbers, Statistics, TimelinePoint

Floats = NDArray[np.float64]
QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")
REPLACED = (*QUANTITIES, "joules", "samples")  # fields of a device that newer samples replace
RANK_NAME = "CPU rank "  # prefix of the device name that the recorder gives a rank on the CPU
# The recorder's warnings that with_earlier replaces by a note of its own; the second one is of version 0.1.
EXCLUDED = (EXCLUDED_ATTEMPT, "an earlier attempt is not in these numbers")
MAX_GAP_S = 60.0  # power is interpolated between samples up to this distance
BLOCK_ROWS = 1 << 16  # rows in memory at once
MAX_TIMELINE_POINTS = 1024  # about one per pixel of a graph


def read_stream(path: Path, *, cpu: bool = False) -> GpuNumbers:
    """Return the numbers of a text recording; without devices if it has no sample. cpu: its devices are ranks."""
    reader = read_columns(path)
    numbers = numbers_of(reader, path.name, cpu=cpu)
    return replace(numbers, notes=_notes(path, numbers.samples, reader.errors))


def read_binary(path: Path) -> GpuNumbers:
    """Return the numbers of a binary recording. Raises RecordError."""
    recording = read_samples(path)
    header = recording.header
    numbers = numbers_of(sample_blocks(recording), path.name)
    ranks = {int(gpu["gpu_index"]): gpu.get("rank") for gpu in header["gpus"]}
    return replace(
        numbers,
        devices=tuple(replace(device, rank=ranks.get(device.gpu_index)) for device in numbers.devices),
        device_type=str(header.get("device_type") or ""),
        simulated=bool(header.get("simulated")),
        energy_source=header.get("energy_source") if numbers.joules is not None else None,
    )


def numbers_of(blocks: Iterable[SampleBlock], name: str, *, cpu: bool = False) -> GpuNumbers:
    """Return the numbers of the devices of a recording. name: of the file.

    Energy: the difference of the energy counter if the file has one, else the trapezoidal integral of power.
    Gaps longer than MAX_GAP_S do not count.
    """
    devices: dict[int, _Device] = {}
    timeline, total = TimelineBuilder(), RunningStatistics()
    first = last = math.nan
    samples = 0
    # One pass over the recording, which may be larger than the memory.
    for block in blocks:
        first = first if samples else float(block.times[0])
        last = float(block.times[-1])
        samples += len(block)
        for part in block.parts:
            devices.setdefault(part.gpu_index, _Device()).add(block.times, part)
        memory = memory_by_device_index(block)
        timeline.add(block.times - first, memory)
        total.add(_totals(memory))
    # Sums over devices are unknown if one device is.
    order = sorted(devices)
    numbers = tuple(devices[index].numbers() for index in order)
    seconds = last - first if samples > 1 and last >= first else None
    ranks = cpu or (bool(numbers) and all(device.gpu_name.startswith(RANK_NAME) for device in numbers))
    totals, used = total.statistics(), [device.memory_used.mean for device in numbers if device.memory_used]
    joules = [device.joules for device in numbers if device.joules is not None]
    return GpuNumbers(
        evidence=name,
        device_type=CPU if ranks else "",
        devices=numbers,
        samples=samples,
        seconds=seconds,
        hz=(samples - 1) / seconds if seconds else None,
        simulated=any(device.gpu_name.endswith(SIMULATED) for device in numbers),
        energy_source=_energy_source(devices) if joules else None,
        total_mean=math.fsum(used) if used and len(used) == len(numbers) else None,
        total_max=totals.maximum if totals else None,
        joules=math.fsum(joules) if joules and len(joules) == len(numbers) else None,
        timeline=timeline.points(order),
    )


def with_newer_samples(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Update the numbers of a periodic summary with the samples recorded after it."""
    try:
        newer = read_binary(run_dir.gpu_samples)
    except SchemaError:
        raise
    except RecordError:
        return numbers
    known = {(device.gpu_index, device.uuid): device for device in newer.devices}
    # The summary is newer, or it is of other devices.
    if newer.samples <= numbers.samples or not all((d.gpu_index, d.uuid) in known for d in numbers.devices):
        return numbers
    devices = tuple(
        replace(device, **{name: getattr(known[device.gpu_index, device.uuid], name) for name in REPLACED})
        for device in numbers.devices
    )
    return replace(
        numbers,
        evidence=f"{run_dir.name}/{run_dir.gpu_samples.name}",
        devices=devices,
        samples=newer.samples,
        seconds=newer.seconds,
        hz=newer.hz,
        total_mean=newer.total_mean,
        total_max=newer.total_max,
        joules=numbers.joules if newer.joules is None else newer.joules,
    )


def with_earlier(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Add the recordings of earlier attempts on other devices to the totals.

    A note names those devices; the rows of the current devices do not include them.
    """
    for path in run_dir.earlier_gpu_samples():
        try:
            earlier = read_binary(path)
        except SchemaError:
            raise
        except RecordError as error:
            numbers = replace(numbers, notes=(*numbers.notes, error.what.replace(f"{run_dir.path}/", "")))
            continue
        numbers = _with_attempt(numbers, earlier)
    return numbers


def add_binary_timeline(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Add the memory timeline of all binary recordings of a run.

    Devices of earlier attempts are matched with the current devices by position.
    """
    found: list[Recording] = []
    for path in (*run_dir.earlier_gpu_samples(), run_dir.gpu_samples):
        with contextlib.suppress(RecordError):
            recording = read_samples(path)
            if len(recording) and len(recording.header["gpus"]) == len(numbers.devices):
                found.append(recording)
    if not found:
        return numbers
    timeline, first = TimelineBuilder(), found[0].times[0]
    for recording in found:
        for block in sample_blocks(recording):
            timeline.add(block.times - first, dict(enumerate(memory_by_device_index(block).values())))
    offset = found[-1].times[0] - first  # phases count from the start of the last recording
    phases = tuple(replace(phase, begin=phase.begin + offset, end=phase.end + offset) for phase in numbers.phases)
    return replace(numbers, timeline=timeline.points(range(len(numbers.devices))), phases=phases)


def sample_blocks(recording: Recording) -> Iterator[SampleBlock]:
    """Yield a binary recording as blocks of columns."""
    for begin in range(0, len(recording), BLOCK_ROWS):
        times = np.array(recording.times[begin : begin + BLOCK_ROWS], dtype=float)
        parts = tuple(
            DeviceColumns(
                gpu_index=int(gpu["gpu_index"]),
                gpu_name=str(gpu["gpu_name"]),
                uuid=str(gpu.get("uuid") or ""),
                memory_total=gpu.get("memory_total"),
                rows=np.arange(len(times)),
                columns={
                    name: np.array(columns[name][begin : begin + BLOCK_ROWS], dtype=float)
                    if name in columns
                    else np.full(len(times), np.nan)
                    for name in MEASURED
                },
            )
            for gpu, columns in zip(recording.header["gpus"], recording.columns, strict=True)
        )
        yield SampleBlock(times=times, parts=parts)


def memory_by_device_index(block: SampleBlock) -> dict[int, Floats]:
    """Return the memory of each device at each sample of a block; NaN if unknown."""
    memory = {}
    for part in block.parts:
        values = np.full(len(block), np.nan)
        values[part.rows] = part.columns["memory_used"]
        memory[part.gpu_index] = values
    return memory


class RunningStatistics:
    """Mean, deviation and range of a stream of values, in constant memory.

    Chunks are merged after Chan, Golub and LeVeque, The American Statistician 37 (1983).
    """

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0  # _squares: sum of squared differences from the mean
        self._minimum, self._maximum = math.inf, -math.inf

    def add(self, values: Floats) -> None:
        """Add a chunk of values. NaN are ignored."""
        # One sum instead of a mask: most chunks have no unknown value.
        if math.isnan(values.sum()):
            values = values[~np.isnan(values)]
        count = len(values)
        if not count:
            return
        mean = float(values.mean())
        residuals = values - mean
        total, shift = self._count + count, mean - self._mean
        self._squares += float(residuals @ residuals) + shift * shift * self._count * count / total
        self._mean += shift * count / total
        self._count = total
        self._minimum = min(self._minimum, float(values.min()))
        self._maximum = max(self._maximum, float(values.max()))

    def statistics(self) -> Statistics | None:
        """Return the statistics of the values so far; None without a value."""
        if not self._count:
            return None
        deviation = math.sqrt(self._squares / self._count)
        return Statistics(mean=self._mean, deviation=deviation, minimum=self._minimum, maximum=self._maximum)


class TimelineBuilder:
    """A memory timeline of at most MAX_TIMELINE_POINTS points, in constant memory.

    Each point is the mean of `width` samples. The width doubles when the points run out, so a long recording has at
    least MAX_TIMELINE_POINTS / 2 points.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._width = 1  # samples per point
        self._seconds = np.zeros(MAX_TIMELINE_POINTS)  # sum per point
        self._memory: dict[int, tuple[Floats, Floats]] = {}  # sum and number of values per point, by device

    def add(self, seconds: Floats, memory: Mapping[int, Floats]) -> None:
        """Add samples: their times, and the memory of each device (NaN: unknown)."""
        while self._samples + len(seconds) > MAX_TIMELINE_POINTS * self._width:
            self._double_width()
        # bincount adds all samples of all points at once; a loop over samples would be far slower.
        point = np.arange(self._samples, self._samples + len(seconds)) // self._width
        self._samples += len(seconds)
        self._seconds += np.bincount(point, seconds, minlength=MAX_TIMELINE_POINTS)
        for device, values in memory.items():
            empty = np.zeros(MAX_TIMELINE_POINTS), np.zeros(MAX_TIMELINE_POINTS)
            sums, counts = self._memory.setdefault(device, empty)
            known = ~np.isnan(values)
            sums += np.bincount(point[known], values[known], minlength=MAX_TIMELINE_POINTS)
            counts += np.bincount(point[known], minlength=MAX_TIMELINE_POINTS)

    def points(self, devices: Sequence[int]) -> tuple[TimelinePoint, ...]:
        """Return the timeline with the devices in this order."""
        length = -(-self._samples // self._width)
        samples = np.minimum(self._width, self._samples - self._width * np.arange(length))
        seconds = self._seconds[:length] / samples
        columns = [self._means(device, length) for device in devices]
        return tuple(
            TimelinePoint(second, tuple(column[at] for column in columns)) for at, second in enumerate(seconds.tolist())
        )

    def _means(self, device: int, length: int) -> list[float | None]:
        """Return the mean of each point; None without a value."""
        if device not in self._memory:
            return [None] * length
        sums, counts = (column[:length].tolist() for column in self._memory[device])
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    def _double_width(self) -> None:
        self._seconds = _merge_pairs(self._seconds)
        self._memory = {
            device: (_merge_pairs(sums), _merge_pairs(counts)) for device, (sums, counts) in self._memory.items()
        }
        self._width *= 2


class _Device:
    """Accumulates the samples of one device."""

    def __init__(self) -> None:
        self._statistics = {name: RunningStatistics() for name in QUANTITIES}
        self._samples = 0
        self._counted, self.differences = 0.0, 0  # J from the energy counter, and number of its differences
        self._area, self._trapezoids = 0.0, 0  # J integrated from power, and number of trapezoids
        self._last: DeviceColumns | None = None
        self._last_power: Floats = np.empty((2, 0))  # time and power (W) of the last sample
        self._last_energy: Floats = np.empty(0)  # last known value of the energy counter, J

    def add(self, times: Floats, part: DeviceColumns) -> None:
        """Add the rows of one block. times: of all rows of the block, Unix seconds."""
        self._last = part
        for name, statistics in self._statistics.items():
            statistics.add(part.columns[name])
        # A row without any value is a lost GPU, not a sample.
        self._samples += int((~np.isnan([part.columns[name] for name in MEASURED])).any(axis=0).sum())
        self._integrate(times[part.rows], part.columns["power"])
        self._count(part.columns["energy_j"])

    def _integrate(self, times: Floats, power: Floats) -> None:
        """Add the area under the power, between neighbouring samples at most MAX_GAP_S apart."""
        # The last sample of the previous block is prepended, so that no trapezoid is lost between blocks.
        x, y = np.concatenate([self._last_power, [times, power]], axis=1)
        width, area = np.diff(x), np.diff(x) * (y[1:] + y[:-1]) / 2
        near = (width >= 0) & (width <= MAX_GAP_S) & ~np.isnan(area)
        self._area += float(area[near].sum())
        self._trapezoids += int(near.sum())
        self._last_power = np.array([x[-1:], y[-1:]])

    def _count(self, energy: Floats) -> None:
        """Add the increase of the energy counter. A counter that decreased was reset by the driver."""
        known = np.concatenate([self._last_energy, energy[~np.isnan(energy)]])
        increase = np.diff(known)
        self._counted += float(increase[increase >= 0].sum())
        self.differences += int((increase >= 0).sum())
        self._last_energy = known[-1:]

    def numbers(self) -> DeviceNumbers:
        """Return the numbers of the samples so far."""
        assert self._last is not None
        return DeviceNumbers(
            gpu_index=self._last.gpu_index,
            gpu_name=self._last.gpu_name,
            uuid=self._last.uuid,
            samples=self._samples,
            memory_total=self._last.memory_total,
            memory_used=self._statistics["memory_used"].statistics(),
            utilization=self._statistics["utilization"].statistics(),
            power=self._statistics["power"].statistics(),
            temperature=self._statistics["temperature"].statistics(),
            sm_clock=self._statistics["sm_clock"].statistics(),
            joules=self._counted if self.differences else self._area if self._trapezoids else None,
        )


def _with_attempt(numbers: GpuNumbers, earlier: GpuNumbers) -> GpuNumbers:
    """Add the totals of an earlier attempt, or a note why they cannot be added."""
    devices = ", ".join(f"{earlier.label(device)} ({device.gpu_name})" for device in earlier.devices)
    seconds = earlier.seconds or 0.0
    recorded = f"an earlier attempt was recorded on {devices or 'no device'}, {seconds:.0f} s in {earlier.evidence}"
    if (earlier.device_type, earlier.simulated) != (numbers.device_type, numbers.simulated) or not earlier.devices:
        return replace(numbers, notes=(*numbers.notes, f"{recorded}: not included in these numbers"))
    known = numbers.joules is not None and earlier.joules is not None
    peaks = [value for value in (numbers.total_max, earlier.total_max) if value is not None]
    notes = (note for note in numbers.notes if not note.startswith(EXCLUDED))
    return replace(
        numbers,
        samples=numbers.samples + earlier.samples,
        seconds=None if numbers.seconds is None else numbers.seconds + seconds,
        total_max=max(peaks, default=None),
        joules=(numbers.joules or 0.0) + (earlier.joules or 0.0) if known else None,
        notes=(*notes, f"{recorded}: included in time, energy and total peak, not in the rows of the devices"),
    )


def _totals(memory: Mapping[int, Floats]) -> Floats:
    """Return the memory of all devices together, for the samples with at least one known device."""
    values = np.array(list(memory.values()))
    known = ~np.isnan(values)
    return np.where(known, values, 0.0).sum(axis=0)[known.any(axis=0)]  # type: ignore[no-any-return]


def _energy_source(devices: Mapping[int, _Device]) -> str:
    return "counter" if all(device.differences for device in devices.values()) else "power"


def _notes(path: Path, samples: int, loss: ReadErrors | None) -> tuple[str, ...]:
    if loss:
        return (str(loss),)
    return () if samples else (f"{path.name} has no sample",)


def _merge_pairs(values: Floats) -> Floats:
    """Return the sums of neighbouring pairs, padded with zeros to the same length."""
    return np.concatenate([values[::2] + values[1::2], np.zeros(len(values) // 2)])
