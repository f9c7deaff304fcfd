"""Read the numbers of a run's devices from gpu_summary.json, else from the recording itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError, SchemaError
from kmatrix.gpu.devices import EXTRA_METRICS
from kmatrix.gpu.formats.binary import Recording, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.records.files import finite, read_jsonl, read_or_empty
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult, read_result, read_run_file_or_empty
from kmatrix.report.gpu.numbers import (
    CPU,
    SIMULATED,
    DeviceNumbers,
    GpuNumbers,
    PeriodNumbers,
    RecordedPhase,
    Statistics,
    TimelinePoint,
    cost_factors,
)
from kmatrix.report.gpu.stream import (
    QUANTITIES,
    add_binary_timeline,
    read_binary,
    read_stream,
    statistics_of,
    with_earlier,
    with_newer_samples,
)
from kmatrix.stats import RunningStats, complete_sum
from kmatrix.status.stragglers import read_ranks

# File names of text recordings, preferred first: JSON of all GPUs, JSON of one GPU or of all, CSV.
PATTERNS = ("gpu_stats*_multi_gpu.json", "gpu_stats*.json", "gpu_metrics*.csv")
NOTHING_RECORDED = "nothing recorded"  # event in which the recorder logs why it recorded nothing
MIN_COVERAGE = 0.9  # share of the training time that a recording must cover to give joules/token
TRAINER_PHASES = ("set-up", "evaluation", "checkpoint")  # as the trainer logs them
ENDING = "ending"  # the rest of the recording after the trainer's result


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """The totals of a run's training that its GPU numbers refer to. None: unknown."""

    tokens: int | None = None
    seconds: float | None = None
    device: str = ""  # "gpu", "cpu" or ""
    mfu: float | None = None  # 0 to 1


def read_gpu(run_dir: RunDir, totals: TrainingTotals) -> GpuNumbers | None:
    """Return the numbers of a run's devices; None if there is no recording.

    An unreadable recording gives numbers without devices, and a note with the reason.
    """
    ranks = read_ranks(run_dir)
    numbers = _recorded(run_dir, totals.device)
    if numbers is None and ranks is not None:
        numbers = _no_devices(totals.device)
    if numbers is None:
        return None
    factors = cost_factors(read_run_file_or_empty(run_dir))
    numbers = replace(numbers, ranks=ranks, mfu=totals.mfu, factors=factors)
    return _add_joules_per_token(_add_training(run_dir, numbers), totals)


