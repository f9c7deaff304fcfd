"""Compute the numbers of a recording's devices in one pass and bounded memory, from text and binary recordings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from operator import add, le, lt, mul, sub
from pathlib import Path

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import Recording, damage_note, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.formats.columns import MEASURED, DeviceColumns, SampleBlock, read_columns
from kmatrix.gpu.formats.limits import Limits, limits_of
from kmatrix.gpu.formats.sound import as_list
from kmatrix.gpu.formats.text import ReadErrors
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT, GAP_S, NO_POWER, NO_RESPONSE, SILENT_S
from kmatrix.gpu.running import RunningStats
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.numbers import CPU, SIMULATED, DeviceNumbers, GpuNumbers, Statistics, TimelinePoint
from kmatrix.report.gpu.parts import RecordingPart, gap_s, read_parts
from kmatrix.stats import complete_sum
from kmatrix.text import plural

Floats = Sequence[float]
QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")
REPLACED = (*QUANTITIES, "joules", "samples", "lost_s")  # fields of a device that newer samples replace
RANK_NAME = "CPU rank "  # prefix of the device name that the recorder gives a rank on the CPU
INCLUDED = "in time, energy and mean power of the run; memory, utilization and balance are of the last attempt"
MAX_GAP_S = 60.0  # power is interpolated between samples up to this distance
BLOCK_ROWS = 1 << 16  # rows in memory at once
MAX_TIMELINE_POINTS = 1024  # about one per pixel of a graph


def read_stream(path: Path, *, cpu: bool = False) -> GpuNumbers:
    """Return the numbers of a text recording; without devices if it has no sample. cpu: its devices are ranks."""
    reader, checks = read_columns(path), Checks(cpu=cpu)
    numbers = numbers_of(map(checks.checked, reader), path.name, cpu=cpu)
    errors = tuple(checks.errors())
    notes = (
        *_notes(path, numbers.samples, reader.errors),
        *numbers.notes,
        *(f"{path.name}: {error}" for error in errors),
    )
    return replace(numbers, notes=notes, consistent=not errors)


def read_binary(path: Path) -> GpuNumbers:
    """Return the numbers of a binary recording. Raises RecordError."""
    recording = read_samples(path)
    header = recording.header
    ranks = header.get("device_type") == CPU
    checks = Checks(cpu=ranks)
    blocks = map(checks.possible, sample_blocks(recording))
    numbers = numbers_of(blocks, path.name, cpu=ranks, complete_energy=True)
    errors = [f"{path.name}: {error}" for error in checks.errors()]
    by_index = {int(gpu["gpu_index"]): gpu.get("rank") for gpu in header["gpus"]}
    return replace(
        numbers,
        notes=(*damage_note(path, recording.damaged), *numbers.notes, *errors),
        consistent=not errors,
        devices=tuple(replace(device, rank=by_index.get(device.gpu_index)) for device in numbers.devices),
        device_type=str(header.get("device_type") or ""),
        simulated=bool(header.get("simulated")),
        seconds=recorded_seconds(recording),
        energy_source=header.get("energy_source") if numbers.joules is not None else None,
        timeline=(),  # of all recordings together: `add_binary_timeline`
    )


def recorded_seconds(recording: Recording) -> float | None:
    """Return the time in s that a recording covers, without the gaps between attempts; None without two samples."""
    if len(recording) < 2:
        return None
    times = RecordingClock(recording).between(0, len(recording))
    limit = gap_s(recording)
    steps = list(map(sub, times[1:], times))
    return math.fsum(steps) if max(steps) <= limit else math.fsum(step for step in steps if step <= limit)


def numbers_of(
    blocks: Iterable[SampleBlock], name: str, *, cpu: bool = False, complete_energy: bool = False
) -> GpuNumbers:
    """Return the numbers of the devices of a recording. name: of the file. cpu: devices without a name are ranks.

    Energy: the difference of the energy counter if the file has one, else the trapezoidal integral of power.
    Gaps of the recording that are longer than MAX_GAP_S do not count; the energy of a device without values while
    others have some is unknown. complete_energy: a counter with a value at the end has no gap.
    """
    devices: dict[int, _Device] = {}
    timeline, total = TimelineBuilder(), RunningStats()
    last = math.nan
    seconds, samples = 0.0, 0
    # One pass over the recording, which may be larger than the memory.
    for block in blocks:
        if not len(block):
            continue
        # A step back of the clock counts as no time: neither the recording nor its timeline becomes shorter.
        steps = list(map(sub, block.times, [last if samples else block.times[0], *block.times]))
        passed = steps if min(steps) >= 0 else [max(0.0, step) for step in steps]
        elapsed = [seconds + since for since in accumulate(passed)]
        seconds += math.fsum(passed)
        last = block.times[-1]
        for part in block.parts:
            devices.setdefault(part.gpu_index, _Device()).add(block.times, part)
        samples += len(block)
        memory = memory_by_device_index(block)
        timeline.add(elapsed, memory)
        total.add(_totals(memory))
    # Sums over devices are unknown if one device is.
    order = sorted(devices)
    ranks = all(_is_rank(devices[index].gpu_name, index, cpu=cpu) for index in order) if order else cpu
    length = seconds if samples > 1 else None
    step = seconds / (samples - 1) if samples > 1 else 0.0
    numbers = tuple(
        devices[index].numbers(samples, step, is_rank=ranks, complete_energy=complete_energy) for index in order
    )
    return GpuNumbers(
        evidence=name,
        device_type=CPU if ranks else "",
        devices=numbers,
        samples=samples,
        seconds=length,
        hz=(samples - 1) / length if length else None,
        simulated=any(device.gpu_name.endswith(SIMULATED) for device in numbers),
        energy_source=_energy_source(devices) if any(device.joules is not None for device in numbers) else None,
        total_mean=complete_sum([device.memory_used.mean if device.memory_used else None for device in numbers]),
        total_max=total.maximum if total.count else None,
        joules=complete_sum([device.joules for device in numbers]),
        timeline=timeline.points(order),
        notes=() if ranks else tuple(_gaps(numbers, devices)),
    )


def _is_rank(name: str, index: int, *, cpu: bool) -> bool:
    """Return whether a device is a rank. cpu: one without a name of its own, as in a table, is."""
    # A run on the CPU may be recorded on simulated GPUs, which have names.
    return name.startswith(RANK_NAME) or (cpu and name in ("", f"GPU {index}"))


def _gaps(numbers: Sequence[DeviceNumbers], devices: Mapping[int, _Device]) -> Iterator[str]:
    """Yield a note per GPU that did not respond, or whose power was unknown, for some time."""
    for device in numbers:
        name = f"GPU {device.gpu_index}"
        if device.lost_s:
            unknown = "its energy and mean power are" if device.joules is None else "its mean power is"
            yield f"{name} {NO_RESPONSE} {device.lost_s:.1f} s: {unknown} unknown, its other means are of the rest"
        elif device.joules is None and device.power and devices[device.gpu_index].lacks_power:
            yield f"{name} {NO_POWER} {GAP_S:g} s: its energy is unknown"


@dataclass(slots=True, kw_only=True)
class Checks:
    """Removes values from a recording that cannot be true, and counts them. cpu: its devices are ranks."""

    cpu: bool = False
    _last: float = -math.inf  # Unix s, time of the last sample
    _same: int = 0  # samples with the time of the one before
    _back: int = 0  # samples before the one before
    _negative: dict[str, int] = field(default_factory=dict)  # quantity -> negative values
    _above: dict[str, int] = field(default_factory=dict)  # quantity -> values that no GPU reaches
    _repeated: set[int] = field(default_factory=set)  # indices of several GPUs of one sample

    def checked(self, block: SampleBlock) -> SampleBlock:
        """Return a block without impossible values, and without samples at the time of the one before."""
        self._repeated |= block.repeated
        times = [self._last, *block.times]
        self._last = block.times[-1]
        if not all(map(lt, times, block.times)):
            self._back += sum(after < before for before, after in pairwise(times))
            keep = [row for row, (before, after) in enumerate(pairwise(times)) if after != before]
            self._same += len(block) - len(keep)
            block = _rows_of(block, keep)
        return self.possible(block)

    def possible(self, block: SampleBlock) -> SampleBlock:
        """Return a block with NaN in place of impossible values."""
        return replace(block, parts=tuple(map(self._possible, block.parts)))

    def errors(self) -> Iterator[str]:
        """Yield what cannot be true."""
        for index in sorted(self._repeated):
            yield f"several GPUs have the index {index}: only the first one is counted"
        for quantity, count in self._negative.items():
            yield f"{plural(count, 'negative value')} of {quantity}: unknown instead"
        for quantity, count in self._above.items():
            yield f"{plural(count, 'value')} of {quantity} above what a GPU has: unknown instead"
        if self._same:
            yield f"{plural(self._same, 'sample')} with the time of the one before: only the first one is counted"
        if self._back:
            yield f"the time goes back {plural(self._back, 'time')}: counted as no time"

    def _possible(self, part: DeviceColumns) -> DeviceColumns:
        """Return the columns of a device with NaN in place of impossible values."""
        found = {}
        is_rank = self.cpu or part.gpu_name.startswith(RANK_NAME)
        for name, values in part.columns.items():
            low, high = limits_of(name, part.memory_total, is_rank=is_rank)
            if _all_possible(values, (low, high)):
                continue
            for counts, number in (
                (self._negative, sum(value < low for value in values)),
                (self._above, sum(value > high for value in values)),
            ):
                if number:
                    counts[name] = counts.get(name, 0) + number
            found[name] = [value if low <= value <= high else math.nan for value in values]
        return replace(part, columns={**part.columns, **found}) if found else part


def _all_possible(values: Floats, limits: Limits) -> bool:
    """Return whether each value is unknown or within its limits."""
    # In C. A column whose first value is NaN has no minimum, and many columns have no other value.
    known = values if values and not math.isnan(values[0]) else [value for value in values if not math.isnan(value)]
    return not known or (limits[0] <= min(known) and max(known) <= limits[1])


def _rows_of(block: SampleBlock, keep: Sequence[int]) -> SampleBlock:
    """Return these rows of a block."""
    place = {row: at for at, row in enumerate(keep)}
    parts = []
    for part in block.parts:
        mine = [at for at, row in enumerate(part.rows) if row in place]
        columns = {name: [values[at] for at in mine] for name, values in part.columns.items()}
        parts.append(replace(part, rows=[place[part.rows[at]] for at in mine], columns=columns))
    return replace(block, times=[block.times[row] for row in keep], parts=tuple(part for part in parts if part.rows))


def with_newer_samples(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Update the numbers of a periodic summary with the samples recorded after it."""
    try:
        newer = read_binary(run_dir.gpu_samples)
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
        consistent=newer.consistent,
        notes=(*numbers.notes, *_errors_of(run_dir.gpu_samples, newer)),
    )


