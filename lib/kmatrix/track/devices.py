"""A recording that grows -> what trackers are told of the GPUs (on the CPU: of the ranks)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kmatrix.stats import coefficient_of_variation
from kmatrix.track.tail import ArrayTail, is_number
from kmatrix.track.values import Devices

NO_METRIC = frozenset({"gpu_index"})
FINE_S, COARSE_S = 600.0, 10.0  # of a longer run, ten seconds become one: a day is 86,400 samples of each GPU
MOST = 2000  # that are handed over at a time


class DevicesTail:
    """What gpu_stats_<run>_multi_gpu.json says, from its beginning: every sample for ten minutes, then means of 10 s.

    The same file gives the same values at the same times, however often and in whatever parts it is read.
    """

    def __init__(self, path: Path) -> None:
        self._tail = ArrayTail(path)
        self._first: float | None = None
        self._window: list[Devices] = []
        self._ready: list[Devices] = []

    def read(self, *, until: float = math.inf) -> list[Devices]:
        """Return what is new up to a time (Unix seconds), at most MOST."""
        while len(self._ready) < MOST and (not self._ready or self._ready[-1].time < until):
            entries = self._tail.read()
            if not entries:
                break
            for entry in entries:
                self._take(_devices(entry))
        count = 0
        while count < min(len(self._ready), MOST) and self._ready[count].time <= until:
            count += 1
        found, self._ready = self._ready[:count], self._ready[count:]
        return found

    def _take(self, devices: Devices | None) -> None:
        if devices is None:
            return
        self._first = devices.time if self._first is None else self._first
        if devices.time - self._first < FINE_S:
            self._ready.append(devices)
            return
        if self._window and self._slice(self._window[0]) != self._slice(devices):
            self._ready.append(Devices(time=self._window[-1].time, values=means(self._window)))
            self._window = []
        self._window.append(devices)

    def _slice(self, devices: Devices) -> int:
        """The number of the ten seconds in which a moment lies."""
        return int((devices.time - (self._first or 0.0)) // COARSE_S)


def means(devices: Sequence[Devices]) -> dict[str, float]:
    """Return the mean of each value over the moments at which it is known."""
    found: dict[str, list[float]] = {}
    for moment in devices:
        for name, value in moment.values.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def _devices(entry: Mapping[str, Any]) -> Devices | None:
    """Return one entry of a recording of several GPUs; None for one without a time or a value."""
    gpus = [gpu for gpu in entry.get("multi_gpu_data") or [] if isinstance(gpu, dict) and "gpu_index" in gpu]
    try:
        time = datetime.fromisoformat(entry["timestamp"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None
    values = {f"gpu/{gpu['gpu_index']}/{name}": value for gpu in gpus for name, value in _numbers(gpu)}
    values |= _of_all(gpus, entry.get("aggregate_stats") or {})
    return Devices(time=time, values=values) if values else None


def _of_all(gpus: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> dict[str, float]:
    """Return the keys that the original project gave W&B, as far as they are known."""
    memory = {gpu["gpu_index"]: gpu["memory_used"] for gpu in gpus if is_number(gpu.get("memory_used"))}
    values: dict[str, float] = {f"gpu_{index}_memory": used for index, used in memory.items()}
    for key, name in (("gpu_total_memory", "total_memory_used"), ("gpu_avg_utilization", "average_utilization")):
        if is_number(total.get(name)):
            values[key] = total[name]
    if len(memory) > 1:
        values["gpu_load_balance_cv"] = coefficient_of_variation(list(memory.values()))
    return values


def _numbers(gpu: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    return ((name, value) for name, value in gpu.items() if name not in NO_METRIC and is_number(value))
