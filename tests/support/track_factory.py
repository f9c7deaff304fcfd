"""Make run directories as a trainer and a recorder write them, and a tracker in memory, for tests of trackers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from kmatrix.gpu.formats.json_array import JsonArrayFile
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, End
from kmatrix.records.decode import as_json
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import RunDir
from kmatrix.track.tracker import StoredRun

START_TIME = 1767225600.0  # Unix seconds
MATRIX = "test_matrix_results_20260101_000000"


def make_run_dir(
    results: Path, name: str = "gpt2_adamw_2gpu", *, trackers: tuple[str, ...] = ("tensorboard",)
) -> RunDir:
    """Make the directory of a run that has not started."""
    run = RunDir(results / MATRIX / name)
    run.path.mkdir(parents=True)
    record = {"run_id": "0123456789ab", "name": name, "matrix": MATRIX, "axes": {"optimizer": "adamw", "seed": "1"}}
    record |= {"symbols": {"GPT2_MAX_ITERS": "500", "GPT2_OPTIMIZER": "adamw"}, "train": {}}
    write_json(run.run_json, record | {"tracking": {"trackers": list(trackers), "project": "gpt2-1a2b3"}})
    return run


def append_metrics(run: RunDir, step: int, **values: object) -> None:
    """Append a line of metrics. values: keys with `__` instead of `/`."""
    named = {key.replace("__", "/"): value for key, value in values.items()}
    append_jsonl(run.metrics, {"step": step, "time": START_TIME + step, "attempt": 1, **named})


def loss(step: int) -> float:
    return 6.0 - step / 100


def write_training(run: RunDir, steps: range, *, attempt: int = 1, off: float = 0.0) -> None:
    """Write the metrics of these steps as a trainer does. off: nats added to the losses of this attempt."""
    for step in steps:
        if step % 10 == 0:
            append_metrics(run, step, attempt=attempt, val__loss=loss(step) + 0.1, tokens=100 * step)
        append_metrics(run, step, attempt=attempt, train__loss=loss(step) + off, train__lr=1e-3, tokens=100 * step)


def append_resume(run: RunDir, step: int, *, attempt: int = 2) -> None:
    append_metrics(run, step, attempt=attempt, resumed=True)


def write_recording(run: RunDir, seconds: range, *, gpus: int = 2) -> None:
    """Write the GPU samples of these seconds as a recorder does."""
    array = JsonArrayFile(run.gpu_stats_multi)
    for second in seconds:
        devices = [
            {
                "gpu_index": index,
                "gpu_name": "A10G",
                "utilization": 90.0,
                "memory_used": 1000.0 + 100 * index,
                "power": None,
            }
            for index in range(gpus)
        ]
        stamp = datetime.fromtimestamp(START_TIME + second, UTC).isoformat()
        total = {"total_memory_used": 1000.0 * gpus, "average_utilization": 90.0}
        array.append({"timestamp": stamp, "multi_gpu_data": devices, "aggregate_stats": total})
    array.close()


def write_end(
    run: RunDir, kind: str = "finished", *, attempt: int = 1, at: float = START_TIME, reason: str = ""
) -> None:
    """Write how an attempt ended, as the program of the run does; "" for one that trains."""
    end = End(kind=kind, reason=reason, at=at) if kind else None
    made = Attempt(number=attempt, host="n1", started=START_TIME, end=end)
    write_json(attempts.path_of(run.path, attempt), as_json(made))


def write_nodes(run: RunDir, hosts: tuple[str, ...], *, attempt: int = 1) -> None:
    """Write an attempt on these nodes, as its programs do before its first line of metrics."""
    made = Attempt(number=attempt, host=hosts[0], nodes=len(hosts), started=START_TIME)
    write_json(attempts.path_of(run.path, attempt), as_json(made))
    for node, host in enumerate(hosts[1:], 1):
        write_json(run.path / "nodes" / f"{node}.json", {"host": host, "attempt": attempt})


def expected_values(run: RunDir) -> dict[int, dict[str, float]]:
    """Return the values that a tracker must have stored: step -> each key with a number."""
    found: dict[int, dict[str, float]] = {}
    for text in run.metrics.read_text().splitlines():
        value = json.loads(text)
        if not value.get("resumed"):
            numbers = {k: v for k, v in value.items() if k not in ("schema", "step", "time") and v is not None}
            found.setdefault(value["step"], {}).update(numbers)
    return found


class MemoryTracker:
    """A tracker with the real signatures that stores everything in memory.

    refuse: exceptions that the next calls of open raise, one per call.  hang: called in each call of points.
    """

    name = "memory"

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, dict[str, float]]] = []
        self.gpus: list[tuple[float, dict[str, float]]] = []
        self.alerts: list[tuple[str, str]] = []
        self.configs: list[tuple[int, dict[str, str]]] = []  # number of rows before, and values
        self.closed: list[str] = []
        self.opened = 0
        self.refuse: list[Exception] = []
        self.hang = lambda: None

    def open(self, run):
        self.opened += 1
        if self.refuse:
            raise self.refuse.pop(0)
        return StoredRun(
            steps=self.steps(),
            devices_time=max((time for time, _ in self.gpus), default=0.0),
            alerts=len(self.alerts),
            link="memory://run",
        )

    def configure(self, values):
        self.configs.append((len(self.rows), dict(values)))

    def points(self, points):
        self.hang()
        self.rows += [(point.step, point.time, dict(point.values)) for point in points]

    def devices(self, devices):
        self.gpus += [(device.time, dict(device.values)) for device in devices]

    def alert(self, alert):
        self.alerts.append((alert.title, alert.text))

    def close(self, status):
        self.closed.append(str(status))

    def steps(self) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for step, _, values in self.rows:
            found.setdefault(step, {}).update(values)
        return found

    def sent_twice(self) -> list[tuple[int, str]]:
        """Return each key of a step that was sent more than once."""
        keys = [(step, key) for step, _, values in self.rows for key in values]
        return [key for key in set(keys) if keys.count(key) > 1]
