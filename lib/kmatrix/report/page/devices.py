"""The section of the page on devices: memory, balance, load, power and lost GPUs, and the recordings over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from kmatrix.gpu.balance import Balance, cv_text
from kmatrix.records.paths import MatrixDir
from kmatrix.report.gpu.numbers import CPU, GpuNumbers, is_incomplete
from kmatrix.report.gpu.phases import ENDING, TRAINER_PHASES
from kmatrix.report.gpu.text import problems
from kmatrix.report.gpu.timelines import Lane, RecordingTimeline, read_timeline
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.colours import RAMP
from kmatrix.report.page.parts.figures import Scale, Tick, nice_ticks, polyline, tick_text
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.text import fixed, name, shown, whole
from kmatrix.status.stragglers import HIDDEN_STRAGGLER, RankNumbers
from kmatrix.text import first_names, shortened_names

MOST_ROWS = 16  # configurations in the table
MOST_IMPAIRED = 8  # further runs with a lost device, or ranks that wait
MOST_TIMELINES = 12  # runs
MOST_VALUES = 80_000  # of all timelines together: about 300 kB of the page
MOST_LINES = 8  # devices that are drawn as lines; more are a strip of colours each
TRAINING = "training"
Recorded = tuple[PageGroup, RunNumbers, GpuNumbers]
PHASES = (TRAINING, *TRAINER_PHASES, ENDING)
CLASSES = ("Poor", "Fair", "Good", "Excellent")  # of a balance, worst first
GIB = 1024.0  # MiB
WHOLE = 0.9  # share of the recorded time from which a recording counts as whole
IN_GIB = 4096.0  # MiB from which memory is shown in GiB
LANES = {"utilization": "u", "power": "p", "memory_used": "m"}  # quantity -> key in the script's value
BAR, MOST_HEIGHT = 0.42, 4.0  # of a memory bar with its gap, and of all bars of a run, rem
MOST_LETTERS = 300  # of a note
MOST_NAME = 40  # characters of a name in the first column
STATIC_WIDTH, STATIC_HEIGHT = 800, 90  # of a static lane, units of its viewBox


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBar:
    """The memory of one device, in percent of the strip."""

    mean: float
    peak: float
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityMark:
    """The capacity of neighbouring devices of a run that have the same one."""

    at: float  # percent of the strip
    first: int  # number of the first device
    end: int  # number after that of the last device


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """The recorded time that one phase took, in percent of the strip."""

    phase: str
    begin: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDevices:
    """The devices of one run."""

    run: str
    short: str  # its name with a gap in the middle, if it is long: other runs have another one
    place: int  # in MatrixNumbers.runs
    group: PageGroup
    hosts: int  # nodes
    count: int  # devices
    bars: tuple[DeviceBar, ...]
    capacities: tuple[CapacityMark, ...]  # empty on the CPU: ranks share the memory of their machine
    height: float  # of the strip, rem
    bar: float  # height of a bar with its gap, rem
    peak: float | None  # MiB, the highest of all devices
    share: float | None  # the highest of all devices, of its own capacity, 0 to 1
    utilization: tuple[float, float] | None  # lowest and highest mean, percent
    power: float | None  # W, all devices
    joules: float | None  # J, all devices
    hottest: float | None  # degrees C
    balances: tuple[Balance | None, ...]  # of memory, utilization and power
    ranks: RankNumbers | None
    problems: tuple[str, ...]  # lost and throttled devices, hidden stragglers, memory errors
    notes: tuple[str, ...]  # limits of the numbers
    phases: tuple[PhaseSpan, ...]  # empty if unknown
    seconds: float | None  # length of the recording

    @property
    def cv(self) -> str:
        """The coefficients of variation of memory, utilization and power, percent."""
        return " / ".join("–" if one is None else cv_text(one.cv).removesuffix("%") for one in self.balances)

    @property
    def quality(self) -> str | None:
        """The worst class of its balances; None if none is known."""
        found = [one.quality for one in self.balances if one is not None]
        return min(found, key=CLASSES.index).lower() if found else None

    @property
    def training_share(self) -> float | None:
        """Share of the recorded time that is training, 0 to 1."""
        return next((span.width / 100 for span in self.phases if span.phase == TRAINING), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticLane:
    """One quantity of all devices of a run over time, for readers without scripts. Units of its viewBox."""

    title: str
    unit: str
    top: str  # value at the upper edge
    lines: tuple[tuple[str, str, int], ...]  # class of the colour, points of a polyline, number of the line
    count: int  # of lines that may hide each other
    shades: tuple[tuple[str, float, float], ...]  # phase, begin, width


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesSection:
    """What the section shows."""

    is_cpu: bool  # ranks on the CPU instead of GPUs
    names: str  # of the devices
    rows: tuple[RunDevices, ...]
    omitted: int  # recorded configurations that are not in the table
    capacity: float | None  # MiB, of all devices; None if they differ, or have none
    has_capacity: bool
    ticks: tuple[Tick, ...] = field(repr=False)
    unit: str  # of the ticks
    simulated: bool  # at least one run had simulated GPUs
    has_power: bool
    has_joules: bool
    has_temperature: bool
    has_ranks: bool
    unreadable: str = ""  # runs in the table without a timeline, although one was recorded
    single: str = ""  # runs of a single sample, which has no course over time
    no_room: str = ""  # runs whose recordings would make the page too large
    static: tuple[StaticLane, ...] = field(default=(), repr=False)
    static_run: str = ""
    static_seconds: float | None = None  # length of its recording
    script: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what static/devices.js draws

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that any run has."""
        found = {span.phase for row in self.rows for span in row.phases}
        return tuple(phase for phase in PHASES if phase in found)


