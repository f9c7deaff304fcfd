"""Read the numbers of a run's devices from gpu_summary.json, else from the recording itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from kmatrix.errors import RecordError
from kmatrix.gpu.devices import EXTRA_METRICS
from kmatrix.gpu.formats.binary import Recording, damage_note, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.formats.limits import Limits
from kmatrix.gpu.formats.summary import DeviceEntry, ProcessEntry, StatisticsEntry, SummaryFile
from kmatrix.gpu.running import RunningStats
from kmatrix.records.decode import decode_lines, decode_optional
from kmatrix.records.events import EventLine
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.report.gpu.attempts import restart_notes
from kmatrix.report.gpu.nodes import merged_timeline, over_nodes
from kmatrix.report.gpu.numbers import (
    CPU,
    SIMULATED,
    DeviceNumbers,
    GpuNumbers,
    PeriodNumbers,
    RecordedPhase,
    Statistics,
    TimelinePoint,
    XidNumbers,
    cost_factors,
)
from kmatrix.report.gpu.parts import read_parts
from kmatrix.report.gpu.phases import Leader, joules_of_spans, merged_spans, read_leader, read_phases
from kmatrix.report.gpu.stream import (
    QUANTITIES,
    add_binary_timeline,
    is_included,
    read_binary,
    read_stream,
    statistics_of,
    with_earlier,
    with_newer_samples,
)
from kmatrix.stats import complete_sum
from kmatrix.status.stragglers import read_ranks

# File names of text recordings, preferred first: JSON of all GPUs, JSON of one GPU or of all, CSV.
PATTERNS = ("gpu_stats*_multi_gpu.json", "gpu_stats*.json", "gpu_metrics*.csv")
XID = "xid"  # event of an XID error
NOTHING_RECORDED = "nothing recorded"  # event in which the recorder logs why it recorded nothing
MIN_COVERAGE = 0.9  # share of the training time that a recording must cover to give joules/token


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """The totals of a run's training that its GPU numbers refer to. None: unknown."""

    tokens: int | None = None
    seconds: float | None = None
    device: str = ""  # "gpu", "cpu" or ""
    mfu: float | None = None  # 0 to 1
    wall_s: float | None = None  # s, of all attempts in this matrix
    gpu_hours: float | None = None
    dollars: float | None = None
    reused: bool = False  # from another matrix
    running: bool = False  # its last attempt has not ended


def read_gpu(run_dir: RunDir, totals: TrainingTotals) -> GpuNumbers | None:
    """Return the numbers of a run's devices; None if there is no recording.

    An unreadable recording gives numbers without devices, and a note with the reason.
    """
    ranks = read_ranks(run_dir)
    later = run_dir.later_nodes()
    if later:
        leader = read_leader(run_dir)
        parts = {0: _of_node(run_dir, totals, None)}
        parts |= {node: _of_node(folder, totals, leader) for node, folder in later.items()}
        numbers = over_nodes(run_dir, parts)
    else:
        numbers = _recorded(run_dir, totals.device)
    if numbers is None and ranks is not None:
        numbers = _no_devices(totals.device)
    if numbers is None:
        return None
    factors = cost_factors(read_run_file_or_empty(run_dir))
    spent = {name: getattr(totals, name) for name in ("wall_s", "gpu_hours", "dollars", "reused")}
    numbers = replace(numbers, ranks=ranks, mfu=totals.mfu, factors=factors, **spent)
    if not later:
        numbers = _add_training(run_dir, numbers, running=totals.running)
    return _add_joules_per_token(numbers, totals)


