"""The records run.json, result.json and metrics.jsonl, and parts of matrix.json."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypedDict, TypeVar

from msgspec import Meta

from kmatrix.forms import VARIABLE
from kmatrix.records.decode import (
    LATEST,
    Amount,
    Count,
    Int,
    Number,
    Record,
    RunName,
    Scalar,
    UnixTime,
    decode,
    decode_lines,
    decode_optional,
    field,
)
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig

LARGEST_SEED = 2**31 - 1  # of a run
WHOLE = (  # symbols that commands read as whole numbers
    *("BUDGET_HOURS", "BUDGET_DOLLARS", "PARALLEL_JOBS", "GPUS_PER_NODE", "GPU_BUSY_MEMORY", "GPU_MONITOR_HZ"),
    *("ALERT_GPU_UTILIZATION", "ALERT_TEMPERATURE", "ALERT_TOKENS_PER_SECOND", "ALERT_LOSS", "ALERT_STALL"),
    "ALERT_HOLD",
)
MOST_SEEDS = 100  # that a verdict looks at: the range of MATRIX_SEEDS_MAX


class Status(StrEnum):
    """The status of a run, of which `kmatrix.status.fold` has the one rule."""

    PLANNED = "planned"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    SKIPPED = "skipped"


class Tracking(Record, frozen=True, kw_only=True):
    """The field `tracking` of run.json."""

    trackers: tuple[str, ...] = ()  # wandb, trackio, tensorboard
    project: str = ""  # empty: not set
    limit_s: Amount | None = None  # s after the end of a run; None: not set


class Provenance(TypedDict, total=False):
    """The code, the software and the machine of a run."""

    created: UnixTime
    command: str
    host: str
    git_commit: str | None  # None outside a git repository
    git_dirty: bool | None
    code: str  # SHA-256 of the trainer's sources
    python: str
    executable: str
    versions: dict[str, str]  # package -> version
    environment: dict[str, str]  # variables that may change a result
    driver: dict[str, str | None] | None  # version, and newest CUDA version that it supports
    gpus: list[dict[str, Any]]  # index, name and uuid of those that runs may use
    kernel: str
    cpu: str
    cores: Count


class RunFile(Record, frozen=True, kw_only=True):
    """run.json: what was planned for a run, and where. None or empty: missing."""

    run_id: str | None = None
    name: RunName | None = None
    matrix: str | None = None
    axes: dict[str, str] = field(default_factory=dict)  # label -> value
    symbols: dict[str, str] = field(default_factory=dict)  # effective Kconfig values, as text
    asked: frozenset[str] = frozenset()  # symbols that the user set
    train: TrainConfig = field(default_factory=TrainConfig)
    tracking: Tracking = field(default_factory=Tracking)
    timeout_s: Amount = 0.0  # of an attempt; 0: no limit
    recorded_environment: dict[str, str] = field(name="environment", default_factory=dict)  # of the trainer
    train_tokens: Count | None = None  # in the training shards
    expected_s: Amount | None = None  # estimate of the plan
    selected: bool = False  # the rules in matrix.json decide from losses whether it is executed
    reused_from: str | None = None  # <matrix>/<run> that trained this run; None if it was trained here
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        for name in WHOLE:
            try:
                int(self.symbols.get(name) or 0)  # "": the symbol is not visible
            except ValueError:
                raise ValueError(f"symbols: {name}: expected a number") from None

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the trainer: only those that TRAINER_ENV may have, as the file may be anybody's."""
        return {name: text for name, text in self.recorded_environment.items() if VARIABLE.fullmatch(f"{name}={text}")}


class Adjustment(Record, frozen=True, kw_only=True):
    """A training field that the trainer changed."""

    name: str = field(name="field")
    asked: Scalar = field(name="from", default=None)
    used: Scalar = field(name="to", default=None)
    why: str = ""


class UsedGpu(Record, frozen=True, kw_only=True):
    """The GPU of a rank in result.json."""

    name: str = ""
    uuid: str = ""


