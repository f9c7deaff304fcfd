"""The numbers of a matrix: values that the analysis returns and every report reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kmatrix.records.attempts import Attempt, End
from kmatrix.records.dataset import FLAT
from kmatrix.records.decode import Scalar
from kmatrix.records.runs import ExcludedCells, Provenance, Status
from kmatrix.report.gpu.numbers import GpuNumbers, RunGpus
from kmatrix.report.metrics import Evaluations, Metrics
from kmatrix.stats import LEVEL, Interval, mean, mean_interval, sample_deviation
from kmatrix.status.alerts import Alert
from kmatrix.status.fold import end_of
from kmatrix.status.wanted import SeedEnd
from kmatrix.verdict.family import FamilyVerdict, PairOutcome, Replay
from kmatrix.verdict.family import Pair as PairVerdict

GPUS_AXIS = "gpus"
PAUSE_S = 60.0  # a matrix without an active run for longer was stopped, or had ended, and was continued
DERIVED_FROM = {"warmup_steps": "warmup_fraction"}  # settings computed from another symbol
LOSS, BITS = "final_val_loss", "bits_per_byte"  # the metrics that rankings use: attributes of RunNumbers


def perplexity(loss: float | None) -> float | None:
    """Return exp(loss), or None if the loss is unknown or the result does not fit a float."""
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """The device of one rank."""

    rank: int
    node: int  # from 0
    host: str
    name: str
    uuid: str | None = None  # None on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """The numbers of one run, as every report shows them. None: unknown."""

    name: str
    run_id: str
    axes: Mapping[str, str]
    status: Status
    reason: str  # why the run failed, stopped or was skipped; "" if it finished
    kind: str = ""  # of its failure or stop, in a word: nan, oom, timeout, ...; "" if it finished
    end: SeedEnd | None = None  # its outcome as a seed of its configuration; None: it is to come
    optimizer: str
    model: str
    device: str  # "gpu", "cpu" or ""
    device_name: str | None = None
    devices: tuple[RankDevice, ...] = ()  # of all ranks on all nodes; empty if the trainer did not record hosts
    world_size: int | None = None  # number of ranks
    num_nodes: int = 1
    seed: int | None = None
    attempt: int | None = None
    data_sha256: str | None = None
    data_layout: str = FLAT  # of the sequences: flat or bestfit
    tokenizer: str = ""
    text: str = ""  # name of the training text, independent of its tokenizer; "" if unknown
    steps: int | None = None  # completed optimizer updates
    max_iters: int | None = None  # planned optimizer updates
    global_batch: int | None = None  # sequences per step, all ranks
    block_size: int | None = None  # context length, tokens
    eval_samples: int | None = None  # validation sequences per evaluation
    planned_tokens: int | None = None  # training tokens of the complete run
    warmup_share: float | None = None  # warm-up steps / planned steps
    initial_val_loss: float | None = None  # nats/token
    final_val_loss: float | None = None  # nats/token; of an unfinished run the last one measured
    last_val_step: int | None = None  # step of the last validation
    best_val_loss: float | None = None  # nats/token
    best_val_step: int | None = None
    bits_per_byte: float | None = None  # at the final loss: comparable between tokenizers
    best_bits_per_byte: float | None = None  # at the best loss
    hellaswag_accuracy: float | None = None  # 0 to 1
    hellaswag_accuracy_norm: float | None = None  # 0 to 1
    core_metric: float | None = None  # 0: guessing, 1: all correct
    core_standard_error: float | None = None  # from the number of examples alone
    final_train_loss: float | None = None  # nats/token
    tokens: int | None = None  # trained on so far
    tokens_per_second: float | None = None  # steady state: evaluations, checkpoints and the first steps excluded
    mfu: float | None = None  # model FLOPs utilization, 0 to 1
    step_ms: float | None = None  # milliseconds, median
    seconds: float | None = None  # training time
    wall_s: float | None = None  # s, of all attempts in this matrix, from launch to end
    gpu_hours: float | None = None  # held in this time; None on the CPU
    dollars: float | None = None  # None without a price
    peak_memory_mib: float | None = None  # MiB, maximum over ranks
    params: int | None = None
    ended: float | None = None  # Unix seconds
    ended_by: str | None = None  # max_iters, time, cost or early_stopping
    evidence: str = ""  # source file of these numbers, relative to the matrix; "" if there is none
    log: str = ""  # output.log, relative to the matrix; "" if there is none
    log_tail: tuple[str, ...] = ()  # last lines of a failed run's log
    adjusted: tuple[str, ...] = ()  # settings that the trainer changed, one sentence each
    pruning: str = "none"
    target_sparsity: float | None = None  # 0 to 1
    sparsity: float | None = None  # measured share of zeros in the pruned matrices, 0 to 1
    settings: Mapping[str, Scalar] = field(default_factory=dict, repr=False)  # optimizer and pruning fields of run.json
    configuration: Mapping[str, Scalar] = field(default_factory=dict, repr=False)  # all fields of "train" in run.json
    explicit: frozenset[str] = field(default=frozenset(), repr=False)  # settings set by the user
    reused_from: str = ""  # <matrix>/<run> that trained this run; "" if it was trained here
    attempts: tuple[Attempt, ...] = ()  # without archived ones
    code: str = ""  # SHA-256 of the trainer's sources that its last attempt ran; "" if unknown
    starts: Mapping[int, int] = field(default_factory=dict)  # attempt -> step of its first line, if there are several
    gpu: GpuNumbers | None = None  # recording of the GPUs, or of the CPU ranks
    alerts: tuple[Alert, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)  # tracker -> URL or directory of the run there
    metrics: Metrics = field(default_factory=Metrics, repr=False)

    @property
    def val(self) -> Evaluations:
        """The validation losses."""
        return self.metrics.val

    @property
    def perplexity(self) -> float | None:
        return perplexity(self.final_val_loss)

    def is_explicit(self, setting: str) -> bool:
        """Return whether the user set this value."""
        return setting in self.explicit or DERIVED_FROM.get(setting) in self.explicit

    @property
    def ended_badly(self) -> bool:
        """True if it did not finish although it should have."""
        return self.status in (Status.FAILED, Status.STOPPED, Status.SKIPPED)

    def word(self, *, reserve: bool) -> str:
        """Return its status as a reader sees it. reserve: no verdict wants it (now)."""
        if not reserve:
            return str(self.status)
        return "reserve"

    @property
    def diverged(self) -> bool:
        """True if its loss is not finite, or at the end not below that of step 0."""
        return self.end is not None and self.end.loss is not None and not math.isfinite(self.end.loss)

    @property
    def measured_joules_per_token(self) -> float | None:
        """Energy per token of the training, None for simulated GPUs."""
        return None if self.gpu is None or self.gpu.simulated else self.gpu.main.joules_per_token

    def how_ended(self, attempt: Attempt) -> End | None:
        """Return how an attempt ended, None while it trains."""
        is_running = self.status is Status.RUNNING and attempt is self.attempts[-1]
        return None if is_running else end_of(attempt)

    @property
    def counts(self) -> bool:
        """True if rankings include this run: it finished with a loss, and did not diverge."""
        return self.status is Status.FINISHED and self.final_val_loss is not None and not self.diverged


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNumbers:
    """Runs of one configuration: they differ only in their seed."""

    name: str
    axes: Mapping[str, str]
    data_sha256: str | None
    runs: tuple[RunNumbers, ...]
    metric: str = LOSS  # LOSS or BITS
    level: float = LEVEL  # of the interval of its mean: MATRIX_CONFIDENCE

    @property
    def counted(self) -> tuple[RunNumbers, ...]:
        """Finished runs that have the metric and did not diverge."""
        return tuple(run for run in self.runs if run.counts and getattr(run, self.metric) is not None)

    @property
    def diverged(self) -> tuple[RunNumbers, ...]:
        """Runs that diverged, finished or not: they are counted, and left out of the mean."""
        return tuple(run for run in self.runs if run.diverged)

    @property
    def losses(self) -> dict[int, float]:
        """Metric of each finished run by seed; runs without a recorded seed are numbered from 0."""
        return {
            number if run.seed is None else run.seed: float(getattr(run, self.metric))
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
        """Confidence interval of the mean; None for a single seed, or if all seeds have the same loss."""
        losses = list(self.losses.values())
        return mean_interval(losses, self.level) if len(set(losses)) > 1 else None


class CostQuantity(StrEnum):
    """A quantity in which configurations are compared, apart from their loss. results.json holds these values."""

    STEP_TIME = "time per step"  # ms
    MEMORY = "peak memory"  # MiB, maximum over ranks
    ENERGY = "energy per token"  # J, of the training; never of simulated GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class CostDifference:
    """A cost of configuration a, relative to that of b. Both means are over finished runs."""

    quantity: CostQuantity
    a: str
    b: str
    mean_a: float
    mean_b: float
    p: float | None  # two-sided, Welch's test; None if a side has fewer than two runs, or nothing varies
    fewest: int  # runs of the side that has fewer

    @property
    def ratio(self) -> float:
        """The mean of a / the mean of b."""
        return self.mean_a / self.mean_b


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Groups with the same training data, sorted by the mean of their metric, lowest first."""

    data_sha256: str  # "" for BITS: the same text has a different hash per tokenizer
    groups: tuple[GroupNumbers, ...]
    verdict: FamilyVerdict  # its configurations are the names of groups, also of those without a loss
    notes: tuple[str, ...] = ()  # other differences between the groups
    metric: str = LOSS  # LOSS or BITS
    replay: Replay | None = None  # of adaptive seeds
    costs: tuple[CostDifference, ...] = ()  # of the two configurations that the verdict names first
    without_result: tuple[GroupNumbers, ...] = ()  # of the family: some runs are over, and none has a loss

    @property
    def main_pair(self) -> PairVerdict | None:
        """The comparison that a headline is about; None for a single configuration.

        With a leader it is the closest that it beats, with a baseline the one that beats it by most; else one that is
        equivalent, else the closest.
        """

        def size(pair: PairVerdict) -> float:
            return math.inf if pair.difference is None else abs(pair.difference)

        outcomes = [PairOutcome.BETTER, PairOutcome.WORSE, PairOutcome.EQUIVALENT, PairOutcome.OPEN]
        if self.verdict.rules.baseline is not None:
            outcomes = [PairOutcome.WORSE, PairOutcome.EQUIVALENT, PairOutcome.OPEN, PairOutcome.BETTER]
        for outcome in outcomes:
            if found := [pair for pair in self.verdict.against_reference if pair.outcome is outcome]:
                # Of those that beat a baseline, the best one.
                return max(found, key=size) if outcome is PairOutcome.WORSE else min(found, key=size)
        return None

    @property
    def pairs_by_name(self) -> dict[str, PairVerdict]:
        """Configuration -> the comparison of the reference with it. The reference itself is not there."""
        return {pair.b: pair for pair in self.verdict.against_reference}

    @property
    def ended_runs(self) -> dict[str, int]:
        """Configuration -> runs that ended with a loss or diverged."""
        groups = (*self.groups, *self.without_result)
        return {group.name: len(group.counted) + len(group.diverged) for group in groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """Throughput on one number of ranks."""

    world_size: int
    tokens_per_second: float  # mean over seeds
    speedup: float  # relative to the row with the fewest ranks
    efficiency: float  # speed-up / (ranks / fewest ranks); 1 is ideal
    global_batch: int | None  # sequences per step
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Throughput of one configuration on several numbers of ranks."""

    name: str
    device: str  # "gpu" or "cpu"
    rows: tuple[ScalingRow, ...]  # fewest ranks first


class SettingOrigin(StrEnum):
    """How a setting got its value. results.json holds these values."""

    DEFAULT = "default"
    EXPLICIT = "asked for"
    SWEPT = "swept"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSetting:
    """One setting of an optimizer."""

    name: str
    values: tuple[Scalar, ...]  # distinct values in the order of the runs
    origin: SettingOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The settings of one optimizer over all of its runs."""

    optimizer: str
    runs: tuple[str, ...]
    settings: tuple[OptimizerSetting, ...]

    def get(self, name: str) -> OptimizerSetting | None:
        """Return the setting of this name, or None."""
        return next((setting for setting in self.settings if setting.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixNumbers:
    """The numbers of a matrix, from the files of its directory."""

    name: str
    path: Path
    status: str
    created: float | None  # Unix seconds
    ended: float | None  # Unix seconds
    command: str
    overrides: tuple[str, ...]  # NAME=value, as typed
    equal: str  # what MATRIX_EQUAL guarantees for all runs; "" if nothing
    provenance: Provenance
    axes: Mapping[str, tuple[str, ...]]
    excluded: tuple[ExcludedCells, ...]
    runs: tuple[RunNumbers, ...]
    groups: tuple[GroupNumbers, ...]
    rankings: tuple[Ranking, ...]
    scalings: tuple[Scaling, ...]
    settings: tuple[OptimizerSettings, ...] = ()
    warnings: tuple[str, ...]
    target_loss: float | None = None  # nats/token; None without TARGET_LOSS
    reserve: frozenset[str] = frozenset()  # runs with adaptive seeds that the verdict does not want (now)
    confidence: float = LEVEL  # MATRIX_CONFIDENCE: the level of all intervals

    def count(self, status: Status) -> int:
        """Return the number of runs with this status."""
        return sum(run.status is status for run in self.runs)

    @property
    def states(self) -> dict[str, int]:
        """Status -> number of runs, as a reader sees them: runs in reserve are not planned ones."""
        needed = Counter(run.status for run in self.runs if run.name not in self.reserve)
        found = {str(status): needed[status] for status in Status if needed[status]}
        reserve = sum(run.name in self.reserve for run in self.runs)
        return found | ({"in reserve": reserve} if reserve else {})

    @property
    def took_s(self) -> float | None:
        """Seconds from its creation to its end, without pauses: a matrix may be continued, or run again, days later."""
        if self.created is not None and self.ended is not None and self.ended >= self.created:
            return self.ended - self.created - self.paused_s
        return None

    @property
    def paused_s(self) -> float:
        """Seconds in which no run was active, as far as attempts say; shorter times than PAUSE_S do not count."""
        if self.created is None or self.ended is None:
            return 0.0
        starts_and_ends = sorted(
            (attempt.started, attempt.started + attempt.end.seconds)
            for run in self.runs
            for attempt in run.attempts
            if attempt.end is not None
        )
        paused, active_until = 0.0, self.created
        for start, end in [*starts_and_ends, (self.ended, self.ended)] if starts_and_ends else []:
            if (gap := min(start, self.ended) - active_until) > PAUSE_S:
                paused += gap
            active_until = max(active_until, end)
        return paused

    @property
    def devices(self) -> tuple[str, ...]:
        """Kinds of device that the runs used: "cpu", "gpu"."""
        return tuple(sorted({run.device for run in self.runs if run.device}))


def gpu_runs(numbers: MatrixNumbers) -> list[RunGpus]:
    """Return every run of a matrix with the numbers of its devices."""
    return [
        RunGpus(name=run.name, optimizer=run.optimizer, status=str(run.status), gpu=run.gpu) for run in numbers.runs
    ]
