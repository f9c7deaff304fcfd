"""Results: everything that is known about a matrix, as one value.

Its JSON is results.json, and its type is the schema. Every text, table, page and picture is a rendering of it. An
unknown value is None, never 0; a number that a report prints is here.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kmatrix.records.attempts import Attempt
from kmatrix.records.decode import SCHEMA, Record, Scalar, field
from kmatrix.records.runs import ExcludedCells, Provenance, RunNumbers, Status
from kmatrix.report.gpu.results import Gpu
from kmatrix.report.metrics import Evaluations, TrainingLosses
from kmatrix.stats import Interval
from kmatrix.status.alerts import Alert
from kmatrix.verdict.family import Pair, State
from kmatrix.verdict.target import TargetTest


class Effort(Record, frozen=True, kw_only=True):
    """What a run took up to its first evaluation at or below the target. Null: unknown."""

    step: float | None = None
    tokens: float | None = None
    seconds: Annotated[float | None, Meta(description="of training, s")] = None
    joules: Annotated[float | None, Meta(description="of all devices, measured, J")] = None


class Run(RunNumbers, frozen=True, kw_only=True):
    """A run: the numbers of its trainer, and what its files say besides them."""

    name: str
    status: Status
    error: Annotated[str | None, Meta(description="of a damaged file of the run")] = None
    axes: Annotated[dict[str, str], Meta(description="label -> value")] = field(default_factory=dict)
    configuration: Annotated[str, Meta(description="name of its configuration")] = ""
    counts: Annotated[bool, Meta(description="in rankings: it finished with a loss and did not diverge")] = False
    diverged: Annotated[bool, Meta(description="its loss is not finite, or not below that of step 0")] = False
    reserve: Annotated[bool, Meta(description="with adaptive seeds: no verdict wants it so far")] = False
    optimizer: str = ""
    model: str = ""
    device: Annotated[str, Meta(description="gpu or cpu; empty: unknown")] = ""
    devices: Annotated[tuple[str, ...], Meta(description="name of the device of each rank")] = ()
    hosts: Annotated[tuple[str, ...], Meta(description="host of each rank")] = ()
    seed: int | None = None
    dataset: str = ""
    data_sha256: Annotated[str | None, Meta(description="of the training data")] = None
    tokenizer: str = ""
    max_iters: Annotated[int | None, Meta(description="planned optimizer steps")] = None
    global_batch: Annotated[int | None, Meta(description="sequences per step, all ranks")] = None
    block_size: Annotated[int | None, Meta(description="context length, tokens")] = None
    eval_samples: Annotated[int | None, Meta(description="validation sequences per evaluation")] = None
    perplexity: Annotated[float | None, Meta(description="exp(final_val_loss)")] = None
    pruning: str = "none"
    target_sparsity: Annotated[float | None, Meta(description="0 to 1")] = None
    wall_s: Annotated[float, Meta(description="of all attempts, from launch to end, s")] = 0.0
    gpu_hours: Annotated[float | None, Meta(description="held in this time; null on the CPU")] = None
    dollars: Annotated[float | None, Meta(description="cost, $; null without a price, and if it was reused")] = None
    joules: Annotated[float | None, Meta(description="of all attempts, J; null for simulated GPUs")] = None
    joules_per_token: Annotated[float | None, Meta(description="of the training, J; null for simulated GPUs")] = None
    reused_from: Annotated[str | None, Meta(description="<matrix>/<run> that trained it")] = None
    code: Annotated[str | None, Meta(description="SHA-256 of the trainer's sources of its last attempt")] = None
    adjusted: Annotated[tuple[str, ...], Meta(description="settings that the trainer changed, a sentence each")] = ()
    log: Annotated[str | None, Meta(description="output.log, relative to the matrix")] = None
    log_tail: Annotated[tuple[str, ...], Meta(description="last lines of a failed run's log")] = ()
    reached: Annotated[Effort | None, Meta(description="the target; null: it was not reached")] = None
    attempts: Annotated[tuple[Attempt, ...], Meta(description="without those that a rerun archived")] = ()
    alerts: Annotated[tuple[Alert, ...], Meta(description="critical ones first")] = ()
    links: Annotated[dict[str, str], Meta(description="tracker -> address or folder")] = field(default_factory=dict)
    val: Annotated[Evaluations, Meta(description="evaluations, thinned")] = field(default_factory=Evaluations)
    train: Annotated[TrainingLosses, Meta(description="training loss, thinned")] = field(default_factory=TrainingLosses)
    gpu: Annotated[Gpu | None, Meta(description="recording of its GPUs, or of its ranks on the CPU")] = None


class Configuration(Record, frozen=True, kw_only=True):
    """Runs that differ in their seed only."""

    name: str
    axes: Annotated[dict[str, str], Meta(description="label -> value, without the seed")]
    data_sha256: str | None
    runs: Annotated[tuple[str, ...], Meta(description="names of all its runs")]
    counted: Annotated[tuple[str, ...], Meta(description="names of the runs in its mean")]
    seeds: Annotated[tuple[int, ...], Meta(description="of the runs in its mean")]
    ends: Annotated[dict[str, int], Meta(description="diverged, failed, ... -> runs that are over and in no mean")]
    pending: Annotated[int, Meta(description="runs that have not ended, without the reserve of adaptive seeds")]
    mean: Annotated[float | None, Meta(description="of the final losses, in the unit of its ranking")]
    deviation: Annotated[float | None, Meta(description="sample standard deviation of the losses")]
    interval: Annotated[Interval | None, Meta(description="of the mean; null: one seed, or all losses are equal")]
    amounts: Annotated[dict[str, float], Meta(description="mean of what its finished runs take, by the name in a run")]


class Cost(Record, frozen=True, kw_only=True):
    """A cost of one configuration, relative to that of another one: means over finished runs."""

    quantity: Annotated[str, Meta(description="step_ms, peak_memory_mib or joules_per_token")]
    a: str
    b: str
    mean_a: float
    mean_b: float
    ratio: Annotated[float, Meta(description="mean_a / mean_b")]
    p: Annotated[float | None, Meta(description="two-sided, Welch's test; null without a test")] = None


class AdaptiveSeeds(Record, frozen=True, kw_only=True):
    """What a ranking with adaptive seeds asked for."""

    rounds: Annotated[tuple[int, ...], Meta(description="seeds per configuration after which it was looked at")]
    wanted: Annotated[int, Meta(description="runs that it waits for; 0: it is final")]
    unused: Annotated[int, Meta(description="results that no round asked for")]


class Ranking(Record, frozen=True, kw_only=True):
    """Configurations with comparable losses, and the verdict on them."""

    measure: Annotated[str, Meta(description="final_val_loss or final_bits_per_byte")]
    unit: Annotated[str, Meta(description="of its losses and differences: nats/token or bits/byte")]
    data_sha256: Annotated[str | None, Meta(description="null in bits per byte: a hash per tokenizer")]
    state: State
    preliminary: Annotated[bool, Meta(description="runs that the verdict counts on have not ended")]
    order: Annotated[tuple[str, ...], Meta(description="configurations with a loss, the lowest mean first")]
    no_result: Annotated[tuple[str, ...], Meta(description="those of which runs are over, and none has a loss")]
    shared_seeds: Annotated[tuple[int, ...], Meta(description="of all in `order`; empty if they have no others")] = ()
    shared_means: Annotated[dict[str, float], Meta(description="configuration -> mean over them")] = field(
        default_factory=dict
    )
    baseline: Annotated[str | None, Meta(description="named before the first run; null: all pairs are compared")]
    reference: Annotated[str, Meta(description="the baseline, or the leader: lowest mean of those no other one beats")]
    confidence: Annotated[float, Meta(description="of all comparisons together, and of each interval")]
    min_difference: Annotated[float | None, Meta(description="margin of equivalence, nats/token")]
    family_size: Annotated[int, Meta(description="comparisons that p is corrected for, known before the first run")]
    pairs: Annotated[tuple[Pair, ...], Meta(description="those of the reference first, it first")]
    main: Annotated[Pair | None, Meta(description="the comparison that the headline is about")] = None
    still_open: Annotated[
        tuple[str, ...],
        Meta(description="configurations whose comparison with it is open, without those that are worse than a third"),
    ] = ()
    costs: Annotated[tuple[Cost, ...], Meta(description="of the better one of `main`, relative to the other one")] = ()
    seeds_auto: Annotated[AdaptiveSeeds | None, Meta(description="null with a fixed number of seeds")] = None
    reused: Annotated[int, Meta(description="losses that were measured in another matrix")] = 0
    notes: Annotated[tuple[str, ...], Meta(description="differences between runs besides their axes")] = ()
    more_seeds: Annotated[int, Meta(description="per configuration, that would decide it; 0: unknown, or none")] = 0
    command: Annotated[str | None, Meta(description="that runs what the verdict needs next")] = None


class TargetConfiguration(Record, frozen=True, kw_only=True):
    """A configuration and the target."""

    name: str
    runs: Annotated[int, Meta(description="that have ended")]
    reached: Annotated[int, Meta(description="that reached it")]
    pending: Annotated[int, Meta(description="that may still reach it")]
    median: Annotated[Effort, Meta(description="over all runs, those that missed it last; null: unknown")]
    test: Annotated[TargetTest | None, Meta(description="null without TARGET_LOSS")] = None


class Target(Record, frozen=True, kw_only=True):
    """What it took to reach a loss."""

    loss: Annotated[float, Meta(description="nats/token")]
    of: Annotated[str | None, Meta(description="configuration whose mean it is; null: TARGET_LOSS")] = None
    configurations: tuple[TargetConfiguration, ...]


class ScalingRow(Record, frozen=True, kw_only=True):
    """The throughput of a configuration, relative to that on the fewest ranks which differs in nothing else."""

    configuration: str
    world_size: Annotated[int, Meta(description="ranks")]
    tokens_per_second: Annotated[float, Meta(description="mean over seeds")]
    speedup: Annotated[float, Meta(description="relative to the fewest ranks")]
    efficiency: Annotated[float, Meta(description="speed-up / (ranks / fewest ranks)")]
    global_batch: Annotated[int | None, Meta(description="sequences per step")]


class Setting(Record, frozen=True, kw_only=True):
    """A training field in which configurations differ."""

    name: str
    values: Annotated[tuple[Scalar, ...], Meta(description="distinct values, that of the reference first")]
    of: Annotated[dict[str, int], Meta(description="configuration -> place in `values`")]
    chosen: Annotated[bool, Meta(description="somebody set it; else it follows from others, or is a default")]


class Results(Record, frozen=True, kw_only=True):
    """results.json."""

    schema: int = SCHEMA
    name: str
    status: Status
    created: Annotated[float | None, Meta(description="Unix s")]
    command: Annotated[str, Meta(description="that made the matrix, quoted for a shell")]
    overrides: Annotated[tuple[str, ...], Meta(description="NAME=value, quoted for a shell")]
    equal: Annotated[str, Meta(description="the budget that all runs share")]
    axes: Annotated[dict[str, tuple[str, ...]], Meta(description="label -> values")]
    cuts: Annotated[tuple[ExcludedCells, ...], Meta(description="cells without a run")]
    counts: Annotated[dict[str, int], Meta(description="status, or `in reserve` -> runs")]
    facts: Annotated[dict[str, str], Meta(description="machine, software, code, model, data, as reports print them")]
    dollars: Annotated[float | None, Meta(description="of all runs, $")]
    verdict: Annotated[tuple[str, ...], Meta(description="a sentence per ranking; one if there is none")] = ()
    rankings: tuple[Ranking, ...]
    configurations: tuple[Configuration, ...]
    target: Target | None
    scaling: Annotated[tuple[ScalingRow, ...], Meta(description="the fewest ranks of each family first")]
    differing: Annotated[tuple[Setting, ...], Meta(description="settings in which configurations differ")]
    warnings: tuple[str, ...]
    provenance: Provenance
    runs: tuple[Run, ...]
