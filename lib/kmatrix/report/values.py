"""The numbers of a matrix as values: what the analysis returns and every report reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.alerts import Alert
from kmatrix.records import Status
from kmatrix.report.gpu_values import GpuNumbers
from kmatrix.stats import Interval, Verdict, Word, bits_per_byte, mean, mean_interval, sample_deviation

SEED_AXIS = "seed"
GPUS_AXIS = "gpus"
LOSS, BITS = "final_val_loss", "bits_per_byte"  # what runs are ranked by


def perplexity(loss: float | None) -> float | None:
    """Return e to the loss, or None where that is unknown or too large for a float."""
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return None


@dataclass(frozen=True, slots=True)
class Point:
    """One measured loss. tokens: seen by the weights until then. seconds: since the run began."""

    step: int
    tokens: float | None
    seconds: float | None
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """One run. None is unknown.

    final_val_loss: of a run that is not finished, the last that was measured; last_val_step says where.
    steps: updates done.  tokens: seen in training.  seconds: of the whole training.  step_ms: median.
    text: what was read, whatever its tokens; "" where that cannot be told.
    bytes_per_token: of text, of the validation targets.  hellaswag_accuracy, hellaswag_accuracy_norm: 0 to 1.
    mfu: 0 to 1.  peak_memory_mib: the greatest of the ranks.  device: "gpu" or "cpu".
    ended_by: what a finished run ended by: max_iters, time, cost or early_stopping.
    planned_tokens: those of the whole run.  warmup_share: warm-up steps / steps of the run.
    evidence: the file that the numbers come from, below the matrix; "" where there are none.
    reused_from: the run of another matrix that it was taken over from, "" for one that was trained here.
    attempts: every execution, as status.json lists them.
    gpu: what was recorded of its GPUs, or of its ranks on the CPU.  alerts: what the run was warned of.
    sparsity: share of zeros that was counted in the matrices that are pruned; None where nothing is.
    settings: what decides how it is optimized, by the trainer's fields.  asked: those of them that are no default;
    None where that was not recorded.
    """

    name: str
    run_id: str
    axes: Mapping[str, str]
    status: Status
    reason: str
    optimizer: str
    model: str
    device: str
    device_name: str | None = None
    world_size: int | None = None
    seed: int | None = None
    attempt: int | None = None
    data_sha256: str | None = None
    tokenizer: str = ""
    text: str = ""
    steps: int | None = None
    max_iters: int | None = None
    global_batch: int | None = None
    block_size: int | None = None
    eval_samples: int | None = None
    planned_tokens: int | None = None
    warmup_share: float | None = None
    initial_val_loss: float | None = None
    final_val_loss: float | None = None
    last_val_step: int | None = None
    best_val_loss: float | None = None
    best_val_step: int | None = None
    bytes_per_token: float | None = None
    hellaswag_accuracy: float | None = None
    hellaswag_accuracy_norm: float | None = None
    final_train_loss: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    step_ms: float | None = None
    seconds: float | None = None
    peak_memory_mib: float | None = None
    params: int | None = None
    ended: float | None = None
    ended_by: str | None = None
    evidence: str = ""
    log: str = ""
    log_tail: tuple[str, ...] = ()
    adjusted: tuple[str, ...] = ()
    pruning: str = "none"
    target_sparsity: float | None = None
    sparsity: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    asked: frozenset[str] | None = field(default=None, repr=False)
    reused_from: str = ""
    attempts: tuple[Mapping[str, Any], ...] = ()
    gpu: GpuNumbers | None = None
    alerts: tuple[Alert, ...] = ()
    val: tuple[Point, ...] = field(default=(), repr=False)
    train: tuple[Point, ...] = field(default=(), repr=False)

    @property
    def perplexity(self) -> float | None:
        return perplexity(self.final_val_loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Of the final loss: what compares over tokenizers."""
        return bits_per_byte(self.final_val_loss, self.bytes_per_token)

    @property
    def best_bits_per_byte(self) -> float | None:
        return bits_per_byte(self.best_val_loss, self.bytes_per_token)

    @property
    def counts(self) -> bool:
        """Whether a ranking may use this run: it is finished and has a loss."""
        return self.status is Status.FINISHED and self.final_val_loss is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNumbers:
    """The runs that differ in nothing but their seed. measure: what of them is compared, LOSS or BITS."""

    name: str
    axes: Mapping[str, str]
    data_sha256: str | None
    runs: tuple[RunNumbers, ...]
    measure: str = LOSS

    @property
    def counted(self) -> tuple[RunNumbers, ...]:
        """The finished runs with a loss, or with what else is compared."""
        return tuple(run for run in self.runs if run.counts and getattr(run, self.measure) is not None)

    @property
    def losses(self) -> dict[int, float]:
        """Final validation loss of each finished run, or what else is compared, by seed."""
        return {
            number if run.seed is None else run.seed: float(getattr(run, self.measure))
            for number, run in enumerate(self.counted)
        }

    @property
    def mean(self) -> float | None:
        return mean(list(self.losses.values())) if self.losses else None

    @property
    def deviation(self) -> float | None:
        return sample_deviation(list(self.losses.values()))

    @property
    def interval(self) -> Interval | None:
        """Of the mean, at 95 %; None with fewer than two seeds, or where every seed gave the same."""
        losses = list(self.losses.values())
        return mean_interval(losses) if len(set(losses)) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The leader of a ranking beside another group.

    verdict: of the two alone.  p_holm: its p, corrected for the number of comparisons.
    word: what may be said of the leader after that correction.
    """

    leader: str
    other: str
    verdict: Verdict
    p_holm: float | None
    word: Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Groups that read the same data, by mean final validation loss, the lowest first.

    measure: LOSS; or BITS, where they read the same text in tokens of different tokenizers, and data_sha256 is "".
    evidence: one sentence on what stands behind the order.  notes: what else the groups differ in.
    """

    data_sha256: str
    groups: tuple[GroupNumbers, ...]
    comparisons: tuple[Comparison, ...]
    evidence: str
    notes: tuple[str, ...]
    measure: str = LOSS


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One number of ranks. efficiency: speed-up / (ranks / fewest ranks), 1 is ideal. runs: names behind it."""

    world_size: int
    tokens_per_second: float
    speedup: float
    efficiency: float
    global_batch: int | None
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One configuration over numbers of GPUs (ranks on the CPU), the fewest first."""

    name: str
    device: str
    rows: tuple[ScalingRow, ...]


