"""One snapshot as JSON: the layout of the recordings, with what the screen shows besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kmatrix.gpu.formats.samples import multi, rounded
from kmatrix.gpu.nvml.facts import DeviceFacts
from kmatrix.gputop.view import ProcessRow, RunLine, ScreenSample


def snapshot_entry(sample: ScreenSample, facts: Mapping[int, DeviceFacts]) -> dict[str, Any]:
    """Return a snapshot. facts: the settings of each GPU by its index, as far as they are known."""
    entry = multi(sample.snapshot)
    for gpu in entry["multi_gpu_data"]:
        index = gpu["gpu_index"]
        throttle = sample.throttle.get(index)
        gpu["throttle"] = None if throttle is None else list(throttle)
        gpu["rank"], gpu["run"] = sample.ranks.get(index), sample.runs.get(index)
        gpu.update(_settings(facts[index]) if index in facts else {})
        if sample.processes is not None:
            gpu["processes"] = [process_entry(row) for row in sample.processes if row.gpu_index == index]
    if sample.simulated:
        entry["simulated"] = True
    entry["runs"] = [_progress(run) for run in sample.progress]
    if sample.host is not None:
        host = sample.host
        entry["host"] = {
            "cpu_percent": rounded(host.cpu),
            "memory_used": rounded(host.memory_used),
            "memory_total": rounded(host.memory_total),
            "load": None if host.load is None else [rounded(one) for one in host.load],
        }
    if sample.driver:
        entry["driver"] = sample.driver_version
        entry["cuda"] = sample.cuda_version
    return entry


def process_entry(row: ProcessRow) -> dict[str, Any]:
    """Return a process. Sizes are in MiB, times in s, the rest in percent; unknown values are None."""
    return {
        "pid": row.pid,
        "user": row.user,
        "type": row.kind,
        "gpu_memory": rounded(row.memory_mib),
        "sm": rounded(row.sm),
        "memory_bandwidth": rounded(row.bandwidth),
        "cpu_percent": rounded(row.cpu),
        "host_memory": rounded(row.host_mib),
        "host_memory_percent": rounded(row.host_percent),
        "seconds": rounded(row.seconds),
        "command": row.command or None,
        "run": row.run or None,
        "rank": row.rank,
    }


def _settings(facts: DeviceFacts) -> dict[str, Any]:
    return {
        "bus_id": facts.bus_id,
        "persistence_mode": facts.persistence,
        "display_active": facts.display,
        "compute_mode": facts.compute_mode,
    }


def _progress(run: RunLine) -> dict[str, Any]:
    return {
        "name": run.name,
        "step": run.step,
        "max_iters": run.max_iters,
        "loss": rounded(run.loss),
        "tokens_per_second": rounded(run.tokens_per_second),
        "mfu_percent": rounded(run.mfu),
        "seconds_left": rounded(run.left_s),
        "kwh": rounded(run.kwh),
    }