class ExcludedCells(Record, frozen=True):
    """Cells of the matrix that were excluded for the same reason."""

    count: Count = 0
    reason: str = ""


class AxisEntry(Record, frozen=True, kw_only=True):
    """An axis in matrix.json."""

    label: str
    symbol: str = ""
    values: tuple[str, ...] = ()


class VerdictRules(Record, frozen=True, kw_only=True):
    """How the losses of a matrix are compared, fixed before its first run. The ranges are those of the symbols."""

    seeds_auto: bool = False  # further seeds run only where the verdict is open
    # Of seeds_auto, in the order in which they run. Each is a look at the losses, which the error counts.
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0, le=LARGEST_SEED)], ...], Meta(max_length=MOST_SEEDS)] = ()
    seeds_min: Annotated[int, Meta(ge=2, le=MOST_SEEDS)] = 3  # of every configuration
    confidence: Annotated[float, Meta(ge=0.5, le=0.9999)] = 0.95  # of all comparisons of a ranking together
    min_difference: Amount | None = None  # nats/token
    baseline: dict[str, str] = field(default_factory=dict)  # axis label -> value; empty: all pairs
    target_loss: Amount | None = None  # nats/token


class RunNumbers(Record, frozen=True, kw_only=True):
    """What a run measured: part of result.json, and of each run of results.json. None: unknown.

    A number that the trainer adds here appears in result.json, results.json with its schema, results.csv and the page.
    """

    run_id: Annotated[str | None, Meta(description="hash of what was asked of the run")] = None
    attempt: Annotated[Count | None, Meta(description="that the numbers are of, from 1")] = None
    kind: Annotated[str | None, Meta(description="failure or stop in one word")] = None
    reason: Annotated[str | None, Meta(description="of a failure or stop, one line")] = None
    ended_by: Annotated[str | None, Meta(description="max_iters, time, cost or early_stopping")] = None
    ended: Annotated[UnixTime | None, Meta(description="end of its training, Unix s")] = None
    step: Annotated[Count | None, Meta(description="optimizer steps done")] = None
    tokens: Annotated[Count | None, Meta(description="trained on, all ranks")] = None
    seconds: Annotated[Amount | None, Meta(description="training time of all attempts, s")] = None
    initial_val_loss: Annotated[Number | None, Meta(description="validation loss at step 0, nats/token")] = None
    final_val_loss: Annotated[Number | None, Meta(description="validation loss at the last step, nats/token")] = None
    best_val_loss: Annotated[Number | None, Meta(description="lowest validation loss, nats/token")] = None
    best_val_step: Annotated[Count | None, Meta(description="step of the lowest validation loss")] = None
    final_train_loss: Annotated[Number | None, Meta(description="training loss at the last step, nats/token")] = None
    final_bits_per_byte: Annotated[Amount | None, Meta(description="bits per byte at the final loss")] = None
    best_bits_per_byte: Annotated[Amount | None, Meta(description="bits per byte at the best loss")] = None
    hellaswag_accuracy: Annotated[Amount | None, Meta(description="HellaSwag, 0 to 1")] = None
    hellaswag_accuracy_norm: Annotated[Amount | None, Meta(description="HellaSwag, normalized, 0 to 1")] = None
    core_metric: Annotated[Number | None, Meta(description="CORE; 0: guessing, 1: all correct")] = None
    core_standard_error: Annotated[Amount | None, Meta(description="CORE, standard error")] = None
    tokens_per_second: Annotated[Amount | None, Meta(description="steady state of the last attempt")] = None
    mfu: Annotated[Amount | None, Meta(description="model FLOPs utilization, 0 to 1")] = None
    step_ms: Annotated[Amount | None, Meta(description="time per step, median, ms")] = None
    peak_memory_mib: Annotated[Amount | None, Meta(description="peak memory, maximum over ranks, MiB")] = None
    optimizer_state_mib: Annotated[Amount | None, Meta(description="optimizer state of rank 0, MiB")] = None
    params: Annotated[Count | None, Meta(description="parameters of the model")] = None
    sparsity: Annotated[Amount | None, Meta(description="zeros in the pruned matrices, 0 to 1")] = None
    world_size: Annotated[Count | None, Meta(description="ranks")] = None
    device_name: Annotated[str | None, Meta(description="GPU or CPU of rank 0")] = None