class Origin(StrEnum):
    """Where the value of a setting comes from."""

    DEFAULT = "default"
    ASKED = "asked for"
    SWEPT = "swept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of an optimizer: its values in the order of the runs. origin: None where it was not recorded."""

    name: str
    values: tuple[Any, ...]
    origin: Origin | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """What one optimizer ran with. runs: names of the runs behind it."""

    optimizer: str
    runs: tuple[str, ...]
    settings: tuple[Setting, ...]

    def get(self, name: str) -> Setting | None:
        return next((setting for setting in self.settings if setting.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixNumbers:
    """Everything that the files of a matrix say. created, ended: Unix seconds.  equal: what all runs have in common."""

    name: str
    path: Path
    status: str
    created: float | None
    ended: float | None
    command: str
    overrides: tuple[str, ...]
    equal: str
    provenance: Mapping[str, Any]
    axes: Mapping[str, tuple[str, ...]]
    cuts: tuple[tuple[int, str], ...]
    runs: tuple[RunNumbers, ...]
    groups: tuple[GroupNumbers, ...]
    rankings: tuple[Ranking, ...]
    scalings: tuple[Scaling, ...]
    settings: tuple[OptimizerSettings, ...] = ()
    warnings: tuple[str, ...]

    def count(self, status: Status) -> int:
        return sum(run.status is status for run in self.runs)

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device that runs used: "cpu", "gpu"."""
        return tuple(sorted({run.device for run in self.runs if run.device}))
