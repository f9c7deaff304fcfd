"""Symbols -> Config: the one place that knows what a symbol means to the control side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmatrix import mix
from kmatrix.errors import ConfigError
from kmatrix.kconfig.sets import TRACKERS
from kmatrix.length import length
from kmatrix.shapes import BYTE_VOCAB, GPT2_VOCAB, NAMED, ModelShape, by_depth

PREFIX = "GPT2_"
VOCABULARIES = {"byte": BYTE_VOCAB, "gpt2": GPT2_VOCAB}
ASSUMED_CHARACTERS = 256  # of a text whose characters are not counted yet
GPU_HOST_THREADS = 8  # CPU threads of a rank that trains on a GPU: more do not help a training loop

Values = Callable[[str], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the control side needs of one run's or one matrix's configuration.

    Directories are as written: relative ones start at the project's root.  run_timeout_s: 0 for none.
    monitor_hz: samples a second, 0 for no recording.  prometheus_port: of the recorder's metrics, 0 for none.
    trackers: their names, in one order.  tracker_project: "" for that of this machine and folder.
    tracker_limit_s: how long trackers may take after a run's end.
    preflight: whether two steps of each shape come first.  on_finish: a command for the end, "" for none.
    """

    results_dir: str
    data_dir: str
    checkpoint_dir: str
    run_timeout_s: int
    reuse: bool
    monitor_hz: int
    prometheus_port: int
    trackers: tuple[str, ...] = ()
    tracker_project: str = ""
    tracker_limit_s: int = 0
    preflight: bool = False
    on_finish: str = ""


