"""Every file of a matrix and of a run: its name, and what the files of a run say together."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.records.files import (
    SCHEMA,
    append_jsonl,
    end_torn_line,
    read_json,
    read_jsonl,
    write_bytes,
    write_json,
    write_json_array,
    write_text,
)

__all__ = [
    "LOST",
    "MATRIX_PREFIX",
    "SCHEMA",
    "MatrixDir",
    "RunDir",
    "RunRecord",
    "Status",
    "append_jsonl",
    "end_torn_line",
    "matrix_dirs",
    "merged_metrics",
    "read_json",
    "read_jsonl",
    "read_run",
    "write_bytes",
    "write_json",
    "write_json_array",
    "write_text",
]

LOST = "its runner died"  # the reason of a run that says "running" and has no runner
MATRIX_PREFIX = "test_matrix_results_"


class Status(StrEnum):
    """Where a run stands."""

    PLANNED = "planned"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run, and the name of every file in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        return self.path / ".config"

    @property
    def defconfig(self) -> Path:
        return self.path / "defconfig"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def output_log(self) -> Path:
        return self.path / "output.log"

    @property
    def run_used(self) -> Path:
        return self.path / "run_used.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def samples(self) -> Path:
        """Texts that the model wrote at intervals: step, prompt, text, seed, tokens."""
        return self.path / "samples.jsonl"

    @property
    def phases(self) -> Path:
        """When the run did not train: a line for each stretch, with phase, step, begin and end (Unix seconds)."""
        return self.path / "phases.jsonl"

    @property
    def training_metrics(self) -> Path:
        return self.path / "training_metrics.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def track(self) -> Path:
        """What was sent to which tracker."""
        return self.path / "track.json"

    @property
    def track_log(self) -> Path:
        """What the process that feeds the trackers says, and their packages."""
        return self.path / "track.log"

    @property
    def track_lock(self) -> Path:
        """Held by the process that feeds the trackers: a run has one at a time."""
        return self.path / ".track.lock"

    def of_trackers(self) -> tuple[Path, ...]:
        """What belongs to the run's trackers: what was sent, and what W&B keeps here."""
        return (self.track, self.track_log, self.track_lock, self.path / "wandb")

    @property
    def former(self) -> Path:
        """Results that a rerun replaced, in folders 1, 2, ..."""
        return self.path / "former"

    @property
    def gpu_stats(self) -> Path:
        return self.path / f"gpu_stats_{self.name}.json"

    @property
    def gpu_stats_multi(self) -> Path:
        return self.path / f"gpu_stats_{self.name}_multi_gpu.json"

    @property
    def gpu_samples(self) -> Path:
        return self.path / "gpu_samples.bin"

    def earlier_gpu_samples(self) -> list[Path]:
        """What was recorded on other devices than those of gpu_samples.bin, the oldest first."""
        found = [path for path in self.path.glob("gpu_samples.*.bin") if path.suffixes[0][1:].isdigit()]
        return sorted(found, key=lambda path: int(path.suffixes[0][1:]))

    @property
    def gpu_events(self) -> Path:
        return self.path / "gpu_events.jsonl"

    @property
    def gpu_summary(self) -> Path:
        return self.path / "gpu_summary.json"

    def gpu_metrics(self, started: datetime, form: str) -> Path:
        """Every sample as csv, npz or parquet, written when it is asked for."""
        return self.path / f"gpu_metrics_{started:%Y%m%d_%H%M%S}.{form}"

    def rank(self, rank: int) -> Path:
        """The folder of what belongs to one rank."""
        return self.path / "ranks" / str(rank)

    def rank_errors(self) -> list[Path]:
        """What each rank that failed wrote about it, in no order."""
        return list(self.path.glob("ranks/*/error.json"))

    def timings(self, rank: int) -> Path:
        """How long one rank computed: step, steps, compute_ms, step_ms; means over the steps since the line before."""
        return self.rank(rank) / "timings.jsonl"

    def rank_state(self, rank: int) -> Path:
        """Where one rank was a second ago: attempt, pid, host, time, step, work, place, age_s, spent_s."""
        return self.rank(rank) / "state.json"

    def rank_stacks(self, rank: int, attempt: int | None = None) -> Path:
        """The stacks of one rank's threads, where it stood still: in the newest attempt, or in an earlier one."""
        return self.rank(rank) / ("stacks.txt" if attempt is None else f"stacks.{attempt}.txt")

    @property
    def profile(self) -> Path:
        """A Chrome trace of some steps of rank 0."""
        return self.path / "profile.json"

    def rank_error(self, rank: int) -> Path:
        """Why a rank other than 0 failed: rank, attempt, time, kind and reason."""
        return self.rank(rank) / "error.json"


