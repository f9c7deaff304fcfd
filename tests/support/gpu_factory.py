"""Make GPU recordings without a GPU, in the layouts of the recorder and of the original project."""

from __future__ import annotations

import json
import math
import statistics
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.gpu.formats.binary import COLUMNS, SampleFile
from kmatrix.gpu.formats.json_array import JsonArrayFile
from kmatrix.gpu.formats.samples import GpuSample, Snapshot, legacy, multi
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import RunDir

STARTED = 1_795_152_200.0
TOTAL = 24_576.0  # MiB of an A10G


@dataclass(frozen=True, kw_only=True)
class FakeGpus:
    """The content of a recording: mean memory (MiB) and power (W) of each device, one sample per second.

    spread: exact population deviation of memory, if the number of samples is even.
    lost: device -> first sample without its values.  counter: whether the devices have an energy counter.
    """

    memory: Sequence[float] = (12_800.0, 12_750.0, 12_825.0, 12_780.0)
    power: Sequence[float | None] = (150.0, 150.0, 150.0, 150.0)
    utilization: Sequence[float] = (95.0, 95.0, 95.0, 95.0)
    spread: float = 45.0
    samples: int = 60
    total: float = TOTAL  # MiB of each device
    name: str = "NVIDIA A10G"
    device_type: str = "nvidia"
    lost: Mapping[int, int] | None = None
    counter: bool = False

    @property
    def simulated(self) -> bool:
        return self.name.endswith("(simulated)")

    def snapshots(self) -> Iterator[Snapshot]:
        for number in range(self.samples):
            wave = self.spread if number % 2 else -self.spread
            samples = tuple(self._sample(number, index, wave) for index in range(len(self.memory)))
            yield Snapshot(time=STARTED + number, monotonic=float(number), samples=samples)

    def _sample(self, number: int, index: int, wave: float) -> GpuSample:
        cpu = self.device_type == "cpu"
        name, uuid = (f"CPU rank {index}", f"cpu-rank-{index}") if cpu else (self.name, f"GPU-{index}")
        common: dict[str, Any] = {"gpu_index": index, "gpu_name": name, "uuid": uuid}
        if self.lost and number >= self.lost.get(index, math.inf):
            return GpuSample(**common)
        return GpuSample(
            **common,
            utilization=self.utilization[index],
            memory_used=self.memory[index] + wave,
            memory_total=self.total,
            power=self.power[index],
            temperature=None if cpu else 60.0 + index,
            sm_clock=None if cpu else 1695.0,
            energy_j=number * (self.power[index] or 0.0) if self.counter else None,
        )


def record(run_dir: RunDir, gpus: FakeGpus, *, summary: Mapping[str, Any] | None = None, final: bool = True) -> None:
    """Write all files of the recorder. summary: fields of gpu_summary.json to override."""
    run_dir.path.mkdir(parents=True, exist_ok=True)
    snapshots = list(gpus.snapshots())
    write_arrays(run_dir, snapshots)
    write_samples(run_dir.gpu_samples, gpus, snapshots)
    write_json(run_dir.gpu_summary, {**summary_of(gpus, snapshots), "final": final, **(summary or {})})


def write_arrays(run_dir: RunDir, snapshots: Sequence[Snapshot]) -> None:
    """Write both JSON files, gpu_stats_multi and gpu_stats."""
    run_dir.path.mkdir(parents=True, exist_ok=True)
    multi_file, single_file = JsonArrayFile(run_dir.gpu_stats_multi), JsonArrayFile(run_dir.gpu_stats)
    for snapshot in snapshots:
        multi_file.append(multi(snapshot))
        single_file.append(legacy(snapshot.samples[0], snapshot.time))
    multi_file.close()
    single_file.close()


def write_samples(path: Path, gpus: FakeGpus, snapshots: Sequence[Snapshot]) -> None:
    """Write gpu_samples.bin."""
    gpus_header = [
        {
            "gpu_index": s.gpu_index,
            "gpu_name": s.gpu_name,
            "uuid": s.uuid,
            "rank": s.gpu_index,
            "memory_total": gpus.total,
        }
        for s in snapshots[0].samples
    ]
    header = {
        "run_id": "0123456789",
        "started": {"wall": STARTED, "monotonic": 0.0},
        "hz": 1,
        "simulated": gpus.simulated,
        "device_type": gpus.device_type,
        "gpus": gpus_header,
        "energy_source": "power",
        "calibration": None,
    }
    file = SampleFile(path, header)
    for snapshot in snapshots:
        values = [getattr(sample, name) for sample in snapshot.samples for name in COLUMNS]
        file.append(
            snapshot.time, snapshot.monotonic or 0.0, [math.nan if value is None else value for value in values]
        )
    file.close()


def damage(path: Path, first: int, count: int, data: bytes | None = None) -> None:
    """Overwrite records of a gpu_samples.bin as a power loss does: with zeros. data: repeated, instead."""
    content = bytearray(path.read_bytes())
    header = struct.unpack("<I", content[8:12])[0]
    size = 16 + 32 * len(json.loads(content[12 : 12 + header])["gpus"])
    begin = 12 + header + first * size
    content[begin : begin + count * size] = ((data or bytes(8)) * (count * size))[: count * size]
    path.write_bytes(content)