def add_timeline(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Add the memory timeline, from gpu_samples.bin if it exists, else from the text recording."""
    if numbers.timeline or not numbers.devices:
        return numbers
    if numbers.nodes:
        folders = {0: run_dir, **run_dir.later_nodes()}
        nodes = {node: add_timeline(folders[node], part) for node, part in numbers.nodes.items()}
        first = next(iter(nodes.values()))
        return replace(numbers, nodes=nodes, timeline=merged_timeline(list(nodes.values())), phases=first.phases)
    if run_dir.gpu_samples.exists():
        numbers = add_binary_timeline(run_dir, numbers)
    if numbers.timeline:
        return numbers
    streamed = _from_text(run_dir, numbers.device_type)
    known = {device.gpu_index: place for place, device in enumerate(streamed.devices)} if streamed else {}
    places = [known.get(device.gpu_index) for device in numbers.devices]
    timeline = tuple(
        TimelinePoint(point.seconds, tuple(None if at is None else point.memory[at] for at in places))
        for point in (streamed.timeline if streamed else ())
    )
    return replace(numbers, timeline=timeline)


def recordings(folder: Path) -> list[Path]:
    """Return the text recordings in a folder, preferred first; of one pattern the newest name first."""
    found: dict[Path, None] = {}
    for pattern in PATTERNS:
        for path in sorted(folder.glob(pattern), reverse=True):
            found.setdefault(path)
    return list(found)


def _recorded(run_dir: RunDir, device: str) -> GpuNumbers | None:
    """Return the numbers of the preferred recording, including earlier attempts, or a note why there are none."""
    # Best first: the summary has throttling and other processes, a binary recording is complete after a kill.
    numbers = _from_summary(run_dir) or _from_samples(run_dir) or _from_text(run_dir, device)
    if numbers and numbers.devices:
        return _with_xids(with_earlier(run_dir, numbers), decode_lines(run_dir.gpu_events, EventLine))
    if numbers is None and (damage := _damage(run_dir)):
        numbers = replace(_no_devices(device), notes=(damage,))
    events = decode_lines(run_dir.gpu_events, EventLine)
    reasons = [event.text or "" for event in events if event.event == NOTHING_RECORDED]
    if not reasons:
        return numbers
    numbers = numbers or _no_devices(device)
    return replace(numbers, notes=(*numbers.notes, reasons[-1]))


def _with_xids(numbers: GpuNumbers, events: Sequence[EventLine]) -> GpuNumbers:
    """Add the XID errors in these events to the devices that reported them; those of other devices are notes."""
    found: dict[tuple[int | None, int | None], list[EventLine]] = {}  # place of the device, index of the GPU
    for event in events:
        if event.event == XID and event.xid is not None:
            found.setdefault((_place(numbers.devices, event), event.gpu_index), []).append(event)
    if not found:
        return numbers
    devices = tuple(
        replace(device, xids=_xids(found.get((place, device.gpu_index), ())))
        for place, device in enumerate(numbers.devices)
    )
    notes = [
        f"GPU {index} of an earlier attempt: {one.text}"
        for (place, index), others in found.items()
        if place is None
        for one in _xids(others)
    ]
    return replace(numbers, devices=devices, notes=(*numbers.notes, *notes))


def _place(devices: Sequence[DeviceNumbers], event: EventLine) -> int | None:
    """Return the place of the device that an event is about, None if it is not one of these."""
    # The text has the UUID: an index alone may be of another machine.
    mine = (device.gpu_index == event.gpu_index and device.uuid in (event.text or "") for device in devices)
    return next((place for place, is_mine in enumerate(mine) if is_mine), None)


def _xids(events: Sequence[EventLine]) -> tuple[XidNumbers, ...]:
    """Return the XID errors of one device by code, in the order of their first time."""
    codes: dict[int, list[EventLine]] = {}
    for event in events:
        codes.setdefault(event.xid or 0, []).append(event)
    return tuple(
        XidNumbers(
            code=code,
            count=sum(event.xid_count for event in same),
            first=min(event.time for event in same),
            last=max(event.time for event in same),
        )
        for code, same in codes.items()
    )


def _of_node(folder: RunDir, totals: TrainingTotals, leader: Mapping[int, Leader] | None) -> GpuNumbers | None:
    """Return the numbers of the devices of one node, with its phases by its own clock; None without a recording."""
    numbers = _recorded(folder, totals.device)
    if numbers is None or not numbers.devices:
        return numbers
    return _add_training(folder, numbers, running=totals.running, leader=leader)


def _damage(run_dir: RunDir) -> str:
    """Return why gpu_samples.bin cannot be used, empty if it can, or does not exist."""
    if not run_dir.gpu_samples.exists():
        return ""
    try:
        recording = read_samples(run_dir.gpu_samples)
    except RecordError as error:
        return _without_folder(run_dir, error)
    return "" if len(recording) else "".join(damage_note(run_dir.gpu_samples, recording.damaged))


def _without_folder(run_dir: RunDir, error: RecordError) -> str:
    """Return an error of a file in the directory of a run, with its name only."""
    return f"{error.what}{error.why and f': {error.why}'}".replace(f"{run_dir.path}/", "")


def _no_devices(device: str) -> GpuNumbers:
    """Return the numbers of a run without a recording. device: "gpu", "cpu" or ""."""
    return GpuNumbers(evidence="", device_type=CPU if device == CPU else "", devices=(), samples=0, seconds=None)


def _from_samples(run_dir: RunDir) -> GpuNumbers | None:
    """Return the numbers of gpu_samples.bin: all that a killed recorder leaves. None without a sample."""
    if not run_dir.gpu_samples.exists():
        return None
    try:
        numbers = read_binary(run_dir.gpu_samples)
    except RecordError:
        return None
    note = f"the recorder wrote no summary: numbers computed from {run_dir.gpu_samples.name}"
    evidence = f"{run_dir.name}/{run_dir.gpu_samples.name}"
    return replace(numbers, evidence=evidence, final=False, notes=(note, *numbers.notes)) if numbers.devices else None


def _from_text(run_dir: RunDir, device: str) -> GpuNumbers | None:
    """Return the numbers of the first text recording that has a sample."""
    empty: GpuNumbers | None = None
    for path in recordings(run_dir.path):
        try:
            numbers = read_stream(path, cpu=device == CPU)
        except (RecordError, OSError) as error:
            why = error.what if isinstance(error, RecordError) else f"{path}: {error.strerror}"
            numbers = GpuNumbers(evidence=path.name, device_type="", devices=(), samples=0, seconds=None, notes=(why,))
        numbers = replace(
            numbers,
            evidence=f"{run_dir.name}/{path.name}",
            notes=tuple(note.replace(f"{run_dir.path}/", "") for note in numbers.notes),
        )
        if numbers.devices:
            return numbers
        empty = empty or numbers
    return empty


def _from_summary(run_dir: RunDir) -> GpuNumbers | None:
    """Return the numbers of gpu_summary.json; None if it is missing, or has no sample of any device."""
    summary = decode_optional(run_dir.gpu_summary, SummaryFile)
    if summary is None or not any(gpu.samples for gpu in summary.gpus):
        return None
    devices = tuple(_device(gpu) for gpu in summary.gpus)
    notes = [*summary.warnings]
    if not summary.final:
        notes.append("the recorder is still running: throttling and other processes are up to a minute old")
    final = summary.final
    numbers = GpuNumbers(
        evidence=f"{run_dir.name}/{run_dir.gpu_summary.name}",
        device_type=summary.device_type or "",
        devices=devices,
        samples=summary.samples or max(device.samples for device in devices),
        seconds=summary.seconds,
        hz=summary.hz_reached,
        final=final,
        simulated=summary.simulated or any(device.gpu_name.endswith(SIMULATED) for device in devices),
        energy_source=summary.energy_source,
        total_mean=summary.totals.memory_used_mean,
        total_max=summary.totals.memory_used_max,
        joules=None if any(device.joules is None for device in devices) else summary.totals.joules,
        notes=tuple(notes),
    )
    # A summary that is not final is up to a minute old.
    if final or not run_dir.gpu_samples.exists():
        return numbers
    return with_newer_samples(run_dir, numbers)


def _device(gpu: DeviceEntry) -> DeviceNumbers:
    return DeviceNumbers(
        gpu_index=gpu.gpu_index,
        gpu_name=gpu.gpu_name,
        rank=gpu.rank,
        uuid=gpu.uuid or "",
        samples=gpu.samples,
        memory_total=gpu.memory_total,
        memory_used=_statistics(gpu.memory_used),
        utilization=_statistics(gpu.utilization),
        power=_statistics(gpu.power),
        temperature=_statistics(gpu.temperature),
        sm_clock=_statistics(gpu.sm_clock),
        joules=None if gpu.energy_gap else gpu.joules,
        lost_at=gpu.lost_at,
        lost_s=gpu.lost_s,
        throttled_s=tuple((why, seconds) for why, seconds in gpu.throttled_s.items() if seconds),
        foreign=tuple(_process(process) for process in gpu.foreign),
        ecc_uncorrected=gpu.ecc_uncorrected or 0,
        extras={name: known.mean for name in EXTRA_METRICS if (known := _statistics(getattr(gpu, name)))},
    )


def _process(process: ProcessEntry) -> str:
    size = "" if process.memory_mib is None else f", {process.memory_mib:.0f} MiB"
    return f"{process.name or 'a process'} (pid {process.pid}{size})"


def _statistics(entry: StatisticsEntry | None) -> Statistics | None:
    """Return the statistics of one quantity in gpu_summary.json; None if the mean is unknown."""
    if entry is None or entry.mean is None:
        return None
    return Statistics(
        mean=entry.mean,
        deviation=entry.deviation,
        minimum=entry.mean if entry.min is None else entry.min,
        maximum=entry.mean if entry.max is None else entry.max,
        count=entry.count,
    )


def _add_joules_per_token(numbers: GpuNumbers, totals: TrainingTotals) -> GpuNumbers:
    """Add joules/token, or a note why it is unknown."""
    if not totals.tokens:
        return numbers
    missing = ""
    lost = [numbers.label(device) for device in numbers.devices if device.lost_at is not None]
    if totals.seconds and numbers.seconds is not None and numbers.seconds < MIN_COVERAGE * totals.seconds:
        missing = f"the recording covers {numbers.seconds:.0f} s of {totals.seconds:.0f} s of training"
    elif lost:
        missing = f"the energy of {', '.join(lost)} after its loss is missing"
    if missing:
        return replace(numbers, notes=(*numbers.notes, f"joules/token unknown: {missing}"))
    training = numbers.training
    if training is not None and training.joules is not None:
        training = replace(training, joules_per_token=training.joules / totals.tokens)
    whole = None if numbers.joules is None else numbers.joules / totals.tokens
    return replace(numbers, joules_per_token=whole, training=training)


def _add_training(
    run_dir: RunDir, numbers: GpuNumbers, *, running: bool, leader: Mapping[int, Leader] | None = None
) -> GpuNumbers:
    """Add the phases of a run, and the numbers of the rest of its recording: the training. leader: as read_phases.

    A recorder that was restarted is a note.
    """
    try:
        recording = read_samples(run_dir.gpu_samples) if run_dir.gpu_samples.exists() else None
    except RecordError as error:
        note = f"{_without_folder(run_dir, error)}: phases and training alone are unknown"
        return replace(numbers, notes=(*numbers.notes, note)) if numbers.devices else numbers
    if recording is None:
        return numbers
    damage = [note for note in damage_note(run_dir.gpu_samples, recording.damaged) if note not in numbers.notes]
    numbers = replace(numbers, notes=(*numbers.notes, *damage))
    if not len(recording):
        return numbers
    clock = RecordingClock(recording)
    numbers = replace(numbers, notes=(*numbers.notes, *restart_notes(run_dir, recording, clock)))
    phases = read_phases(run_dir, recording, clock, running=running, leader=leader)
    if not phases:
        return numbers
    numbers = replace(numbers, phases=phases, training=_training(numbers, recording, clock, phases))
    return _with_earlier_phases(run_dir, numbers, leader) if numbers.earlier else numbers


def _with_earlier_phases(
    run_dir: RunDir, numbers: GpuNumbers, leader: Mapping[int, Leader] | None = None
) -> GpuNumbers:
    """Add the phases of attempts on other devices, whose time and energy are in the totals. leader: as read_phases.

    The time and energy of the training are unknown if the phases of one of them are.
    """
    parts = read_parts(run_dir)
    shift = parts[-1].begin if parts else 0.0  # phases count from the start of the last recording
    earlier = [part for part in parts[:-1] if is_included(numbers, part.recording)]
    phases: list[RecordedPhase] = []
    seconds, joules = 0.0, []
    is_known = len(earlier) == len(numbers.earlier)
    for part in earlier:
        found = read_phases(run_dir, part.recording, part.clock, leader=leader, is_last=False)
        is_known = is_known and bool(found)
        spans = merged_spans(found)
        seconds += math.fsum(end - begin for begin, end in spans)
        joules += joules_of_spans(part.recording, part.clock, spans)
        begin = part.begin - shift
        phases += [replace(one, begin=one.begin + begin, end=one.end + begin, is_earlier=True) for one in found]
    training, energy = numbers.training, complete_sum(joules)
    if training is not None and not is_known:
        training = replace(training, seconds=None, joules=None)
    elif training is not None:
        training = replace(
            training,
            seconds=None if training.seconds is None else max(0.0, training.seconds - seconds),
            joules=None if training.joules is None or energy is None else max(0.0, training.joules - energy),
            is_mixed=True,
        )
    return replace(numbers, phases=(*phases, *numbers.phases), training=training)


def _training(
    numbers: GpuNumbers, recording: Recording, clock: RecordingClock, phases: Sequence[RecordedPhase]
) -> PeriodNumbers | None:
    """Return the numbers of a recording without its phases; None without a sample of the training.

    The samples of the phases, a small part of a recording, are subtracted from the statistics of all its samples.
    """
    spans = merged_spans(phases)
    inside = [at for begin, end in spans for at in range(clock.index_from(begin), clock.index_from(end))]
    columns = {
        (int(gpu["gpu_index"]), str(gpu.get("uuid") or "")): (values, limits)
        for gpu, values, limits in zip(recording.header["gpus"], recording.columns, recording.limits, strict=True)
    }
    devices = []
    for device in numbers.devices:
        known = columns.get((device.gpu_index, device.uuid))
        if known is None:
            return None  # the recording is of other devices than the numbers
        devices.append(_without(device, *known, inside))
    if not any(device.memory_used or device.utilization for device in devices):
        return None
    joules = {(phase.begin, phase.end): phase.joules for phase in phases}  # most spans are a single phase
    overlapping = [span for span in spans if span not in joules]
    joules.update(zip(overlapping, joules_of_spans(recording, clock, overlapping), strict=True))
    energy = complete_sum([joules[span] for span in spans])
    seconds = None if numbers.seconds is None else numbers.seconds - math.fsum(end - begin for begin, end in spans)
    return PeriodNumbers(
        devices=tuple(devices),
        seconds=None if seconds is None else max(0.0, seconds),
        total_mean=complete_sum([device.memory_used.mean if device.memory_used else None for device in devices]),
        joules=None if numbers.joules is None or energy is None else max(0.0, numbers.joules - energy),
        consistent=numbers.consistent,
    )


def _without(
    device: DeviceNumbers,
    columns: Mapping[str, Sequence[float]],
    limits: Mapping[str, Limits],
    samples: Sequence[int],
) -> DeviceNumbers:
    """Return the numbers of a device without these samples. limits: of the columns."""
    values_of = itemgetter(*samples, 0) if samples else None  # in C, and with the first sample always a tuple
    rest: dict[str, Statistics | None] = {}
    for name in QUANTITIES:
        whole, part = getattr(device, name), RunningStats()
        if name in columns and values_of is not None:
            low, high = limits[name]
            part.add([value for value in values_of(columns[name])[:-1] if low <= value <= high])
        rest[name] = None if whole is None or whole.count <= part.count else _rest(whole, part)
    return replace(device, **rest, joules=None)  # type: ignore[arg-type]


def _rest(whole: Statistics, part: RunningStats) -> Statistics | None:
    running = RunningStats()
    running.restore(whole.mean, whole.deviation or 0.0, whole.minimum, whole.maximum, whole.count)
    return statistics_of(running.without(part))