@dataclass(frozen=True, slots=True)
class MatrixDir:
    """The folder of a matrix, and the name of every file in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def matrix_json(self) -> Path:
        return self.path / "matrix.json"

    @property
    def config(self) -> Path:
        return self.path / "config.txt"

    @property
    def patch(self) -> Path:
        """The changes of the code that no commit had when the matrix was made; absent where there were none."""
        return self.path / "code.patch"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def runner_log(self) -> Path:
        """What a runner says that has no terminal."""
        return self.path / "runner.log"

    @property
    def all_results(self) -> Path:
        return self.path / "all_results.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary_report.txt"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def graphs(self) -> Path:
        return self.path / "graphs"

    @property
    def tensorboard(self) -> Path:
        """The log directory of TensorBoard: a folder for each run."""
        return self.path / "tb"

    def is_held(self) -> bool:
        """Whether a runner has this matrix now: it holds the lock for as long as it lives, however it ends."""
        try:
            with self.lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # no lock, or a disk that cannot lock
        return False

    def run(self, name: str) -> RunDir:
        return RunDir(self.path / name)

    def runs(self) -> list[RunDir]:
        """Every folder that holds a run.json, in the matrix's order, then by name."""
        there = {path.parent.name: RunDir(path.parent) for path in self.path.glob("*/run.json")}
        order = [str(run["name"]) for run in read_json(self.matrix_json)["runs"]] if self.matrix_json.exists() else []
        names = [name for name in order if name in there] + sorted(set(there) - set(order))
        return [there[name] for name in names]


def matrix_dirs(results_dir: Path) -> list[MatrixDir]:
    """Every matrix below the folder of results, the newest last."""
    return [MatrixDir(path) for path in sorted(results_dir.glob(MATRIX_PREFIX + "*")) if path.is_dir()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the files of one run say. `metrics`: one mapping a step, the last attempt's, in order of steps."""

    dir: RunDir
    run: Mapping[str, Any]
    status: Status
    reason: str
    result: Mapping[str, Any] | None
    metrics: tuple[Mapping[str, Any], ...] = field(default=())


def read_run(run_dir: RunDir) -> RunRecord:
    """Read one run, finished or not, from its files alone.

    A run is finished when its result.json says so; status.json adds why one was skipped or lost.
    """
    run = read_json(run_dir.run_json)
    status_file = read_json(run_dir.status) if run_dir.status.exists() else {}
    result = read_json(run_dir.result) if run_dir.result.exists() else None
    status, reason = Status(status_file.get("status", Status.PLANNED)), str(status_file.get("reason") or "")
    current = result is not None and int(result.get("attempt", 1)) >= int(status_file.get("attempt", 0))
    if result is not None and current and status is not Status.FAILED:
        status, reason = Status(result["status"]), reason or str(result.get("reason") or "")
    return RunRecord(
        dir=run_dir,
        run=run,
        status=status,
        reason=reason,
        result=result,
        metrics=tuple(merged_metrics(run_dir.metrics)),
    )


def merged_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one mapping for each step: lines of a step are merged, and what the last attempt says of it counts.

    A line with "resumed" begins an attempt at its step: what was written of later steps before it is void.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(path):
        if not isinstance(line.get("step"), int):
            continue  # not a line of metrics
        step, attempt = int(line["step"]), int(line.get("attempt", 1))
        if line.get("resumed"):
            steps = {known: values for known, values in steps.items() if known <= step}
        elif attempt >= int(steps.get(step, line).get("attempt", 1)):
            steps.setdefault(step, {}).update(line)
    return [steps[step] for step in sorted(steps)]