def overwrite(path: Path, sample: int, column: str, value: float, gpu: int = 0) -> None:
    """Replace a value in a gpu_samples.bin."""
    content = bytearray(path.read_bytes())
    header = struct.unpack("<I", content[8:12])[0]
    size = 16 + 32 * len(json.loads(content[12 : 12 + header])["gpus"])
    form = "<d" if column == "energy_j" else "<f"
    struct.pack_into(form, content, 12 + header + sample * size + 16 + 32 * gpu + 4 * COLUMNS.index(column), value)
    path.write_bytes(content)


def summary_of(gpus: FakeGpus, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return gpu_summary.json, computed from the snapshots without the code of the report."""
    devices = [_device(snapshots, index) for index in range(len(gpus.memory))]
    joules = [device["joules"] for device in devices]
    totals = [sum(s.memory_used for s in snap.samples if s.memory_used is not None) for snap in snapshots]
    return {
        "run_id": "0123456789",
        "simulated": gpus.simulated,
        "device_type": gpus.device_type,
        "started": STARTED,
        "ended": STARTED + gpus.samples,
        "seconds": float(gpus.samples),
        "hz_asked": 1,
        "hz_reached": 1.0,
        "samples": gpus.samples,
        "late": 0,
        "energy_source": None if None in joules else "counter",
        "calibration": {},
        "warnings": [],
        "gpus": devices,
        "totals": {
            "joules": None if None in joules else sum(joules),
            "mean_power": None,
            "memory_used_mean": sum(device["memory_used"]["mean"] for device in devices),
            "memory_used_max": max(totals),
        },
        "balance": {},
    }


def _device(snapshots: Sequence[Snapshot], index: int) -> dict[str, Any]:
    samples = [snapshot.samples[index] for snapshot in snapshots]
    power = [sample.power for sample in samples if sample.power is not None]
    names = ("memory_used", "utilization", "power", "temperature", "sm_clock")
    lost = next((snap.time for snap in snapshots if not snap.samples[index].is_known), None)
    return {
        "gpu_index": index,
        "gpu_name": samples[0].gpu_name,
        "uuid": samples[0].uuid,
        "rank": index,
        "samples": sum(sample.is_known for sample in samples),
        "lost_at": lost,
        "memory_total": samples[0].memory_total,
        **{name: _statistics([getattr(sample, name) for sample in samples]) for name in names},
        "joules": sum(power) if power else None,
        "throttled_s": {},
        "foreign": [],
    }


def _statistics(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = statistics.fmean(known)
    limits = {"min": min(known), "max": max(known), "count": len(known)}
    return {"mean": mean, "deviation": statistics.pstdev(known), **limits}


def write_foreign(folder: Path, gpus: FakeGpus, *, layout: str = "multi", keep: int | None = None) -> Path:
    """Write one file as the original project's monitor does. layout: multi, single or mixed; keep: bytes to keep.

    mixed: the layout for several GPUs under the file name for one, with memory_mb and temperatures{}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"gpu_stats_{folder.name}_20250919_120000{'_multi_gpu' if layout == 'multi' else ''}.json"
    entries = [_foreign(snapshot, layout, number) for number, snapshot in enumerate(gpus.snapshots())]
    text = json.dumps(entries, indent=2)
    path = folder / name
    path.write_text(text[:keep], encoding="utf-8")
    return path


def _foreign(snapshot: Snapshot, layout: str, number: int) -> dict[str, Any]:
    time = f"2025-09-19T12:{number // 60 % 60:02d}:{number % 60:02d}.123456"
    memory = "memory_mb" if layout == "mixed" else "memory_used"
    gpus = [
        {
            "gpu_index": s.gpu_index,
            "gpu_name": s.gpu_name,
            "utilization": s.utilization,
            memory: s.memory_used,
            "memory_total": s.memory_total,
            "temperatures": {"GPU": s.temperature},
            "power": s.power,
            "clocks": {"gpu": s.sm_clock, "memory": 6251},
        }
        for s in snapshot.samples
    ]
    if layout == "single":
        return {"timestamp": time, **gpus[0]}
    used = [s.memory_used for s in snapshot.samples if s.memory_used is not None]
    return {"timestamp": time, "multi_gpu_data": gpus, "aggregate_stats": {"total_memory_used": sum(used)}}


def write_timings(
    run_dir: RunDir, compute_ms: Sequence[float], *, step_ms: float | None = None, lines: int = 10
) -> None:
    """Write the timings of ranks, ten steps per line. step_ms: by default 10 % more than the slowest rank computes."""
    whole_step_ms = 1.1 * max(compute_ms) if step_ms is None else step_ms
    for rank, compute in enumerate(compute_ms):
        path = run_dir.timings(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"schema": 1, "step": 10 * (line + 1), "steps": 10, "compute_ms": compute, "step_ms": whole_step_ms}
            for line in range(lines)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_phases(
    run_dir: RunDir, *phases: tuple[str, float, float], attempt: int = 1, end: float | None = None
) -> None:
    """Append to phases.jsonl: names with begin and end, in seconds since the start of the recording.

    end: of the training; None: the attempt was killed.
    """
    run_dir.path.mkdir(parents=True, exist_ok=True)
    for name, begin, last in (*phases, *(() if end is None else [("ending", end, end + 1)])):
        line = {"phase": name, "step": 0, "attempt": attempt, "begin": STARTED + begin, "end": STARTED + last}
        append_jsonl(run_dir.phases, line)
