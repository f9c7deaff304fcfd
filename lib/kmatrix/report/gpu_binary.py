"""gpu_samples.bin, and what was put aside as gpu_samples.1.bin -> numbers and a timeline over all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kmatrix.errors import RecordError, SchemaError
from kmatrix.gpu.formats import Recording, read_samples
from kmatrix.gpu.formats.blocks import MEASURED, Block, Part
from kmatrix.records import RunDir
from kmatrix.report.gpu_stream import memory_of, numbers_of
from kmatrix.report.gpu_values import GpuNumbers
from kmatrix.report.spread import TimelineOf

ROWS = 1 << 16  # of a block
REPLACED = ("memory_used", "utilization", "power", "temperature", "sm_clock", "joules", "samples")
LEFT_OUT = "an earlier attempt is not in these numbers"  # how a recorder begins its warning about other devices


def blocks_of(recording: Recording) -> Iterator[Block]:
    """Yield a binary recording as columns."""
    for begin in range(0, len(recording), ROWS):
        times = np.array(recording.times[begin : begin + ROWS], dtype=float)
        parts = tuple(
            Part(
                gpu_index=int(gpu["gpu_index"]),
                gpu_name=str(gpu["gpu_name"]),
                uuid=str(gpu.get("uuid") or ""),
                memory_total=gpu.get("memory_total"),
                rows=np.arange(len(times)),
                columns={
                    name: np.array(columns[name][begin : begin + ROWS], dtype=float)
                    if name in columns
                    else np.full(len(times), np.nan)
                    for name in MEASURED
                },
            )
            for gpu, columns in zip(recording.header["gpus"], recording.columns, strict=True)
        )
        yield Block(times=times, parts=parts)


def read_binary(path: Path) -> GpuNumbers:
    """Return the numbers of a binary recording. Raises RecordError."""
    recording = read_samples(path)
    header = recording.header
    numbers = numbers_of(blocks_of(recording), path.name)
    ranks = {int(gpu["gpu_index"]): gpu.get("rank") for gpu in header["gpus"]}
    return replace(
        numbers,
        devices=tuple(replace(device, rank=ranks.get(device.gpu_index)) for device in numbers.devices),
        device_type=str(header.get("device_type") or ""),
        simulated=bool(header.get("simulated")),
        energy_source=header.get("energy_source") if numbers.joules is not None else None,
    )


def up_to_date(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Return numbers of a summary that is not the last one with everything that was recorded after it."""
    try:
        newer = read_binary(run_dir.gpu_samples)
    except SchemaError:
        raise
    except RecordError:
        return numbers
    known = {(device.gpu_index, device.uuid): device for device in newer.devices}
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
        total_high=newer.total_high,
        joules=numbers.joules if newer.joules is None else newer.joules,
    )


def with_earlier(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Return the numbers of a run with what earlier attempts recorded on other devices in their totals.

    Those devices are named in a note: what belongs to one device is never that of two.
    """
    for path in run_dir.earlier_gpu_samples():
        try:
            earlier = read_binary(path)
        except SchemaError:
            raise
        except RecordError as error:
            numbers = replace(numbers, notes=(*numbers.notes, error.what.replace(f"{run_dir.path}/", "")))
            continue
        numbers = _added(numbers, earlier)
    return numbers


def timed(run_dir: RunDir, numbers: GpuNumbers) -> GpuNumbers:
    """Return the numbers with their memory over time, from the first recording of the run on.

    Devices of earlier attempts stand in the places of those that have their ranks now.
    """
    found: list[Recording] = []
    for path in (*run_dir.earlier_gpu_samples(), run_dir.gpu_samples):
        with contextlib.suppress(RecordError):
            recording = read_samples(path)
            if len(recording) and len(recording.header["gpus"]) == len(numbers.devices):
                found.append(recording)
    if not found:
        return numbers
    timeline, first = TimelineOf(), found[0].times[0]
    for recording in found:
        for block in blocks_of(recording):
            timeline.add(block.times - first, dict(enumerate(memory_of(block).values())))
    before = found[-1].times[0] - first  # phases count from the last recording's begin
    phases = tuple(replace(phase, begin=phase.begin + before, end=phase.end + before) for phase in numbers.phases)
    return replace(numbers, timeline=timeline.moments(range(len(numbers.devices))), phases=phases)


def _added(numbers: GpuNumbers, earlier: GpuNumbers) -> GpuNumbers:
    """Return the numbers with those of an earlier attempt in their totals, or with a note why they are not."""
    where = ", ".join(f"{earlier.label(device)} ({device.gpu_name})" for device in earlier.devices)
    seconds = earlier.seconds or 0.0
    said = f"an earlier attempt was recorded on {where or 'no device'}, {seconds:.0f} s in {earlier.evidence}"
    if (earlier.device_type, earlier.simulated) != (numbers.device_type, numbers.simulated) or not earlier.devices:
        return replace(numbers, notes=(*numbers.notes, f"{said}: it is not in these numbers"))
    known = numbers.joules is not None and earlier.joules is not None
    highest = [value for value in (numbers.total_high, earlier.total_high) if value is not None]
    notes = (note for note in numbers.notes if not note.startswith(LEFT_OUT))
    return replace(
        numbers,
        samples=numbers.samples + earlier.samples,
        seconds=None if numbers.seconds is None else numbers.seconds + seconds,
        total_high=max(highest, default=None),
        joules=(numbers.joules or 0.0) + (earlier.joules or 0.0) if known else None,
        notes=(*notes, f"{said}: time, joules and the peak of all together hold it, the lines of devices do not"),
    )
