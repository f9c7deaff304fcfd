"""The GPUs of the box now: which run has each, what it does there, and which are left out. From files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from kmatrix.gpu.formats.live import last_entry
from kmatrix.launch.views import GpuView, RunView
from kmatrix.records import MatrixDir, Status

RANKS = "cpu-"  # what the recorder calls the ranks of a run on the CPU begins so
STALE_S = 30.0  # a recording is written each second; what is older says nothing of now


def gpus_now(
    matrix: MatrixDir, known: Sequence[Mapping[str, Any]], runs: Sequence[RunView], now: float
) -> list[GpuView]:
    """Return the GPUs of a matrix that runs, or of none.

    known: index, name and uuid of those that its runs may get, and why one is left out, as the runner wrote them.
    Those of a recording that are not among them (simulated ones) stand behind them.
    """
    found = {str(gpu["uuid"]): _listed(gpu) for gpu in known if gpu.get("uuid")}
    for run in runs:
        if run.status is not Status.RUNNING:
            continue
        for uuid in run.gpus:
            found[uuid] = replace(found.get(uuid, GpuView(index=None, name="", uuid=uuid)), run=run.name)
        for entry in _recorded(matrix, run, now):
            uuid = str(entry.get("uuid") or f"GPU {entry.get('gpu_index')}")
            about = found.get(uuid, GpuView(index=entry.get("gpu_index"), name="", uuid=uuid))
            found[uuid] = _measured(about, entry, run.name)
    return sorted(found.values(), key=lambda gpu: (gpu.index is None, gpu.index or 0))


def _listed(gpu: Mapping[str, Any]) -> GpuView:
    index = gpu.get("index")
    return GpuView(index=index, name=str(gpu.get("name") or ""), uuid=str(gpu["uuid"]), out=str(gpu.get("out") or ""))


def _recorded(matrix: MatrixDir, run: RunView, now: float) -> list[dict[str, Any]]:
    """Return the newest values of the GPUs of a run; nothing on the CPU, or where they are old."""
    entry = last_entry(matrix.run(run.name).gpu_stats_multi) or {}
    at = _moment(entry.get("timestamp"))
    if at is None or now - at > STALE_S or (run.attempt_s is not None and at < now - run.attempt_s):
        return []
    values = [gpu for gpu in entry.get("multi_gpu_data") or [] if isinstance(gpu, dict)]
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


def _moment(text: object) -> float | None:
    """Unix seconds of the time of an entry."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