def with_earlier(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Add the recordings of earlier attempts on other devices to time and energy.

    A note names those devices; memory, utilization and the rows of the current devices do not include them.
    """
    for path in run_dir.earlier_gpu_samples():
        try:
            earlier = read_binary(path)
        except RecordError as error:
            numbers = replace(numbers, notes=(*numbers.notes, error.what.replace(f"{run_dir.path}/", "")))
            continue
        errors = _errors_of(path, earlier)
        numbers = _with_attempt(numbers, earlier)
        numbers = replace(numbers, notes=(*numbers.notes, *errors))
    return numbers


def _errors_of(path: Path, numbers: GpuNumbers) -> list[str]:
    """Return the notes about the errors in a recording: they begin with its name."""
    return [note for note in numbers.notes if note.startswith(path.name)]


def is_included(numbers: GpuNumbers, recording: Recording) -> bool:
    """Return whether the numbers of a run include a recording: simulated and real devices are never combined."""
    header = recording.header
    kind = str(header.get("device_type") or ""), bool(header.get("simulated"))
    return kind == (numbers.device_type, numbers.simulated) and bool(header["gpus"])


def add_binary_timeline(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Add the memory timeline of all binary recordings of a run, with the gaps in and between them."""
    parts = read_parts(run_dir)
    # Not a condition on the last one, which the numbers describe.
    shown = [part for part in parts if part is parts[-1] or is_included(numbers, part.recording)]
    pieces = [(part, begin, end) for part in shown for begin, end in part.pieces()]
    samples = sum(end - begin for _, begin, end in pieces)
    timeline: list[TimelinePoint] = []
    last = 0.0
    for part, begin, end in pieces:
        if timeline:
            timeline += [TimelinePoint(last, ()), TimelinePoint(part.begin + part.clock.of(begin), ())]
        timeline += _piece(part, begin, end, max(2, MAX_TIMELINE_POINTS * (end - begin) // samples))
        last = part.begin + part.clock.of(end - 1)
    if not timeline:
        return numbers
    # Phases count from the start of the last recording.
    shift = parts[-1].begin - shown[0].begin
    phases = tuple(replace(phase, begin=phase.begin + shift, end=phase.end + shift) for phase in numbers.phases)
    return replace(numbers, timeline=tuple(timeline), phases=phases)


def _piece(part: RecordingPart, begin: int, end: int, limit: int) -> tuple[TimelinePoint, ...]:
    """Return the timeline of the samples `begin` to `end` - 1 of a recording. limit: points."""
    header, builder = part.recording.header, TimelineBuilder(limit)
    checks = Checks(cpu=header.get("device_type") == CPU)
    for block in map(checks.possible, sample_blocks(part.recording, ("memory_used",), first=begin, end=end)):
        seconds = [time + part.begin for time in block.times]
        builder.add(seconds, dict(enumerate(memory_by_device_index(block).values())))
    totals = [None if header.get("device_type") == CPU else gpu.get("memory_total") or None for gpu in header["gpus"]]
    capacity = complete_sum(totals)
    return tuple(replace(point, capacity=capacity) for point in builder.points(range(len(totals))))


def sample_blocks(
    recording: Recording, names: Sequence[str] = MEASURED, *, first: int = 0, end: int | None = None
) -> Iterator[SampleBlock]:
    """Yield the samples `first` to `end` - 1 of a binary recording as blocks of these columns, by default all.

    Times are seconds since the first sample of the recording.
    """
    clock = RecordingClock(recording)
    last = len(recording) if end is None else end
    for begin in range(first, last, BLOCK_ROWS):
        stop = min(last, begin + BLOCK_ROWS)
        times = clock.between(begin, stop)
        parts = tuple(
            DeviceColumns(
                gpu_index=int(gpu["gpu_index"]),
                gpu_name=str(gpu["gpu_name"]),
                uuid=str(gpu.get("uuid") or ""),
                memory_total=gpu.get("memory_total"),
                rows=range(len(times)),
                columns={
                    name: as_list(columns[name][begin:stop]) if name in columns else [math.nan] * len(times)
                    for name in names
                },
            )
            for gpu, columns in zip(recording.header["gpus"], recording.columns, strict=True)
        )
        yield SampleBlock(times=times, parts=parts)


def memory_by_device_index(block: SampleBlock) -> dict[int, Floats]:
    """Return the memory of each device at each sample of a block; NaN if unknown."""
    memory: dict[int, Floats] = {}
    for part in block.parts:
        values = part.columns["memory_used"]
        if len(part.rows) < len(block):
            by_row = dict(zip(part.rows, values, strict=True))
            values = [by_row.get(row, math.nan) for row in range(len(block))]
        memory[part.gpu_index] = values
    return memory


def statistics_of(running: RunningStats) -> Statistics | None:
    """Return running statistics as a value; None without any."""
    if running.mean is None:
        return None
    return Statistics(
        mean=running.mean,
        deviation=running.deviation,
        minimum=running.minimum,
        maximum=running.maximum,
        count=running.count,
    )


class TimelineBuilder:
    """A memory timeline of at most `limit` points, in constant memory.

    Each point is the mean of `width` samples. The width doubles when the points run out, so a long recording has at
    least `limit` / 2 points.
    """

    def __init__(self, limit: int = MAX_TIMELINE_POINTS) -> None:
        self._limit = limit
        self._samples = 0
        self._width = 1  # samples per point
        self._seconds: list[float] = []  # sum per point
        self._memory: dict[int, tuple[list[float], list[float]]] = {}  # sum and number of values per point, by device

    def add(self, seconds: Floats, memory: Mapping[int, Floats]) -> None:
        """Add samples: their times, and the memory of each device (NaN: unknown)."""
        while self._samples + len(seconds) > self._limit * self._width:
            self._double_width()
        if self._width == 1:  # a point per sample, the common case of short recordings
            self._add_points(seconds, memory)
            return
        points = list(self._points(len(seconds)))
        if not points:
            return
        length = points[-1][0] + 1
        _lengthen(self._seconds, length)
        for point, begin, end in points:
            self._seconds[point] += math.fsum(seconds[begin:end])
        for device, values in memory.items():
            sums, counts = self._memory.setdefault(device, ([], []))
            _lengthen(sums, length)
            _lengthen(counts, length)
            for point, begin, end in points:
                known: Floats = values[begin:end]
                total = sum(known)
                if math.isnan(total):
                    known = [value for value in known if not math.isnan(value)]
                    total = sum(known)
                sums[point] += total
                counts[point] += len(known)
        self._samples += len(seconds)

    def points(self, devices: Sequence[int]) -> tuple[TimelinePoint, ...]:
        """Return the timeline with the devices in this order."""
        columns = [self._means(device) for device in devices]
        return tuple(
            TimelinePoint(
                seconds / min(self._width, self._samples - self._width * at), tuple(column[at] for column in columns)
            )
            for at, seconds in enumerate(self._seconds)
        )

    def _add_points(self, seconds: Floats, memory: Mapping[int, Floats]) -> None:
        """Add one point per sample."""
        self._seconds += seconds
        for device, values in memory.items():
            sums, counts = self._memory.setdefault(device, ([], []))
            _lengthen(sums, self._samples)
            _lengthen(counts, self._samples)
            if math.isnan(sum(values)):
                sums += [0.0 if math.isnan(value) else value for value in values]
                counts += [float(not math.isnan(value)) for value in values]
            else:
                sums += values
                counts += [1.0] * len(values)
        self._samples += len(seconds)

    def _points(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield the points of the next `count` samples: number, and the range of the samples that belong to it."""
        begin = 0
        while begin < count:
            point, within = divmod(self._samples + begin, self._width)
            end = min(count, begin + self._width - within)
            yield point, begin, end
            begin = end

    def _means(self, device: int) -> list[float | None]:
        """Return the mean of each point; None without a value."""
        sums, counts = self._memory.get(device, ([], []))
        known = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
        return known + [None] * (len(self._seconds) - len(known))

    def _double_width(self) -> None:
        self._seconds = _merge_pairs(self._seconds)
        self._memory = {
            device: (_merge_pairs(sums), _merge_pairs(counts)) for device, (sums, counts) in self._memory.items()
        }
        self._width *= 2


class _Device:
    """Accumulates the samples of one device."""

    def __init__(self) -> None:
        self._statistics = {name: RunningStats() for name in QUANTITIES}
        self._samples = 0
        self._counted, self.differences = 0.0, 0  # J from the energy counter, and number of its differences
        self._area, self._trapezoids = 0.0, 0  # J integrated from power, and number of trapezoids
        self._last: DeviceColumns | None = None
        self._last_power: tuple[float, float] | None = None  # time, and power (W) of the last sample that has one
        self._last_row: tuple[float, bool] | None = None  # time of the last sample, and whether its power is known
        self._without_power, self._longest = 0.0, 0.0  # s without power up to the last sample, and its maximum
        self._last_energy: float | None = None  # last known value of the energy counter, J
        self._ends_known = False  # the last sample has a value of the energy counter

    @property
    def gpu_name(self) -> str:
        return self._last.gpu_name if self._last else ""

    def add(self, times: Floats, part: DeviceColumns) -> None:
        """Add the rows of one block. times: of all rows of the block, s."""
        self._last = part
        for name, statistics in self._statistics.items():
            statistics.add(part.columns[name])
        # A row without any value is a lost GPU, not a sample. A column without NaN proves that there is none.
        columns = [part.columns[name] for name in MEASURED]
        if any(not math.isnan(sum(column)) for column in columns):
            self._samples += len(part.rows)
        else:
            self._samples += sum(not all(map(math.isnan, row)) for row in zip(*columns, strict=True))
        own = times if len(part.rows) == len(times) else [times[row] for row in part.rows]
        self._watch_power(own, part.columns["power"])
        self._integrate(own, part.columns["power"])
        self._count(part.columns["energy_j"])

    @property
    def lacks_power(self) -> bool:
        """Return whether the power was unknown for longer than it may be interpolated."""
        return self._longest > GAP_S

    def _watch_power(self, times: Floats, power: Floats) -> None:
        """Measure how long the device had samples without power."""
        before = self._last_row
        if times and not math.isnan(sum(power)) and (before is None or before[1]):
            self._last_row = (times[-1], True)  # the common case
            return
        for time, value in zip(times, power, strict=True):
            is_known = not math.isnan(value)
            if before is not None and not (before[1] and is_known) and 0 <= time - before[0] <= MAX_GAP_S:
                self._without_power += time - before[0]
                self._longest = max(self._longest, self._without_power)
            if is_known:
                self._without_power = 0.0
            before = (time, is_known)
        self._last_row = before

    def _integrate(self, times: Floats, power: Floats) -> None:
        """Add the area under the power, between neighbouring samples at most MAX_GAP_S apart."""
        if math.isnan(sum(power)):
            known = [(time, value) for time, value in zip(times, power, strict=True) if not math.isnan(value)]
            times, power = [time for time, _ in known], [value for _, value in known]
        if not times:
            return
        # The last sample of the previous block is prepended, so that no trapezoid is lost between blocks.
        if self._last_power is not None:
            times, power = [self._last_power[0], *times], [self._last_power[1], *power]
        self._last_power = (times[-1], power[-1])
        widths, heights = list(map(sub, times[1:], times)), list(map(add, power[1:], power))
        if not widths:
            return
        if min(widths) < 0 or max(widths) > MAX_GAP_S:
            near = [(w, h) for w, h in zip(widths, heights, strict=True) if 0 <= w <= MAX_GAP_S]
            widths, heights = [width for width, _ in near], [height for _, height in near]
        self._area += math.fsum(map(mul, widths, heights)) / 2
        self._trapezoids += len(widths)

    def _count(self, energy: Floats) -> None:
        """Add the increase of the energy counter. A counter that decreased was reset by the driver."""
        self._ends_known = not math.isnan(energy[-1])
        known = energy if not math.isnan(sum(energy)) else [value for value in energy if not math.isnan(value)]
        if not known:
            return
        if self._last_energy is not None:
            known = [self._last_energy, *known]
        self._last_energy = known[-1]
        if all(map(le, known, known[1:])):
            self._counted += known[-1] - known[0]
            self.differences += len(known) - 1
        else:
            increases = [after - before for before, after in pairwise(known) if after >= before]
            self._counted += math.fsum(increases)
            self.differences += len(increases)

    def numbers(self, samples: int, step: float, *, is_rank: bool, complete_energy: bool) -> DeviceNumbers:
        """Return the numbers of the samples so far.

        samples: of the recording. step: mean time between two of them, s. The others: as in numbers_of.
        """
        assert self._last is not None
        lost_s = 0.0 if is_rank else (samples - self._samples) * step
        is_whole = lost_s < GAP_S and (self.differences > 0 or not self.lacks_power)
        if complete_energy and self.differences:
            is_whole = self._ends_known
        joules = self._counted if self.differences else self._area if self._trapezoids else None
        return DeviceNumbers(
            gpu_index=self._last.gpu_index,
            gpu_name=self._last.gpu_name,
            uuid=self._last.uuid,
            samples=self._samples,
            memory_total=self._last.memory_total,
            memory_used=statistics_of(self._statistics["memory_used"]),
            utilization=statistics_of(self._statistics["utilization"]),
            power=statistics_of(self._statistics["power"]),
            temperature=statistics_of(self._statistics["temperature"]),
            sm_clock=statistics_of(self._statistics["sm_clock"]),
            joules=joules if is_whole else None,
            lost_s=lost_s if lost_s >= SILENT_S else 0.0,
        )


def _with_attempt(numbers: GpuNumbers, earlier: GpuNumbers) -> GpuNumbers:
    """Add the time and energy of an earlier attempt, or a note why they cannot be added."""
    kinds = groupby(earlier.devices, key=lambda device: device.gpu_name)
    counts = ((name, list(devices)) for name, devices in kinds)
    devices = ", ".join(f"{plural(len(same), earlier.unit)} ({name})" for name, same in counts)
    seconds = earlier.seconds or 0.0
    recorded = f"an earlier attempt was recorded on {devices or 'no device'}, {seconds:.0f} s in {earlier.evidence}"
    if (earlier.device_type, earlier.simulated) != (numbers.device_type, numbers.simulated) or not earlier.devices:
        return replace(numbers, notes=(*numbers.notes, f"{recorded}: not included in these numbers"))
    known = numbers.joules is not None and earlier.joules is not None
    of_all = "" if earlier.capacity is None else f" of {earlier.capacity:.0f}"
    peak = "" if earlier.total_max is None else f", peak {earlier.total_max:.0f}{of_all} MiB"
    notes = (note for note in numbers.notes if not note.startswith(EXCLUDED_ATTEMPT))
    return replace(
        numbers,
        samples=numbers.samples + earlier.samples,
        seconds=None if numbers.seconds is None else numbers.seconds + seconds,
        joules=(numbers.joules or 0.0) + (earlier.joules or 0.0) if known else None,
        earlier=(*numbers.earlier, earlier),
        notes=(*notes, f"{recorded}{peak}: {INCLUDED}"),
    )


def _totals(memory: Mapping[int, Floats]) -> Floats:
    """Return the memory of all devices together, for the samples with at least one known device."""
    used = list(map(sum, zip(*memory.values(), strict=True)))
    if not math.isnan(sum(used)):
        return used
    samples = ([value for value in sample if not math.isnan(value)] for sample in zip(*memory.values(), strict=True))
    return [sum(known) for known in samples if known]


def _energy_source(devices: Mapping[int, _Device]) -> str:
    return "counter" if all(device.differences for device in devices.values()) else "power"


def _notes(path: Path, samples: int, loss: ReadErrors | None) -> tuple[str, ...]:
    if loss:
        return (str(loss),)
    return () if samples else (f"{path.name} has no sample",)


def _merge_pairs(values: list[float]) -> list[float]:
    """Return the sums of neighbouring pairs."""
    return [sum(values[at : at + 2]) for at in range(0, len(values), 2)]


def _lengthen(values: list[float], length: int) -> None:
    values += [0.0] * (length - len(values))
