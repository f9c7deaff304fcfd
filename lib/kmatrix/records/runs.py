"""The values of matrix.json, run.json, result.json and metrics.jsonl: parsed once, and typed everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict, cast

from kmatrix.records.files import finite, read_json, read_jsonl, read_or_empty
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.train_config import TrainFields, as_recorded, field_types, read_fields, with_added

LOST = "its runner died"  # the reason of a run that says "running" and has no runner


class Status(StrEnum):
    """The status of a run or of a matrix; `kmatrix.status.status_file` determines that of a run."""

    PLANNED = "planned"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    SKIPPED = "skipped"


NOT_METRICS = frozenset({"schema", "step", "time", "resumed"})  # keys of a line of metrics.jsonl
Scalar = str | int | float | bool | None  # a value of run.json's "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """The field `tracking` of run.json."""

    trackers: tuple[str, ...] = ()  # wandb, trackio, tensorboard
    project: str = ""  # empty: not set
    limit_s: float | None = None  # s after the end of a run; None: not set

    @classmethod
    def from_json(cls, value: object) -> Tracking:
        """Return the tracking settings in a run.json; files of old versions have none."""
        if not isinstance(value, dict):
            return cls()
        return cls(
            trackers=_strings(value.get("trackers")),
            project=str(value.get("project") or ""),
            limit_s=finite(value.get("limit_s")),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value, empty without trackers."""
        if not self.trackers:
            return {}
        return {"trackers": list(self.trackers), "project": self.project, "limit_s": self.limit_s}


class GpuEntry(TypedDict, total=False):
    """A GPU that runs may use, in the provenance and in status.json of a matrix."""

    index: int
    name: str
    uuid: str
    out: str | None  # why no run may use it now; status.json only


class Driver(TypedDict):
    """The NVIDIA driver of a machine."""

    version: str | None
    cuda: str | None  # newest CUDA version that it supports