def devices(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> DevicesSection | None:
    """Return the section, or None if no run was recorded."""
    chosen = list(_chosen(groups))
    recorded = [*chosen[:MOST_ROWS], *_impaired(groups, chosen[:MOST_ROWS])]
    if not recorded:
        return None
    is_cpu = all(gpu.device_type == CPU for _, _, gpu in recorded)
    peaks = [peak for _, _, gpu in recorded if (peak := _peak(gpu)) is not None]
    totals = {total for _, _, gpu in recorded for one in gpu.devices if (total := gpu.capacity_of(one))}
    high = max(totals) if totals else 1.15 * max(peaks, default=1.0)
    scale = Scale(0.0, max(high, *peaks) if peaks else high, 0.0, 96.0)
    size, unit = (GIB, "GiB") if scale.high >= IN_GIB else (1.0, "MiB")
    values, step = nice_ticks(0.0, scale.high / size, 4)
    places = {run.name: at for at, run in enumerate(numbers.runs)}
    short = shortened_names([run.name for _, run, _ in recorded], MOST_NAME)
    rows = tuple(
        _row(group, run, gpu, scale, place=places[run.name], short=one)
        for (group, run, gpu), one in zip(recorded, short, strict=True)
    )
    timelines, without = _timelines(numbers, [run for _, run, _ in recorded])
    return DevicesSection(
        is_cpu=is_cpu,
        names=_names([gpu for _, _, gpu in recorded]),
        rows=rows,
        omitted=max(0, len(chosen) - MOST_ROWS),
        capacity=next(iter(totals)) if len(totals) == 1 else None,
        has_capacity=bool(totals),
        ticks=tuple((scale.at(value * size), tick_text(value, step)) for value in values),
        unit=unit,
        simulated=any(gpu.simulated for _, _, gpu in recorded),
        has_power=any(row.power is not None for row in rows),
        has_joules=any(row.joules is not None for row in rows),
        has_temperature=any(row.hottest is not None for row in rows),
        has_ranks=any(row.ranks is not None for row in rows),
        unreadable=_named(without.unreadable),
        single=_named(without.single),
        no_room=_named(without.no_room),
        static=_static(timelines[0][1]) if timelines else (),
        static_run=name(timelines[0][0].name) if timelines else "",
        static_seconds=timelines[0][1].seconds if timelines else None,
        script=_script(timelines) if timelines else {},
    )


def _named(runs: Sequence[str]) -> str:
    """Return the first names of these runs."""
    return shown(first_names(runs), 12 * MOST_NAME)


def _chosen(groups: Sequence[PageGroup]) -> Iterator[Recorded]:
    """Yield one recorded run of each configuration: the first finished one, else the first."""
    for group in groups:
        for run in group.counted or group.runs:
            if run.gpu and run.gpu.devices:
                yield group, run, run.gpu
                break


def _impaired(groups: Sequence[PageGroup], chosen: Sequence[Recorded]) -> list[Recorded]:
    """Return further runs that the table shows: those that lost a device, or wait for a rank as no other seed does."""
    known = {run.name for _, run, _ in chosen}
    waiting = {group.index for group, _, gpu in chosen if _waits(gpu)}
    found = []
    for group in groups:
        for run in group.runs:
            gpu = run.gpu
            if gpu is None or not gpu.devices or run.name in known:
                continue
            if any(map(is_incomplete, gpu.devices)) or (_waits(gpu) and group.index not in waiting):
                found.append((group, run, gpu))
    return found[:MOST_IMPAIRED]


def _waits(gpu: GpuNumbers) -> bool:
    return gpu.ranks is not None and gpu.ranks.waiting > HIDDEN_STRAGGLER


def _names(recorded: Sequence[GpuNumbers]) -> str:
    """Return the kinds of GPU."""
    found = dict.fromkeys(device.gpu_name for gpu in recorded for device in gpu.devices if gpu.device_type != CPU)
    return name(first_names(found))


def _peak(gpu: GpuNumbers) -> float | None:
    """Return the highest memory of any device, MiB."""
    return max((device.memory_used.maximum for device in gpu.devices if device.memory_used), default=None)


def _share(gpu: GpuNumbers) -> float | None:
    """Return the highest peak of any device as a share of its own capacity, 0 to 1: a run may have several models."""
    pairs = [(one.memory_used, gpu.capacity_of(one)) for one in gpu.devices]
    return max((used.maximum / total for used, total in pairs if used and total), default=None)


def _marks(gpu: GpuNumbers, scale: Scale) -> Iterator[CapacityMark]:
    numbered = ((gpu.capacity_of(device), at) for at, device in enumerate(gpu.devices))
    for capacity, equal in groupby(numbered, key=itemgetter(0)):
        places = [at for _, at in equal]
        if capacity is not None:
            yield CapacityMark(at=scale.at(capacity), first=places[0], end=places[-1] + 1)


def _row(group: PageGroup, run: RunNumbers, gpu: GpuNumbers, scale: Scale, *, place: int, short: str) -> RunDevices:
    count = len(gpu.devices)
    bar = min(BAR, MOST_HEIGHT / max(1, count))
    peak, loads = _peak(gpu), [one.utilization.mean for one in gpu.main.devices if one.utilization]
    return RunDevices(
        run=name(run.name),
        short=name(short),
        place=place,
        group=group,
        hosts=len({device.host for device in gpu.devices if device.host}),
        count=count,
        bars=tuple(_bars(gpu, scale)),
        capacities=tuple(_marks(gpu, scale)),
        height=round(bar * count + 0.5, 2),
        bar=round(bar, 3),
        peak=peak,
        share=_share(gpu),
        utilization=(min(loads), max(loads)) if loads else None,
        power=gpu.mean_power,
        joules=gpu.joules,
        hottest=max((one.temperature.maximum for one in gpu.devices if one.temperature), default=None),
        balances=tuple(gpu.balance(quantity) for quantity in ("memory_used", "utilization", "power")),
        ranks=gpu.ranks,
        problems=tuple(shown(problem, MOST_LETTERS) for device in gpu.devices for problem in problems(gpu, device)),
        notes=tuple(shown(note, MOST_LETTERS) for note in gpu.notes),
        phases=tuple(_spans(gpu)),
        seconds=gpu.seconds,
    )


def _bars(gpu: GpuNumbers, scale: Scale) -> Iterator[DeviceBar]:
    for device in gpu.devices:
        used = device.memory_used
        if used is None:
            yield DeviceBar(mean=0.0, peak=0.0, tip=f"{gpu.label(device)}: memory unknown")
            continue
        tip = f"{gpu.label(device)}: mean {whole(used.mean)}, peak {whole(used.maximum)} MiB"
        yield DeviceBar(mean=scale.at(used.mean), peak=scale.at(used.maximum), tip=tip)


def _spans(gpu: GpuNumbers) -> Iterator[PhaseSpan]:
    """Yield the recorded time by phase, the training first; nothing if the phases of an attempt are unknown."""
    if not gpu.phases or not gpu.seconds or (gpu.training is not None and gpu.training.seconds is None):
        return
    parts = {phase: gpu.phase_seconds(phase) for phase in PHASES}
    total = max(gpu.seconds, math.fsum(parts.values()))
    parts[TRAINING] = total - math.fsum(parts.values())
    begin = 0.0
    for phase in PHASES:
        if parts[phase] > 0:
            share = 100 * parts[phase] / total
            yield PhaseSpan(phase=phase, begin=round(begin, 2), width=round(share, 2), seconds=parts[phase])
            begin += share


@dataclass(slots=True)
class _Without:
    """Names of the runs without a recording over time, by the reason."""

    unreadable: list[str] = field(default_factory=list)
    single: list[str] = field(default_factory=list)
    no_room: list[str] = field(default_factory=list)


def _timelines(
    numbers: MatrixNumbers, runs: Sequence[RunNumbers]
) -> tuple[list[tuple[RunNumbers, RecordingTimeline]], _Without]:
    """Return the recordings of the runs, thinned, as many as the page has room for; and the runs without one."""
    matrix, values = MatrixDir(numbers.path), 0
    found: list[tuple[RunNumbers, RecordingTimeline]] = []
    without = _Without()
    for run in runs:
        if len(found) == MOST_TIMELINES:
            without.no_room.append(run.name)
            continue
        timeline = read_timeline(matrix.run(run.name), run.gpu) if run.gpu else None
        if timeline is None:
            kind = without.single if run.gpu and run.gpu.samples == 1 else without.unreadable
            kind.append(run.name)
            continue
        size = 3 * timeline.columns * sum(len(device.lanes) for device in timeline.devices)
        if found and values + size > MOST_VALUES:
            without.no_room.append(run.name)
            continue
        values += size
        found.append((run, timeline))
    return found, without


def _script(timelines: Sequence[tuple[RunNumbers, RecordingTimeline]]) -> dict[str, Any]:
    """Return the recordings for static/devices.js. Keys are short because they repeat for each run."""
    return {
        "lines": MOST_LINES,
        "runs": [
            {
                "n": name(run.name),
                "s": round(timeline.seconds, 1),
                "c": timeline.columns,
                "whole": _longer(run.gpu, timeline),
                "out": timeline.left_out,
                "thin": timeline.samples > timeline.columns,
                "simulated": bool(run.gpu and run.gpu.simulated),
                "cpu": bool(run.gpu and run.gpu.device_type == CPU),
                "ph": [[phase, round(begin, 1), round(end, 1)] for phase, begin, end in _shades(timeline)],
                "d": [
                    {
                        "l": shown(device.name, 60),
                        "t": device.memory_total,
                        **({"x": 1} if device.is_lost else {}),
                        **{LANES[quantity]: _columns(lane) for quantity, lane in device.lanes.items()},
                    }
                    for device in timeline.devices
                ],
            }
            for run, timeline in timelines
        ],
    }


def _longer(gpu: GpuNumbers | None, timeline: RecordingTimeline) -> float | None:
    """Return the length of the whole recording (s) if what can be read of it is clearly shorter."""
    seconds = gpu.seconds if gpu else None
    return round(seconds, 1) if seconds is not None and timeline.seconds < WHOLE * seconds else None


def _columns(lane: Lane) -> list[list[int | None]]:
    """Return mean, minimum and maximum per column; the mean alone if each column has one value."""
    parts = [[None if value is None else round(value) for value in part] for part in (lane.mean, lane.low, lane.high)]
    return parts if parts[1] != parts[2] else parts[:1]


def _shades(timeline: RecordingTimeline) -> list[tuple[str, float, float]]:
    """Return name, begin and end of the phases. Those of one name that no figure could separate are one."""
    close = timeline.seconds / timeline.columns / 4
    found: list[tuple[str, float, float]] = []
    for phase in timeline.phases:
        begin, end = max(0.0, phase.begin), min(timeline.seconds, phase.end)
        if end <= begin:
            continue
        if found and found[-1][0] == phase.name and begin - found[-1][2] < close:
            found[-1] = (phase.name, found[-1][1], max(end, found[-1][2]))
        else:
            found.append((phase.name, begin, end))
    return found


def _static(timeline: RecordingTimeline) -> tuple[StaticLane, ...]:
    """Return utilization, power and memory of a run as static figures; none for more devices than lines."""
    if len(timeline.devices) > MOST_LINES:
        return ()
    size, unit = (GIB, "GiB") if any((one.memory_total or 0) >= IN_GIB for one in timeline.devices) else (1.0, "MiB")
    kinds = (("utilization", 1.0, "%"), ("power", 1.0, "W"), ("memory_used", size, unit))
    per_second = STATIC_WIDTH / timeline.seconds
    shades = tuple(
        (phase, round(per_second * begin, 1), round(per_second * (end - begin), 1))
        for phase, begin, end in _shades(timeline)
    )
    found = []
    for quantity, divisor, unit_name in kinds:
        lanes = [(at, one.lanes[quantity]) for at, one in enumerate(timeline.devices) if quantity in one.lanes]
        if not lanes:
            continue
        most = max(value for _, lane in lanes for value in lane.mean if value is not None) / divisor
        top = max(most, 100.0 if quantity == "utilization" else 0.0) or 1.0
        lines = tuple(
            (device_colour(at, len(timeline.devices)), points, place)
            for place, (at, lane) in enumerate(lanes)
            for points in _polylines(lane, top * divisor * 1.04)
        )
        title = "memory" if quantity == "memory_used" else quantity
        found.append(
            StaticLane(title=title, unit=unit_name, top=fixed(top, 0), lines=lines, count=len(lanes), shades=shades)
        )
    return tuple(found)


def device_colour(at: int, count: int) -> str:
    """Return the class of a device: of the ramp, because optimizers have the other colours."""
    return f"r{round(at % RAMP * (RAMP - 1) / max(1, min(RAMP, count) - 1)) % RAMP}" if count > 1 else "r2"


def _polylines(lane: Lane, top: float) -> Iterator[str]:
    """Yield the parts of a line between gaps, units of its viewBox."""
    part: list[tuple[float, float]] = []
    step = STATIC_WIDTH / len(lane.mean)
    for at, value in enumerate((*lane.mean, None)):
        if value is not None:
            part.append((round(step * (at + 0.5), 1), round(STATIC_HEIGHT * (1 - value / top), 1)))
        elif part:
            yield polyline(part)
            part = []