def read(symbols: Mapping[str, Any]) -> Config:
    """Return the control side's configuration. symbols: typed values in force."""
    return Config(
        results_dir=_need(symbols, "RESULTS_DIR"),
        data_dir=_need(symbols, "DATA_DIR"),
        checkpoint_dir=_need(symbols, "CHECKPOINT_DIR"),
        run_timeout_s=_need(symbols, "RUN_TIMEOUT"),
        reuse=_need(symbols, "REUSE"),
        monitor_hz=_need(symbols, "GPU_MONITOR_HZ") if _need(symbols, "GPU_MONITOR") else 0,
        prometheus_port=symbols.get("GPU_PROMETHEUS_PORT") or 0,  # not visible without a monitor
        trackers=tuple(name for name, symbol in TRACKERS.items() if _need(symbols, symbol)),
        tracker_project=_need(symbols, "TRACKER_PROJECT"),
        tracker_limit_s=_need(symbols, "TRACKER_LIMIT"),
        preflight=_need(symbols, "PREFLIGHT"),
        on_finish=_need(symbols, "ON_FINISH"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run's configuration with everything resolved that does not depend on the data or the machine.

    fields: the trainer's, by their names.  global_batch: sequences.  asked_iters: steps as asked, 0 for none.
    bound: the field that decides how long the run is.
    """

    fields: Mapping[str, Any]
    shape: ModelShape
    global_batch: int
    asked_iters: int
    bound: str

    @property
    def ranks(self) -> int:
        return int(self.fields["num_gpus"])

    @property
    def device(self) -> str:
        return str(self.fields["device"])

    @property
    def steps(self) -> int | None:
        """None until the data are known, in a run that epochs alone bound."""
        steps = self.fields["max_iters"]
        return None if steps is None else int(steps)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.shape.block_size

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.tokens_per_step


def read_run(symbols: Mapping[str, Any]) -> RunConfig:
    """Return a run's configuration. symbols: typed values in force, with device and number of GPUs resolved."""
    fields = {name.removeprefix(PREFIX).lower(): value for name, value in symbols.items() if name.startswith(PREFIX)}
    layers, heads, width = _sizes(fields)
    vocabulary = _vocabulary(fields)
    shape = ModelShape(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        block_size=fields["block_size"],
        vocab_size=vocabulary,
        bias=fields["bias"],
        weight_tying=fields["weight_tying"],
    )
    accumulation = _accumulation(symbols, fields)
    global_batch = fields["batch_size"] * accumulation * fields["num_gpus"]
    asked_iters = fields["max_iters"]
    bounded = length(fields, params=shape.params, tokens_per_step=global_batch * shape.block_size)
    fields["max_iters"] = bounded.steps
    fields.update(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        vocab_size=vocabulary,
        gradient_accumulation=accumulation,
        global_batch=global_batch,
        min_lr=_least_rate(fields),
        warmup_steps=_warmup(fields),
        ddp_backend=_backend(fields),
    )
    return RunConfig(
        fields=fields, shape=shape, global_batch=global_batch, asked_iters=asked_iters, bound=bounded.bound
    )


def with_data(run: RunConfig, train_tokens: int, vocab_size: int) -> RunConfig:
    """Return a run's configuration once its data are known: epochs are steps now, and so is the vocabulary.

    train_tokens: of the data.
    """
    run = with_vocabulary(run, vocab_size)
    fields = {**run.fields, "max_iters": run.asked_iters}
    bounded = length(fields, params=run.shape.params, tokens_per_step=run.tokens_per_step, train_tokens=train_tokens)
    fields["max_iters"] = bounded.steps
    fields["warmup_steps"] = _warmup(fields)
    return replace(run, fields=fields, bound=bounded.bound)


def with_vocabulary(run: RunConfig, vocab_size: int) -> RunConfig:
    """Return a run's configuration with the vocabulary of its data."""
    shape = replace(run.shape, vocab_size=vocab_size)
    return replace(run, fields={**run.fields, "vocab_size": vocab_size}, shape=shape)


def cpu_threads(asked: int, *, device: str, cores: int, ranks: int) -> int:
    """Return the CPU threads of each rank: as asked, or an equal share of the cores."""
    share = max(1, cores // ranks)
    return asked or (share if device == "cpu" else min(share, GPU_HOST_THREADS))


def resolve_device(asked: str, gpu_counts: Sequence[int], detected: int, *, backend: str | None = None) -> str:
    """Return "cuda" or "cpu" for `auto`; anything else as asked.

    gpu_counts: the GPUs that each place asks for (0: all that there are).  detected: GPUs that may be used here.
    `auto` falls back to the CPU only where one GPU or none in particular is asked for, and not nccl, which needs GPUs.
    """
    if asked != "auto":
        return asked
    return "cuda" if detected or backend == "nccl" or max(gpu_counts, default=0) > 1 else "cpu"


def resolve_count(asked: int, device: str, detected: int) -> int:
    """Return the ranks of a run: 0 means all GPUs that are detected, or one process on the CPU."""
    if asked:
        return asked
    if device == "cuda" and not detected:
        raise ConfigError(
            "NUM_GPUS=0 asks for all GPUs, and there are none",
            fix="pass NUM_GPUS=<number> to plan for another machine, or DEVICE=cpu",
        )
    return detected if device == "cuda" else 1


def global_batch_divides(value: Values) -> str | None:
    """The global batch is a whole number of micro-batches on every rank."""
    wanted = int(value("PARALLEL_BATCH_SIZE") or 0)
    micro, ranks = (max(int(value(name) or 0), 1) for name in ("GPT2_BATCH_SIZE", "GPT2_NUM_GPUS"))
    if wanted and wanted % (micro * ranks):
        return f"a global batch of {wanted} is no multiple of {micro} (micro-batch) x {ranks} (ranks)"
    return None


def heads_divide_width(value: Values) -> str | None:
    """A custom model's heads share its width equally."""
    width, heads = value("GPT2_N_EMBD"), value("GPT2_N_HEAD")
    if width and heads and int(width) % int(heads):
        return f"{heads} heads do not divide a width of {width}"
    return None


def least_rate_is_least(value: Values) -> str | None:
    """The least learning rate is not above the peak."""
    least, peak = value("GPT2_MIN_LR"), value("GPT2_LEARNING_RATE")
    if least and peak and float(least) > float(peak):
        return f"MIN_LR={least} is above LEARNING_RATE={peak}"
    return None


def nesterov_needs_momentum(value: Values) -> str | None:
    """PyTorch's SGD refuses Nesterov momentum of 0."""
    if value("GPT2_SGD_NESTEROV") == "y" and float(value("GPT2_SGD_MOMENTUM") or 0) == 0:
        return "SGD_NESTEROV needs an SGD_MOMENTUM above 0"
    return None


def pruning_has_a_ramp(value: Values) -> str | None:
    """Pruning begins before it ends, and in different steps."""
    if (value("GPT2_PRUNING") or "none") == "none":
        return None
    steps = int(value("GPT2_MAX_ITERS") or 0)  # 0: not known yet
    begin, end = (float(value(f"GPT2_PRUNING_{name}") or 0) for name in ("WARMUP", "RAMP_END"))
    if begin >= end or (steps and round(begin * steps) == round(end * steps)):
        return f"PRUNING_RAMP_END={end:g} is not after PRUNING_WARMUP={begin:g} in a run of {steps or 'unknown'} steps"
    return None


def spam_warms_up_within_an_interval(value: Values) -> str | None:
    """The rate is back at its peak before the moments are reset again."""
    interval, warmup = (int(value(f"GPT2_SPAM_{name}") or 0) for name in ("INTERVAL", "WARMUP_STEPS"))
    if interval and warmup > interval:
        return f"SPAM_WARMUP_STEPS={warmup} is above SPAM_INTERVAL={interval}"
    return None


def own_data_need_a_place(value: Values) -> str | None:
    """A dataset of one's own says where it lies."""
    dataset, path = value("GPT2_DATASET"), value("GPT2_DATA_PATH")
    places = {"shards": "<folder>", "folder": "<folder or pattern>", "hub": "OWNER/NAME"}
    if dataset in places and not path:
        return f'DATASET={dataset} needs DATA_PATH="{places[dataset]}"'
    return None


def mix_can_be_read(value: Values) -> str | None:
    """A mix names datasets, and a weight for each."""
    text = value("GPT2_DATA_MIX")
    if value("GPT2_DATASET") != "mix":
        return None
    try:
        mix.parse(text or "")
    except ValueError as error:
        return f'DATASET=mix needs DATA_MIX="finewebedu:65 tinystories:34 stdlib:1": {error}'
    return None


def length_is_bounded(value: Values) -> str | None:
    """MAX_ITERS=0 leaves the length to tokens or epochs."""
    if value("GPT2_MAX_ITERS") == "0" and not any(
        value(name) for name in ("GPT2_MAX_TOKENS", "GPT2_MAX_EPOCHS", "GPT2_TOKENS_PER_PARAM")
    ):
        return "MAX_ITERS=0 needs MAX_TOKENS, MAX_EPOCHS or TOKENS_PER_PARAM"
    return None


def money_needs_a_price(value: Values) -> str | None:
    """A money budget is time only with a price above 0."""
    if value("GPT2_MAX_COST") and float(value("GPT2_GPU_HOUR_PRICE") or 0) == 0:
        return "MAX_COST needs a GPU_HOUR_PRICE above 0"
    return None


def rollback_needs_checkpoints(value: Values) -> str | None:
    """There is nothing to go back to without periodic checkpoints."""
    rollback = "rollback" in (value("GPT2_NAN_POLICY"), value("GPT2_SPIKE_POLICY"))
    if rollback and value("GPT2_CHECKPOINT_INTERVAL") == "0":
        return "a rollback needs periodic checkpoints: CHECKPOINT_INTERVAL above 0"
    return None


def profile_is_a_span(value: Values) -> str | None:
    """The profiled steps are i:j with i below j."""
    text = value("GPT2_PROFILE")
    first, _, last = (text or "0:1").partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        return f"PROFILE={text} is no span of steps: i:j with i below j"
    return None


RULES = (
    global_batch_divides,
    length_is_bounded,
    money_needs_a_price,
    rollback_needs_checkpoints,
    profile_is_a_span,
    heads_divide_width,
    least_rate_is_least,
    nesterov_needs_momentum,
    pruning_has_a_ramp,
    own_data_need_a_place,
    mix_can_be_read,
    spam_warms_up_within_an_interval,
)


def _need(symbols: Mapping[str, Any], name: str) -> Any:
    if symbols.get(name) is None:
        raise ConfigError(f"the Kconfig files define no {name}", fix="use the project's own, or add it to yours")
    return symbols[name]


def _vocabulary(fields: Mapping[str, Any]) -> int:
    """Return the vocabulary as far as it is known before the data are prepared: afterwards it is theirs."""
    if fields["tokenizer"] == "bpe":
        return int(fields["bpe_vocab_size"])
    return VOCABULARIES.get(fields["tokenizer"], ASSUMED_CHARACTERS)


def _sizes(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    if fields["model"] == "depth":
        return by_depth(fields["depth"], fields["aspect_ratio"], fields["head_dim"])
    if fields["model"] == "custom":
        return fields["n_layer"], fields["n_head"], fields["n_embd"]
    return NAMED[fields["model"]]


def _accumulation(symbols: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    wanted = symbols["PARALLEL_BATCH_SIZE"]
    if wanted:
        return int(wanted) // int(fields["batch_size"] * fields["num_gpus"])
    return int(fields["gradient_accumulation"])


def _least_rate(fields: Mapping[str, Any]) -> float:
    peak = float(fields["learning_rate"])
    if fields["schedule"] == "constant":
        return peak
    return float(fields["min_lr"]) if fields["min_lr"] is not None else peak / 10


def _warmup(fields: Mapping[str, Any]) -> int | None:
    """Return the steps of warm-up; None where they are a share of steps that are not known yet."""
    if fields["warmup_fraction"] is not None and fields["max_iters"] is None:
        return None
    if fields["warmup_fraction"] is not None:
        return round(float(fields["warmup_fraction"]) * int(fields["max_iters"]))
    return int(fields["warmup_steps"])


def _backend(fields: Mapping[str, Any]) -> str | None:
    if not fields["use_ddp"]:
        return None
    if fields["ddp_backend"] == "auto":
        return "nccl" if fields["device"] == "cuda" else "gloo"
    return str(fields["ddp_backend"])
