"""A run directory -> the numbers of its GPUs: from gpu_summary.json, else streamed from what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError, SchemaError
from kmatrix.gpu.source import EXTRAS
from kmatrix.records import RunDir, read_jsonl
from kmatrix.report.energy import factors_of
from kmatrix.report.gpu_values import CPU, SIMULATED, DeviceNumbers, GpuNumbers, Moment, Spread
from kmatrix.report.phases import read_phases
from kmatrix.report.reading import finite, readable
from kmatrix.report.stragglers import read_ranks

# What a run's recording is looked for as, the best first: all GPUs, one GPU or all of them, a table.
PATTERNS = ("gpu_stats*_multi_gpu.json", "gpu_stats*.json", "gpu_metrics*.csv")
NOTHING = "nothing recorded"  # the event with which a recorder says why
COVERED = 0.9  # share of a run's time that a recording must hold for joules and tokens to be of the same stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run did, as far as its energy has to be put beside it. seconds: of the training.  mfu: 0 to 1."""

    tokens: int | None = None
    seconds: float | None = None
    device: str = ""
    mfu: float | None = None


def read_gpu(run_dir: RunDir, work: Work) -> GpuNumbers | None:
    """Return what was recorded of a run's devices; None where there is no recording.

    A recording in which nothing can be read has no devices, and a note that says why.
    """
    ranks = read_ranks(run_dir)
    numbers = _recorded(run_dir, work.device)
    if numbers is None and ranks is not None:
        numbers = _nothing(work.device)
    if numbers is None:
        return None
    factors = factors_of(readable(run_dir.run_json))
    numbers = replace(numbers, ranks=ranks, mfu=work.mfu, factors=factors, phases=read_phases(run_dir))
    return _beside_tokens(numbers, work)