class Provenance(TypedDict, total=False):
    """The code, the software and the machine of a run, as run.json and matrix.json record them: docs/formats.md."""

    created: float  # Unix seconds
    command: str
    host: str
    git_commit: str | None  # None outside a git repository
    git_dirty: bool | None
    patch: str | None  # file with the uncommitted changes
    no_patch: str | None  # why there is none although there are changes
    untracked: list[str]  # source files in neither the commit nor the patch
    code: str  # SHA-256 of the trainer's sources
    files: dict[str, str]  # source of the trainer -> first 16 digits of its SHA-256; matrix.json only
    python: str
    executable: str
    versions: dict[str, str]  # package -> version
    environment: dict[str, str]  # variables that may change a result
    driver: Driver | None
    gpus: list[GpuEntry]
    kernel: str
    cpu: str
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """The values of run.json: what was planned for a run, and where. None or empty: missing, or of another type.

    An entry of `runs` in matrix.json is a RunFile with a name, an id and axes only.
    """

    run_id: str | None = None
    name: str | None = None
    matrix: str | None = None
    axes: Mapping[str, str] = field(default_factory=dict)  # label -> value
    symbols: Mapping[str, str] = field(default_factory=dict)  # effective Kconfig values, as text
    asked: frozenset[str] | None = None  # symbols that the user set; None: not recorded
    train: TrainFields = field(default_factory=TrainFields)
    train_values: Mapping[str, Scalar] = field(default_factory=dict)  # all of "train", also fields of other versions
    tracking: Tracking = field(default_factory=Tracking)
    timeout_s: float = 0.0  # 0: no limit
    train_tokens: int | None = None  # in the training shards
    expected_s: float | None = None  # estimate of the plan
    reused_from: str = ""  # <matrix>/<run> that trained this run; "" if it was trained here
    provenance: Provenance = field(default_factory=Provenance)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunFile:
        """Return the values of a run.json. Unknown keys are ignored."""
        asked, train = values.get("asked"), values.get("train")
        return cls(
            run_id=_text(values.get("run_id")),
            name=_text(values.get("name")),
            matrix=_text(values.get("matrix")),
            axes=_texts(values.get("axes")),
            symbols=_texts(values.get("symbols")),
            asked=frozenset(_strings(asked)) if isinstance(asked, list) else None,
            train=read_fields(values),
            train_values=with_added(train) if isinstance(train, dict) else {},
            tracking=Tracking.from_json(values.get("tracking")),
            timeout_s=finite(values.get("timeout_s")) or 0.0,
            train_tokens=as_recorded(values.get("train_tokens"), (int,)),
            expected_s=finite(values.get("expected_s")),
            reused_from=str(values.get("reused_from") or ""),
            provenance=_provenance(values),
        )


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A training field that the trainer changed."""

    field: str
    asked: Scalar
    used: Scalar
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFile:
    """The values of run_used.json: the training fields that the trainer used, and how they differ from run.json."""

    train_values: Mapping[str, Scalar] = field(default_factory=dict)  # "train"
    adjusted: tuple[Adjustment, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> UsedFile:
        """Return the values of a run_used.json. Unknown keys are ignored."""
        train = values.get("train")
        return cls(
            train_values=with_added(train) if isinstance(train, dict) else {},
            adjusted=tuple(
                Adjustment(str(entry.get("field")), entry.get("from"), entry.get("to"), str(entry.get("why")))
                for entry in _objects(values.get("adjusted"))
            ),
        )


@dataclass(frozen=True, slots=True)
class ExcludedCells:
    """Cells of the matrix that were excluded for the same reason."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFile:
    """The values of matrix.json: the plan of a matrix. None or empty: missing."""

    name: str | None = None
    created: float | None = None  # Unix seconds
    command: str = ""
    overrides: tuple[str, ...] = ()  # NAME=value, as typed
    equal: str = ""  # the budget that all runs share, as text
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # label -> values, in order
    excluded: tuple[ExcludedCells, ...] = ()
    runs: tuple[RunFile, ...] = ()  # name, id and axes of each, in order
    provenance: Provenance = field(default_factory=Provenance)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MatrixFile:
        """Return the values of a matrix.json. Unknown keys are ignored."""
        return cls(
            name=_text(values.get("name")),
            created=finite(values.get("created")),
            command=str(values.get("command") or ""),
            overrides=_strings(values.get("overrides")),
            equal=str(values.get("equal") or ""),
            axes={str(axis.get("label")): _strings(axis.get("values")) for axis in _objects(values.get("axes"))},
            excluded=tuple(
                ExcludedCells(int(finite(cut.get("count")) or 0), str(cut.get("reason") or ""))
                for cut in _objects(values.get("cuts"))
            ),
            runs=tuple(RunFile.from_json(run) for run in _objects(values.get("runs"))),
            provenance=_provenance(values),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The numbers that the trainer writes to result.json when an attempt ends. None: missing, or of another type.

    A result.json may come from another version, or be damaged: readers must not assume that any value is present.
    """

    run_id: str | None = None
    attempt: int | None = None
    status: str | None = None
    kind: str | None = None  # failure or stop in one word
    reason: str | None = None
    ended_by: str | None = None  # max_iters, time, cost or early_stopping
    ended: float | None = None  # Unix seconds
    step: int | None = None  # optimizer steps done
    tokens: int | None = None  # trained on, all ranks
    seconds: float | None = None  # training time of all attempts
    initial_val_loss: float | None = None  # nats/token
    final_val_loss: float | None = None  # nats/token
    best_val_loss: float | None = None  # nats/token
    best_val_step: int | None = None
    final_train_loss: float | None = None  # nats/token
    bytes_per_token: float | None = None  # UTF-8 bytes of text per validation target
    hellaswag_accuracy: float | None = None  # 0 to 1
    hellaswag_accuracy_norm: float | None = None  # 0 to 1
    tokens_per_second: float | None = None
    mfu: float | None = None  # 0 to 1
    step_ms: float | None = None
    peak_memory_mib: float | None = None  # maximum over ranks
    params: int | None = None
    sparsity: float | None = None  # 0 to 1
    world_size: int | None = None  # ranks
    device: str | None = None  # "cuda" or "cpu"
    device_name: str | None = None

    @property
    def attempt_number(self) -> int:
        """The number of the attempt, which the first versions did not write."""
        return 1 if self.attempt is None else self.attempt

    def belongs_to(self, run_id: str | None, attempt: int) -> bool:
        """Return whether this attempt of the run wrote the result."""
        # Two missing ids are not the same id.
        return self.run_id is not None and self.run_id == run_id and self.attempt_number == attempt

    def or_else(self, other: RunResult) -> RunResult:
        """Return the result with the values of another one for those that are missing here."""
        missing = [one.name for one in fields(self) if getattr(self, one.name) is None]
        return replace(self, **{name: getattr(other, name) for name in missing})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunResult:
        """Return the result in a JSON object. Unknown keys are ignored."""
        return cls(**{name: as_recorded(values.get(name), types) for name, types in field_types(RunResult)})


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLine:
    """A line of metrics.jsonl, or all lines of a step merged."""

    step: int  # optimizer steps done
    time: float | None = None  # Unix seconds
    resumed: bool = False  # no metrics: an attempt continues from this step, which voids the lines of later steps
    values: Mapping[str, float | None] = field(default_factory=dict)  # metric -> value; None: not finite

    @property
    def attempt(self) -> int:
        """The number of the attempt that wrote the line."""
        return int(self.values.get("attempt") or 1)

    def merged(self, later: MetricLine) -> MetricLine:
        """Return this line with the time and the values of a later line of the same step."""
        return MetricLine(
            step=self.step,
            time=self.time if later.time is None else later.time,
            values={**self.values, **later.values},
        )

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> MetricLine | None:
        """Return a line of metrics.jsonl, or None if it has no step."""
        step = line.get("step")
        if not isinstance(step, int):
            return None
        # Numbers stay as they are: trackers and reports show a count of tokens without a decimal point.
        values = {
            key: None if finite(value) is None else value for key, value in line.items() if key not in NOT_METRICS
        }
        return cls(step=step, time=finite(line.get("time")), resumed=bool(line.get("resumed")), values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The files of one run."""

    dir: RunDir
    run: RunFile
    result: RunResult | None  # of any attempt, None without a result.json
    metrics: tuple[MetricLine, ...] = ()  # one per step, in order of steps


def read_run(run_dir: RunDir) -> RunRecord:
    """Read one run, finished or not. Raises RecordError if run.json or result.json is damaged."""
    return RunRecord(
        dir=run_dir,
        run=read_run_file(run_dir),
        result=RunResult.from_json(read_json(run_dir.result)) if run_dir.result.exists() else None,
        metrics=tuple(merged_metrics(run_dir.metrics)),
    )


def read_matrix_file_or_empty(matrix: MatrixDir) -> MatrixFile:
    """Return matrix.json, without values if it is missing or unreadable. Raises SchemaError if it is too new."""
    return MatrixFile.from_json(read_or_empty(matrix.matrix_json))


def read_run_file(run_dir: RunDir) -> RunFile:
    """Return run.json. Raises RecordError if it is missing or damaged, SchemaError if it is too new."""
    return RunFile.from_json(read_json(run_dir.run_json))


def read_run_file_or_empty(run_dir: RunDir) -> RunFile:
    """Return run.json, without values if it is missing or unreadable. Raises SchemaError if it is too new."""
    return RunFile.from_json(read_or_empty(run_dir.run_json))


def read_used_file(run_dir: RunDir) -> UsedFile:
    """Return run_used.json. Raises RecordError if it is missing or damaged, SchemaError if it is too new."""
    return UsedFile.from_json(read_json(run_dir.run_used))


def read_used_file_or_empty(run_dir: RunDir) -> UsedFile:
    """Return run_used.json, without values if it is missing or unreadable. Raises SchemaError if it is too new."""
    return UsedFile.from_json(read_or_empty(run_dir.run_used))


def read_result(run_dir: RunDir) -> RunResult | None:
    """Return result.json, or None if it is missing or unreadable. Raises SchemaError if it is too new."""
    if not run_dir.result.exists():  # most often: the run has not ended
        return None
    values = read_or_empty(run_dir.result)
    return RunResult.from_json(values) if values else None


def merged_metrics(path: Path) -> list[MetricLine]:
    """Return one line per step, merged from its lines in the file; the last attempt at a step counts.

    A line with "resumed" starts an attempt at its step, and invalidates earlier lines of later steps.
    """
    steps: dict[int, MetricLine] = {}
    for values in read_jsonl(path):
        line = MetricLine.from_json(values)
        if line is None:
            continue
        known = steps.get(line.step)
        if line.resumed:
            steps = {step: kept for step, kept in steps.items() if step <= line.step}
        elif known is None:
            steps[line.step] = line
        # A line of an earlier attempt must not replace one of the attempt that trained the final weights.
        elif line.attempt >= known.attempt:
            steps[line.step] = known.merged(line)
    return [steps[step] for step in sorted(steps)]


def _provenance(values: Mapping[str, Any]) -> Provenance:
    # Not checked key by key: readers use `get`, and results.json contains it as it was written.
    found = values.get("provenance")
    return cast(Provenance, found) if isinstance(found, dict) else {}


def _text(value: object) -> str | None:
    return str(value) if value else None


def _strings(value: object) -> tuple[str, ...]:
    """Return a JSON array of texts."""
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _objects(value: object) -> list[dict[str, Any]]:
    """Return the objects in a JSON array."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _texts(value: object) -> dict[str, str]:
    """Return a JSON object of texts; null values are omitted."""
    items = value.items() if isinstance(value, dict) else ()
    return {str(name): str(text) for name, text in items if text is not None}
