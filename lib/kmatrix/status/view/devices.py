"""The devices of a matrix from the recordings of its runs: memory of each run, and the GPUs with their runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kmatrix.gpu.formats.json_array import last_entry
from kmatrix.own_file import may_exist
from kmatrix.records.decode import Amount, Count, Record, decode_optional
from kmatrix.records.jobs.files import host_of
from kmatrix.records.jobs.paths import nodes_of
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import GpuEntry, Status
from kmatrix.status.run_jobs import RunJob
from kmatrix.status.view.matrix_view import DeviceMemory, GpuView, RunView

RANKS = "cpu-"  # prefix of the device names of ranks on the CPU in a recording
STALE_S = 30.0  # a recording is written each second: older values are outdated
STALE_THERE_S = 100.0  # the same on network storage, whose caches may show a file as it was a minute ago


def memory_of(run: RunDir, *, live: bool) -> tuple[DeviceMemory, ...]:
    """Return the maximum memory of each device of all nodes, from the summaries of the recordings.

    live: the run is active. Its summary may be a minute old, of before the first step: the newest values count, too.
    """
    nodes = nodes_of(run) if may_exist(run.path / "nodes") else []
    places = [(host_of(node), node.recording) for node in nodes] if len(nodes) > 1 else [("", run)]
    return tuple(device for host, folder in places for device in _memory_in(folder, host, live=live))


def gpus_now(
    matrix: MatrixDir,
    known: Sequence[GpuEntry],
    runs: Sequence[RunView],
    now: float,
    age_s: Callable[[Path], float | None] | None = None,
) -> list[GpuView]:
    """Return the GPUs with the newest values of the runs on them.

    known: index, name, uuid and `out` of the GPUs that runs may use, as the runner wrote them. Other GPUs in a
    recording (simulated ones, those of a cluster) follow.
    age_s: on a cluster, the age of a file by the clock of its storage; None on one machine, whose clock decides.
    """
    found = {str(gpu["uuid"]): _listed(gpu) for gpu in known if gpu.get("uuid")}
    for run in runs:
        if run.status is not Status.RUNNING:
            continue
        for uuid in run.gpus if run.job is None else ():
            found[uuid] = replace(found.get(uuid, GpuView(index=None, name="", uuid=uuid)), run=run.name)
        places = [("", matrix.run(run.name))] if run.job is None else _places(matrix.run(run.name), run.job)
        for host, folder in places:
            for entry in _recorded(folder, run, now, age_s):
                uuid = str(entry.get("uuid") or f"{host} GPU {entry.get('gpu_index')}".lstrip())
                about = found.get(uuid, GpuView(index=entry.get("gpu_index"), name="", uuid=uuid))
                found[uuid] = replace(_measured(about, entry, run.name), host=host)
    return sorted(found.values(), key=lambda gpu: (gpu.host, gpu.index is None, gpu.index or 0))


def _memory_in(recording: RunDir, host: str, *, live: bool) -> Iterator[DeviceMemory]:
    """Yield the maximum memory of each device of one recording. host: "" for a run on one node."""
    summary = decode_optional(recording.gpu_summary, _Summary) or _Summary()
    newest = _newest_memory(recording) if live else {}
    for place, gpu in enumerate(summary.gpus):
        if gpu.memory_used is not None and gpu.memory_used.max is not None:
            yield DeviceMemory(
                device=str(place if gpu.gpu_index is None else gpu.gpu_index),
                host=host,
                most=max(gpu.memory_used.max, newest.get(gpu.gpu_index, 0.0)),
                total=gpu.memory_total,
            )


def _newest_memory(run: RunDir) -> dict[object, float]:
    """Return the memory (MiB) in the last entry of the recording, by the index of the device."""
    entry = last_entry(run.gpu_stats_multi) or {}
    devices = [each for each in entry.get("multi_gpu_data") or [] if isinstance(each, dict)]
    used = [(each.get("gpu_index"), each.get("memory_used")) for each in devices]
    return {index: value for index, value in used if isinstance(index, int) and isinstance(value, int | float)}


class _Statistics(Record, frozen=True, kw_only=True):
    max: Amount | None = None


class _Device(Record, frozen=True, kw_only=True):
    gpu_index: Count | None = None
    memory_used: _Statistics | None = None  # MiB
    memory_total: Amount | None = None  # MiB


class _Summary(Record, frozen=True, kw_only=True):
    """The memory in gpu_summary.json."""

    gpus: tuple[_Device, ...] = ()


def _places(run: RunDir, job: RunJob) -> list[tuple[str, RunDir]]:
    """Return the host and the folder of the recording of each node of a run on a cluster."""
    nodes = [(host_of(node), node.recording) for node in nodes_of(run)]
    return nodes or [(job.hosts[0] if job.hosts else "", run)]


def _listed(gpu: GpuEntry) -> GpuView:
    index = gpu.get("index")
    return GpuView(index=index, name=str(gpu.get("name") or ""), uuid=str(gpu["uuid"]), out=str(gpu.get("out") or ""))


def _recorded(
    folder: RunDir, run: RunView, now: float, age_s: Callable[[Path], float | None] | None
) -> list[dict[str, Any]]:
    """Return the newest values in a recording of a run; empty on the CPU, or if they are outdated."""
    entry = last_entry(folder.gpu_stats_multi) or {}
    at = _unix(entry.get("timestamp"))
    if at is None:
        return []
    since = now - at if age_s is None else age_s(folder.gpu_stats_multi)
    # Values from before this attempt are of an earlier one, perhaps on other GPUs.
    if since is None or since > (STALE_S if age_s is None else STALE_THERE_S):
        return []
    if run.attempt_s is not None and since > run.attempt_s:
        return []
    values = [gpu for gpu in entry.get("multi_gpu_data") or [] if isinstance(gpu, dict)]
    # A recording on the CPU lists its ranks as devices.
    return [{**gpu, "at": at} for gpu in values if not str(gpu.get("uuid")).startswith(RANKS)]


def _measured(about: GpuView, entry: Mapping[str, Any], run: str) -> GpuView:
    return replace(
        about,
        index=entry.get("gpu_index", about.index),
        name=str(entry.get("gpu_name") or about.name),
        run=run,
        at=entry["at"],
        utilization=entry.get("utilization"),
        memory_used=entry.get("memory_used"),
        memory_total=entry.get("memory_total"),
        power=entry.get("power"),
        temperature=entry.get("temperature"),
    )


def _unix(text: object) -> float | None:
    """Return the time of an entry in Unix seconds."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