def add_timeline(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Add the memory timeline, from gpu_samples.bin if it exists, else from the text recording."""
    if numbers.timeline or not numbers.devices:
        return numbers
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
        return with_earlier(run_dir, numbers)
    reasons = [
        str(event.get("text")) for event in read_jsonl(run_dir.gpu_events) if event.get("event") == NOTHING_RECORDED
    ]
    if not reasons:
        return numbers
    numbers = numbers or _no_devices(device)
    return replace(numbers, notes=(*numbers.notes, reasons[-1]))


def _no_devices(device: str) -> GpuNumbers:
    """Return the numbers of a run without a recording. device: "gpu", "cpu" or ""."""
    return GpuNumbers(evidence="", device_type=CPU if device == CPU else "", devices=(), samples=0, seconds=None)


def _from_samples(run_dir: RunDir) -> GpuNumbers | None:
    """Return the numbers of gpu_samples.bin: all that a killed recorder leaves. None without a sample."""
    if not run_dir.gpu_samples.exists():
        return None
    try:
        numbers = read_binary(run_dir.gpu_samples)
    except SchemaError:
        raise
    except RecordError:
        return None
    note = f"the recorder wrote no summary: numbers computed from {run_dir.gpu_samples.name}"
    evidence = f"{run_dir.name}/{run_dir.gpu_samples.name}"
    return replace(numbers, evidence=evidence, final=False, notes=(note,)) if numbers.devices else None


def _from_text(run_dir: RunDir, device: str) -> GpuNumbers | None:
    """Return the numbers of the first text recording that has a sample."""
    empty: GpuNumbers | None = None
    for path in recordings(run_dir.path):
        try:
            numbers = read_stream(path, cpu=device == CPU)
        except SchemaError:
            raise
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
    summary = read_or_empty(run_dir.gpu_summary)
    devices = tuple(_device(gpu) for gpu in summary.get("gpus") or [] if isinstance(gpu, Mapping))
    if not any(device.samples for device in devices):
        return None
    totals = summary.get("totals") or {}
    # If no device has its own energy, the total is the host's (RAPL); if only some have, it is incomplete.
    without_energy = sum(device.joules is None for device in devices)
    final = bool(summary.get("final"))
    notes = [str(text) for text in summary.get("warnings") or []]
    if not final:
        notes.append("the recorder is still running: throttling and other processes are up to a minute old")
    numbers = GpuNumbers(
        evidence=f"{run_dir.name}/{run_dir.gpu_summary.name}",
        device_type=str(summary.get("device_type") or ""),
        devices=devices,
        samples=int(finite(summary.get("samples")) or max(device.samples for device in devices)),
        seconds=finite(summary.get("seconds")),
        hz=finite(summary.get("hz_reached")),
        final=final,
        simulated=bool(summary.get("simulated")) or any(device.gpu_name.endswith(SIMULATED) for device in devices),
        energy_source=str(summary["energy_source"]) if summary.get("energy_source") else None,
        total_mean=finite(totals.get("memory_used_mean")),
        total_max=finite(totals.get("memory_used_max")),
        joules=finite(totals.get("joules")) if without_energy in (0, len(devices)) else None,
        notes=tuple(notes),
    )
    # A summary that is not final is up to a minute old.
    if final or not run_dir.gpu_samples.exists():
        return numbers
    return with_newer_samples(run_dir, numbers)


def _device(gpu: Mapping[str, Any]) -> DeviceNumbers:
    rank = finite(gpu.get("rank"))
    throttled = gpu.get("throttled_s") or {}
    return DeviceNumbers(
        gpu_index=int(finite(gpu.get("gpu_index")) or 0),
        gpu_name=str(gpu.get("gpu_name") or ""),
        rank=None if rank is None else int(rank),
        uuid=str(gpu.get("uuid") or ""),
        samples=int(finite(gpu.get("samples")) or 0),
        memory_total=finite(gpu.get("memory_total")),
        memory_used=_statistics(gpu.get("memory_used")),
        utilization=_statistics(gpu.get("utilization")),
        power=_statistics(gpu.get("power")),
        temperature=_statistics(gpu.get("temperature")),
        sm_clock=_statistics(gpu.get("sm_clock")),
        joules=finite(gpu.get("joules")),
        lost_at=finite(gpu.get("lost_at")),
        lost_s=finite(gpu.get("lost_s")) or 0.0,
        throttled_s=tuple((str(why), seconds) for why in throttled if (seconds := finite(throttled.get(why)))),
        foreign=tuple(_process(process) for process in gpu.get("foreign") or [] if isinstance(process, Mapping)),
        ecc_uncorrected=int(finite((gpu.get("ecc") or {}).get("uncorrected")) or 0),
        extras={name: known.mean for name in EXTRA_METRICS if (known := _statistics(gpu.get(name)))},
    )


def _process(process: Mapping[str, Any]) -> str:
    memory = finite(process.get("memory_mib"))
    size = "" if memory is None else f", {memory:.0f} MiB"
    return f"{process.get('name') or 'a process'} (pid {process.get('pid')}{size})"


def _statistics(entry: Any) -> Statistics | None:
    """Return the statistics of one quantity in gpu_summary.json; None if the mean is unknown."""
    if not isinstance(entry, Mapping) or (mean := finite(entry.get("mean"))) is None:
        return None
    minimum, maximum = finite(entry.get("min")), finite(entry.get("max"))
    return Statistics(
        mean=mean,
        deviation=finite(entry.get("deviation")),
        minimum=mean if minimum is None else minimum,
        maximum=mean if maximum is None else maximum,
        count=int(finite(entry.get("count")) or 0),
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


def _add_training(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Add the phases of a run, and the numbers of the rest of its recording: the training."""
    try:
        recording = read_samples(run_dir.gpu_samples) if run_dir.gpu_samples.exists() else None
    except RecordError:
        return numbers
    if recording is None or not len(recording):
        return numbers
    clock = RecordingClock(recording)
    phases = read_phases(run_dir, recording, clock)
    if not phases:
        return numbers
    training = _training(numbers, recording, clock, phases)
    if training is not None and run_dir.earlier_gpu_samples():
        # The phases of attempts on other GPUs are not in this recording, but their energy is in the total.
        training = replace(training, seconds=None, joules=None)
    return replace(numbers, phases=phases, training=training)


def _training(
    numbers: GpuNumbers, recording: Recording, clock: RecordingClock, phases: Sequence[RecordedPhase]
) -> PeriodNumbers | None:
    """Return the numbers of a recording without its phases; None without a sample of the training.

    The samples of the phases, a small part of a recording, are subtracted from the statistics of all its samples.
    """
    spans = merged_spans(phases)
    ranges = [(clock.index_from(begin), clock.index_from(end)) for begin, end in spans]
    columns = {
        (int(gpu["gpu_index"]), str(gpu.get("uuid") or "")): values
        for gpu, values in zip(recording.header["gpus"], recording.columns, strict=True)
    }
    devices = []
    for device in numbers.devices:
        values = columns.get((device.gpu_index, device.uuid))
        if values is None:
            return None  # the recording is of other devices than the numbers
        devices.append(_without(device, values, ranges))
    if not any(device.memory_used or device.utilization for device in devices):
        return None
    outside = [joules_between(recording, clock, begin, end) for begin, end in spans]
    energy = complete_sum(outside)
    seconds = None if numbers.seconds is None else numbers.seconds - math.fsum(end - begin for begin, end in spans)
    return PeriodNumbers(
        devices=tuple(devices),
        seconds=None if seconds is None else max(0.0, seconds),
        total_mean=complete_sum([device.memory_used.mean if device.memory_used else None for device in devices]),
        joules=None if numbers.joules is None or energy is None else max(0.0, numbers.joules - energy),
        consistent=numbers.consistent,
    )


def merged_spans(phases: Sequence[RecordedPhase]) -> list[tuple[float, float]]:
    """Return begin and end of the time that any phase covers, ascending and without overlaps."""
    spans: list[tuple[float, float]] = []
    for phase in sorted(phases, key=lambda phase: phase.begin):
        if spans and phase.begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], phase.end))
        else:
            spans.append((phase.begin, phase.end))
    return spans