def with_timeline(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Return the numbers with their memory over time: of gpu_samples.bin, else of what was recorded as text."""
    if numbers.timeline or not numbers.devices:
        return numbers
    if run_dir.gpu_samples.exists():
        from kmatrix.report.gpu_binary import timed

        numbers = timed(run_dir, numbers)
    if numbers.timeline:
        return numbers
    streamed = _from_stats(run_dir, numbers.device_type)
    known = {device.gpu_index: place for place, device in enumerate(streamed.devices)} if streamed else {}
    places = [known.get(device.gpu_index) for device in numbers.devices]
    timeline = tuple(
        Moment(moment.seconds, tuple(None if at is None else moment.memory[at] for at in places))
        for moment in (streamed.timeline if streamed else ())
    )
    return replace(numbers, timeline=timeline)


def recordings(folder: Path) -> list[Path]:
    """Return the files that may hold a recording of a run, the best first; of several of a kind the newest by name."""
    found: dict[Path, None] = {}
    for pattern in PATTERNS:
        for path in sorted(folder.glob(pattern), reverse=True):
            found.setdefault(path)
    return list(found)


def _recorded(run_dir: RunDir, device: str) -> GpuNumbers | None:
    """Return the numbers of the best recording, with what earlier attempts recorded; or why nothing was."""
    numbers = _from_summary(run_dir) or _from_samples(run_dir) or _from_stats(run_dir, device)
    if numbers and numbers.devices:
        if not run_dir.earlier_gpu_samples():
            return numbers
        from kmatrix.report.gpu_binary import with_earlier

        return with_earlier(run_dir, numbers)
    said = [str(event.get("text")) for event in read_jsonl(run_dir.gpu_events) if event.get("event") == NOTHING]
    if not said:
        return numbers
    numbers = numbers or _nothing(device)
    return replace(numbers, notes=(*numbers.notes, said[-1]))


def _nothing(device: str) -> GpuNumbers:
    """Return the numbers of a run of which nothing was recorded. device: that it trained on."""
    return GpuNumbers(evidence="", device_type=CPU if device == CPU else "", devices=(), samples=0, seconds=None)


def _from_samples(run_dir: RunDir) -> GpuNumbers | None:
    """Return the numbers of every sample; None where there is none. A recorder that was killed left no more."""
    if not run_dir.gpu_samples.exists():
        return None
    from kmatrix.report.gpu_binary import read_binary

    try:
        numbers = read_binary(run_dir.gpu_samples)
    except SchemaError:
        raise
    except RecordError:
        return None
    note = f"the recorder left no summary: these are the numbers of {run_dir.gpu_samples.name}"
    evidence = f"{run_dir.name}/{run_dir.gpu_samples.name}"
    return replace(numbers, evidence=evidence, final=False, notes=(note,)) if numbers.devices else None


def _from_stats(run_dir: RunDir, device: str) -> GpuNumbers | None:
    """Return the numbers of the first recording that holds a sample."""
    from kmatrix.report.gpu_stream import read_stream  # and numpy with it, which most reports need not load

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
    """Return the numbers that the recorder left; None where it left none, or never saw a device."""
    about = readable(run_dir.gpu_summary)
    devices = tuple(_device(gpu) for gpu in about.get("gpus") or [] if isinstance(gpu, Mapping))
    if not any(device.samples for device in devices):
        return None
    totals = about.get("totals") or {}
    unknown = sum(
        device.joules is None for device in devices
    )  # of all: the energy is the host's; of some: it is a part
    final = bool(about.get("final"))
    notes = [str(text) for text in about.get("warnings") or []]
    if not final:
        notes.append(
            "the recorder has not ended: throttling and other processes are those of its last minute's summary"
        )
    used = [device.memory_used.mean for device in devices if device.memory_used]
    numbers = GpuNumbers(
        evidence=f"{run_dir.name}/{run_dir.gpu_summary.name}",
        device_type=str(about.get("device_type") or ""),
        devices=devices,
        samples=int(finite(about, "samples") or max(device.samples for device in devices)),
        seconds=finite(about, "seconds"),
        hz=finite(about, "hz_reached"),
        final=final,
        simulated=bool(about.get("simulated")) or any(device.gpu_name.endswith(SIMULATED) for device in devices),
        energy_source=str(about["energy_source"]) if about.get("energy_source") else None,
        total_mean=sum(used) if len(used) == len(devices) else None,
        total_high=finite(totals, "memory_used_max"),
        joules=finite(totals, "joules") if unknown in (0, len(devices)) else None,
        notes=tuple(notes),
    )
    if final or not run_dir.gpu_samples.exists():
        return numbers
    from kmatrix.report.gpu_binary import up_to_date

    return up_to_date(run_dir, numbers)


def _device(gpu: Mapping[str, Any]) -> DeviceNumbers:
    rank = finite(gpu, "rank")
    throttled = gpu.get("throttled_s") or {}
    return DeviceNumbers(
        gpu_index=int(finite(gpu, "gpu_index") or 0),
        gpu_name=str(gpu.get("gpu_name") or ""),
        rank=None if rank is None else int(rank),
        uuid=str(gpu.get("uuid") or ""),
        samples=int(finite(gpu, "samples") or 0),
        memory_total=finite(gpu, "memory_total"),
        memory_used=_spread(gpu.get("memory_used")),
        utilization=_spread(gpu.get("utilization")),
        power=_spread(gpu.get("power")),
        temperature=_spread(gpu.get("temperature")),
        sm_clock=_spread(gpu.get("sm_clock")),
        joules=finite(gpu, "joules"),
        lost_at=finite(gpu, "lost_at"),
        throttled_s=tuple((str(why), seconds) for why in throttled if (seconds := finite(throttled, why))),
        foreign=tuple(_foreign(process) for process in gpu.get("foreign") or [] if isinstance(process, Mapping)),
        ecc_uncorrected=int(finite(gpu.get("ecc") or {}, "uncorrected") or 0),
        extras={name: known.mean for name in EXTRAS if (known := _spread(gpu.get(name)))},
    )


def _foreign(process: Mapping[str, Any]) -> str:
    memory = finite(process, "memory_mib")
    size = "" if memory is None else f", {memory:.0f} MiB"
    return f"{process.get('name') or 'a process'} (pid {process.get('pid')}{size})"


def _spread(about: Any) -> Spread | None:
    """Return a spread of the summary; None where its mean is not known."""
    if not isinstance(about, Mapping) or (mean := finite(about, "mean")) is None:
        return None
    low, high = finite(about, "min"), finite(about, "max")
    return Spread(
        mean=mean,
        deviation=finite(about, "deviation"),
        low=mean if low is None else low,
        high=mean if high is None else high,
    )


def _beside_tokens(numbers: GpuNumbers, work: Work) -> GpuNumbers:
    """Add joules a token, or a note that says why they are not known."""
    if numbers.joules is None or not work.tokens:
        return numbers
    missing = ""
    lost = [numbers.label(device) for device in numbers.devices if device.lost_at is not None]
    if work.seconds and numbers.seconds is not None and numbers.seconds < COVERED * work.seconds:
        missing = f"the recording holds {numbers.seconds:.0f} s of the {work.seconds:.0f} s of training"
    elif lost:
        missing = f"{', '.join(lost)} was lost, and used some that was not counted"
    if missing:
        return replace(numbers, notes=(*numbers.notes, f"joules a token are not known: {missing}"))
    return replace(numbers, joules_per_token=numbers.joules / work.tokens)