class RunResult(RunNumbers, frozen=True, kw_only=True):
    """result.json: the numbers that the trainer writes when an attempt ends. None: missing."""

    status: str | None = None  # finished, failed or stopped
    device: str | None = None  # "cuda" or "cpu"
    used: dict[str, Scalar] = field(default_factory=dict)  # the training fields that were used
    adjusted: tuple[Adjustment, ...] = ()  # how they differ from run.json, and why
    devices: tuple[str, ...] = ()  # names, one per rank
    hosts: tuple[str, ...] = ()  # one per rank
    gpus: tuple[UsedGpu, ...] = ()  # one per rank, empty on the CPU


MetricValues = dict[str, Number | Int | bool | None]  # a line of metrics.jsonl


class MetricLine(Record, frozen=True, kw_only=True):
    """A line of metrics.jsonl, or all lines of a step merged."""

    step: Count  # optimizer steps done
    time: UnixTime | None = None
    resumed: bool = False  # no metrics: an attempt continues from this step, which voids the lines of later steps
    # Numbers stay as they are: trackers and reports show a count of tokens without a decimal point.
    values: dict[str, float | int | None] = field(default_factory=dict)  # metric -> value; None: not finite

    @property
    def attempt(self) -> int:
        """The number of the attempt that wrote the line."""
        return int(self.values.get("attempt") or 1)

    def merged(self, later: MetricLine) -> MetricLine:
        """Return this line with the time and the values of a later line of the same step."""
        return MetricLine(
            step=self.step, time=self.time if later.time is None else later.time, values={**self.values, **later.values}
        )


def metric_line_of(values: MetricValues) -> MetricLine | None:
    """Return the decoded values of a line as a line of metrics, or None without a step. Changes `values`."""
    step, time, resumed, _ = map(values.pop, ("step", "time", "resumed", "schema"), (None,) * 4)
    if type(step) is not int or step < 0:  # not isinstance: True is an int
        return None
    known = type(time) in (int, float) and 0 <= time <= LATEST  # type: ignore[operator]
    return MetricLine(step=step, time=time if known else None, resumed=resumed is True, values=values)


def read_run_file(run_dir: RunDir) -> RunFile:
    """Return run.json. Raises RecordError."""
    return decode(run_dir.run_json, RunFile)


def read_run_file_or_empty(run_dir: RunDir) -> RunFile:
    """Return run.json, without values if it is missing or damaged."""
    return decode_optional(run_dir.run_json, RunFile) or RunFile()


class Line(Protocol):
    """A line of metrics.jsonl, with all of its values or some."""

    @property
    def step(self) -> int: ...
    @property
    def resumed(self) -> bool: ...
    @property
    def attempt(self) -> int: ...
    def merged(self, later: Self) -> Self: ...


L = TypeVar("L", bound=Line)


def merged_metrics(path: Path) -> list[MetricLine]:
    """Return `merged_lines` of metrics.jsonl."""
    return merged_lines(filter(None, map(metric_line_of, decode_lines(path, MetricValues))))


def merged_lines(lines: Iterable[L]) -> list[L]:
    """Return one line per step, merged from its lines; the last attempt at a step counts.

    A line with "resumed" starts an attempt at its step, and invalidates earlier lines of later steps.
    """
    steps: dict[int, L] = {}
    for line in lines:
        known = steps.get(line.step)
        if line.resumed:
            steps = {step: kept for step, kept in steps.items() if step <= line.step}
        elif known is None:
            steps[line.step] = line
        # A line of an earlier attempt must not replace one of the attempt that trained the final weights.
        elif line.attempt >= known.attempt:
            steps[line.step] = known.merged(line)
    return [steps[step] for step in sorted(steps)]