def _without(
    device: DeviceNumbers, columns: Mapping[str, Sequence[float]], ranges: Sequence[tuple[int, int]]
) -> DeviceNumbers:
    """Return the numbers of a device without the samples of these ranges."""
    rest: dict[str, Statistics | None] = {}
    for name in QUANTITIES:
        whole, part = getattr(device, name), RunningStats()
        for begin, end in ranges:
            if name in columns:
                part.add(list(columns[name][begin:end]))
        rest[name] = None if whole is None or whole.count <= part.count else _rest(whole, part)
    return replace(device, **rest, joules=None)  # type: ignore[arg-type]


def _rest(whole: Statistics, part: RunningStats) -> Statistics | None:
    running = RunningStats()
    running.restore(
        {
            "count": whole.count,
            "mean": whole.mean,
            "deviation": whole.deviation or 0.0,
            "min": whole.minimum,
            "max": whole.maximum,
        }
    )
    return statistics_of(running.without(part))


def read_phases(run_dir: RunDir, recording: Recording, clock: RecordingClock) -> tuple[RecordedPhase, ...]:
    """Return the phases within a recording, sorted by begin. The ending is the time after the trainer's result."""
    lines = [line for line in read_jsonl(run_dir.phases) if line.get("phase") in TRAINER_PHASES]
    starts = _starts(run_dir, clock)

    # Cut each phase of the trainer to the recording.
    found: list[RecordedPhase] = []
    for line in lines:
        begin, end = _time(clock, line, "begin"), _time(clock, line, "end")
        if begin is None or end is None or end <= 0 or begin >= clock.length or end < begin:
            continue
        if line["phase"] == TRAINER_PHASES[0]:
            # The launch of the trainer's processes belongs to set-up.
            begin = max((start for start in starts if start <= begin), default=begin if found else 0.0)
        begin, end = max(begin, 0.0), min(end, clock.length)
        joules = joules_between(recording, clock, begin, end)
        found.append(RecordedPhase(name=str(line["phase"]), begin=begin, end=end, joules=joules))

    # What follows the trainer's result is the end of its processes.
    result = read_result(run_dir) or RunResult()
    # A result of an earlier attempt says nothing about the end of this one.
    attempts = [line.get("attempt") for line in lines]
    wall = result.ended if not attempts or result.attempt == attempts[-1] else None
    ended = clock.at(wall) if found and wall is not None else None
    if ended is not None and 0 < ended < clock.length:
        joules = joules_between(recording, clock, ended, clock.length)
        found.append(RecordedPhase(name=ENDING, begin=ended, end=clock.length, joules=joules))
    return tuple(sorted(found, key=lambda phase: phase.begin))


def _starts(run_dir: RunDir, clock: RecordingClock) -> list[float]:
    """Return the recording times at which the recorder of each attempt started."""
    found = [_time(clock, event, "time") for event in read_jsonl(run_dir.gpu_events) if event.get("event") == "started"]
    return [max(0.0, time) for time in found if time is not None]


def _time(clock: RecordingClock, line: Mapping[str, Any], name: str) -> float | None:
    """Return the recording time of a time in a log: Unix s under its name, and next to it the monotonic time."""
    wall = finite(line.get(name))
    monotonic = finite(line.get("monotonic" if name == "time" else f"{name}_monotonic"))
    return None if wall is None else clock.at(wall, monotonic)


def joules_between(recording: Recording, clock: RecordingClock, begin: float, end: float) -> float | None:
    """Return the energy of all devices, or of their host, between two recording times in J; None if unknown.

    The last sample at or before each time counts.
    """
    # The counters only have the values at samples.
    first, last = (max(0, clock.index_after(time) - 1) for time in (begin, end))
    by_device = [_increase(columns.get("energy_j"), first, last) for columns in recording.columns]
    if all(joules is None for joules in by_device):
        return _increase(recording.host_joules, first, last)
    return complete_sum(by_device)


def _increase(energy: Sequence[float] | None, first: int, last: int) -> float | None:
    """Return the increase of an energy counter between two samples, None if one of them is unknown."""
    if energy is None or math.isnan(energy[first]) or math.isnan(energy[last]):
        return None
    return max(0.0, energy[last] - energy[first])
