"""run.json's "train": the training configuration that the control side and the trainer share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from math import gcd, isfinite, lcm
from types import NoneType
from typing import Any, Self, get_args, get_type_hints

from kmatrix.errors import ConfigError
from kmatrix.records.decode import EXACT, Amount, Int, Size
from kmatrix.shapes import BYTE_VOCAB, GPT2_VOCAB, NAMED, NANOCHAT, SMEAR_CHANNELS, WINDOWS, ModelShape, by_depth

CHOICES: dict[str, tuple[str, ...]] = {
    "model": (*NAMED, "depth", "custom"),
    "dataset": (
        *("stdlib", "finewebedu", "fineweb", "fineweb2", "finepdfs", "cosmopedia", "climbmix", "medqa"),
        *("openwebtext", "tinystories", "shakespeare"),
        *("hub", "folder", "shards", "mix"),
    ),
    "tokenizer": ("gpt2", "byte", "char", "bpe"),
    "data_layout": ("flat", "bestfit"),
    "schedule": ("cosine", "linear", "constant", "wsd"),
    "adamwprune_base": ("adam", "adamw", "adamwadv", "adamwspam"),
    "pruning": ("none", "magnitude", "movement", "state"),
    "movement_rule": ("gradient", "published"),
    "device": ("cuda", "cpu"),
    "dtype": ("fp32", "bf16"),
    "ddp_backend": ("nccl", "gloo"),
    "muon_adjust_lr_fn": ("original", "match_rms_adamw"),
    "norm": ("rms", "layer"),
    "activation": ("relu2", "gelu"),
    "tokens_per_param_of": ("all", "scaling"),
    "attention_kernel": ("auto", "cudnn", "flash", "flash3", "flash4"),
    "recompute_scope": ("blocks", "elementwise"),
    "compile_mode": ("default", "reduce_overhead", "max_autotune", "max_autotune_no_cudagraphs"),
}

OPTIONAL_CHOICES = (
    *("ddp_backend", "adamwprune_base", "muon_adjust_lr_fn", "norm", "activation"),
    *("movement_rule", "tokens_per_param_of", "compile_mode"),
    "recompute_scope",
)
# The parts of nanochat's models; None with other architectures.
NANOCHAT_FIELDS = (
    *("n_kv_head", "value_embeddings", "smear", "backout", "residual_scales", "window_pattern", "qk_scale"),
    *("rope_base", "logit_softcap", "norm", "activation"),
)
# Fields that a run has to share with the checkpoint that it starts from.
SAME_AS_INITIAL = (
    *("arch", "n_layer", "n_head", "n_embd", "block_size", "bias", "weight_tying", "tokenizer", "vocab_size"),
    *NANOCHAT_FIELDS,
)
# Optimizers whose states cannot be sharded over the ranks (zero_stage), with the reason.
NOT_SHARDED = {
    "adamwprune": "ranks all weights by their optimizer states",
    "schedulefree": "is evaluated at an average of its weights, which the ranks do not exchange",
}
VOCAB = {"gpt2": GPT2_VOCAB, "byte": BYTE_VOCAB}  # char and bpe: the dataset decides

AT_LEAST_ONE = (
    *("n_layer", "n_head", "n_embd", "block_size", "vocab_multiple", "vocab_size", "batch_size"),
    *("gradient_accumulation", "global_batch", "max_iters", "eval_interval", "eval_samples", "log_interval"),
    *("num_gpus", "num_nodes", "cpu_threads", "keep_checkpoints"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFields:
    """The fields of "train" that readers of a run.json use. None: missing."""

    model: str | None = None
    arch: str | None = None
    n_layer: Size | None = None
    n_head: Size | None = None
    n_embd: Size | None = None
    block_size: Size | None = None
    bias: bool | None = None
    weight_tying: bool | None = None
    n_kv_head: Size | None = None
    value_embeddings: bool | None = None
    smear: bool | None = None
    backout: bool | None = None
    residual_scales: bool | None = None
    window_pattern: str | None = None
    qk_scale: Amount | None = None
    rope_base: Amount | None = None
    logit_softcap: Amount | None = None
    norm: str | None = None
    activation: str | None = None
    vocab_size: Size | None = None
    dataset: str | None = None
    data_path: str | None = None
    data_sha256: str | None = None
    data_shards: Size | None = None
    data_layout: str | None = None  # None: flat
    data_streaming: bool | None = None
    tokenizer: str | None = None
    batch_size: Size | None = None
    global_batch: Size | None = None
    max_iters: Size | None = None
    learning_rate: Amount | None = None
    schedule: str | None = None
    min_lr: Amount | None = None
    warmup_steps: Size | None = None
    wsd_decay_fraction: Amount | None = None
    eval_interval: Size | None = None
    eval_samples: Size | None = None
    checkpoint_interval: Size | None = None
    seed: Int | None = None
    optimizer: str | None = None
    pruning: str | None = None
    target_sparsity: Amount | None = None
    device: str | None = None
    dtype: str | None = None
    deterministic: bool | None = None  # None: not on GPUs
    num_gpus: Size | None = None
    num_nodes: Size | None = None  # None: 1
    cpu_threads: Size | None = None
    max_time: Amount | None = None
    max_cost: Amount | None = None
    gpu_hour_price: Amount | None = None
    machine_hour_price: Amount | None = None
    early_stopping_patience: Size | None = None

    @property
    def shape(self) -> ModelShape | None:
        """The sizes of the model; None if one of them is missing or impossible."""
        layers, heads, width = self.n_layer, self.n_head, self.n_embd
        block_size, vocabulary = self.block_size, self.vocab_size
        if not (layers and heads and width and block_size and vocabulary) or width % heads:
            return None
        parts = parts_of(self)
        if parts is None or heads % (parts.get("n_kv_head") or heads):
            return None
        return ModelShape(
            n_layer=layers,
            n_head=heads,
            n_embd=width,
            block_size=block_size,
            vocab_size=vocabulary,
            bias=self.bias is not False,
            weight_tying=self.weight_tying is not False,
            **parts,
        )

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens that all ranks together read in one step."""
        return self.global_batch * self.block_size if self.global_batch and self.block_size else None


def parts_of(train: TrainFields) -> dict[str, Any] | None:
    """Return the architecture and its parts as arguments of ModelShape; None if one is missing or impossible."""
    if train.arch not in NANOCHAT:
        return {"arch": train.arch or "gpt2"}
    parts = {name: getattr(train, name) for name in NANOCHAT_FIELDS}
    if None in parts.values() or not WINDOWS.fullmatch(parts["window_pattern"]):
        return None
    return {"arch": train.arch, **parts}


def dollars_per_hour(train: TrainFields | TrainConfig) -> float | None:
    """Return the price of what an attempt holds: of its GPUs, or on the CPU of the machine; None without a price."""
    if train.device == "cpu":
        return train.machine_hour_price or None
    return (train.gpu_hour_price or 0.0) * (train.num_gpus or 1) or None


def cost_limit_s(train: TrainFields | TrainConfig) -> float | None:
    """Return the time (s) that the cost budget of a run pays for, None without a budget or a price."""
    price = dollars_per_hour(train)
    return None if train.max_cost is None or price is None else 3600 * train.max_cost / price


def budget_s(train: TrainFields | TrainConfig) -> float | None:
    """Return the time (s) that the time and cost budgets of a run allow, None without a budget."""
    limits = (train.max_time, cost_limit_s(train))
    return min((limit for limit in limits if limit is not None), default=None)


@cache
def field_types(config: type[Any]) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Return the name of each field of a dataclass with its types, None included."""
    hints = get_type_hints(config)
    return tuple((field.name, get_args(hints[field.name]) or (hints[field.name],)) for field in fields(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(TrainFields):
    """The complete configuration of a run: each symbol CONFIG_GPT2_X is the field x.

    None: the symbol does not apply to this run. The fields without a symbol come last; they follow from the others.
    """

    # Model
    model: str  # name in kmatrix.shapes.NAMED, "depth" or "custom"
    arch: str  # class in gpt2.model.registry.MODELS
    depth: int | None  # layers; with aspect_ratio and head_dim it decides the sizes of model "depth"
    aspect_ratio: int | None  # width per layer
    head_dim: int | None
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int  # tokens per sequence
    dropout: float
    bias: bool
    weight_tying: bool
    n_kv_head: int | None  # heads of keys and values; 0: as many as of queries; from here to activation: nanochat's
    value_embeddings: bool | None
    smear: bool | None
    backout: bool | None
    residual_scales: bool | None
    window_pattern: str | None  # L or S per layer, repeated
    qk_scale: float | None
    rope_base: float | None
    logit_softcap: float | None  # 0: none
    norm: str | None
    activation: str | None
    init_from: str  # checkpoint with the initial weights; "": random weights
    vocab_multiple: int  # the embedding is padded to a multiple of this

    # Data
    dataset: str
    data_path: str  # directory of the shards; "" until the data are prepared
    data_mix: str | None  # as `parse_mix` reads it
    text_column: str | None
    data_tokens: int | None  # tokens to prepare; 0: as many as the run reads
    val_percent: int | None  # percent of the documents
    shard_tokens: int | None  # tokens per shard
    data_layout: str  # of the sequences
    data_streaming: bool  # the shards are prepared while the run reads them
    tokenizer: str
    bpe_vocab_size: int | None

    # Steps and learning rate
    batch_size: int  # sequences per micro-batch
    gradient_accumulation: int  # micro-batches per step on each rank
    max_iters: int  # steps; 0 in a plan whose length depends on data that are not prepared yet
    learning_rate: float  # peak
    embedding_lr: float | None  # peak of the embeddings; None, here and below: that of the optimizer
    head_lr: float | None  # peak of the output layer, if it has its own weights
    scalar_lr: float | None  # peak of biases and gains
    schedule: str
    min_lr: float
    warmup_fraction: float | None  # of max_iters
    warmup_steps: int
    wsd_decay_fraction: float | None  # of max_iters
    grad_clip: float  # L2 norm; 0: no clipping

    # Evaluation and logging
    eval_interval: int  # steps
    eval_samples: int  # sequences
    log_interval: int  # steps
    log_norms: bool  # norms per layer in metrics.jsonl
    seed: int
    hellaswag: str  # path of hellaswag_val.jsonl; "": not measured
    core: str  # path of eval_bundle.zip; "": not measured
    benchmark_interval: int | None  # steps; 0: at the end only
    core_examples: int | None  # of each task; 0: all
    sample_interval: int  # steps; 0: no sample texts
    sample_prompt: str | None

    # Checkpoints
    save_checkpoint: bool  # at the end of the run
    checkpoint_interval: int  # steps; 0: none by steps
    keep_checkpoints: int  # newest periodic checkpoints that are kept
    save_best: bool

    # Optimizer
    optimizer: str
    weight_decay: float
    sgd_momentum: float | None
    sgd_nesterov: bool | None
    beta1: float | None
    beta2: float | None
    epsilon: float | None
    amsgrad: bool | None
    adamwprune_base: str | None
    spam_theta: float | None
    spam_interval: int | None  # steps
    spam_warmup_steps: int | None
    muon_momentum: float | None
    muon_nesterov: bool | None
    muon_ns_steps: int | None  # Newton-Schulz iterations
    muon_split_qkv: bool | None  # queries, keys and values are orthogonalized one by one
    muon_adjust_lr_fn: str | None  # as in torch.optim.Muon
    muon_adamw_lr: float | None
    adafactor_beta2_decay: float | None
    adafactor_clip: float | None
    soap_frequency: int | None  # steps

    # Pruning
    pruning: str
    movement_rule: str | None
    target_sparsity: float | None  # 0 to 1
    pruning_warmup: float | None  # of max_iters
    pruning_ramp_end: float | None  # of max_iters
    pruning_frequency: int | None  # steps

    # Device
    device: str
    use_ddp: bool
    num_gpus: int  # ranks, on all nodes together
    num_nodes: int  # machines, each with num_gpus / num_nodes ranks
    ddp_backend: str | None
    ddp_find_unused_params: bool | None
    ddp_bf16_gradients: bool | None
    zero_stage: int  # 1: optimizer states are sharded over the ranks
    dtype: str
    tf32: bool
    bf16_stream: bool | None  # the residual stream is bfloat16 under autocast
    fp8: bool | None  # products of the blocks' layers
    deterministic: bool  # equal runs are equal bit for bit on GPUs, too
    flash_attention: bool
    attention_kernel: str  # on GPUs
    recompute: bool  # activation checkpointing
    recompute_scope: str | None  # of all, or of what is cheap
    loss_chunk: int  # rows of logits computed at once; 0: the default of kmatrix.shapes.loss_rows; -1: all
    compile: bool
    compile_mode: str | None  # of torch.compile, with underscores
    cpu_threads: int  # per rank; 0 in a plan: an equal share of the cores
    peak_tflops: float | None  # dense TFLOP/s of one device; None: from the table in kmatrix.shapes

    # Limits; max_iters already includes max_tokens, max_epochs and tokens_per_param
    max_time: float | None  # seconds
    max_cost: float | None  # dollars
    gpu_hour_price: float | None  # dollars per GPU hour
    machine_hour_price: float | None  # dollars per hour of a run on the CPU
    max_tokens: float | None
    max_epochs: float | None
    tokens_per_param: float | None
    tokens_per_param_of: str | None  # the parameters that count: all, or scaling (kmatrix.shapes)

    # Early stopping and memory
    early_stopping_patience: int  # evaluations; 0: off
    early_stopping_min_delta: float | None  # nats/token
    stall_factor: float  # multiple of the usual step time
    profile: str  # "i:j": profile steps i to j - 1; "": off

    # Without a symbol
    vocab_size: int
    global_batch: int  # sequences per step, all ranks
    data_sha256: str = ""
    init_sha256: str = ""  # of the initial weights in init_from
    data_shards: int = 0  # training shards that are read, from the first; 0: all

    def check(self) -> None:
        """Raise ConfigError if a value is out of range, or contradicts another field."""
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known and not (name in OPTIONAL_CHOICES and value is None):
                raise refused(name, value, f"known are {', '.join(known)}")
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise refused(name, getattr(self, name), "it must be a whole number above zero")
        self._check_agreement()

    def _check_agreement(self) -> None:
        """Raise ConfigError if two fields contradict each other, because one of them would be ignored."""
        if self.n_embd % self.n_head:
            raise refused("n_head", self.n_head, f"it does not divide the width of {self.n_embd}")
        sizes = (self.n_layer, self.n_head, self.n_embd)
        expected = NAMED.get(self.model, sizes)
        if self.model == "depth" and self.depth and self.aspect_ratio and self.head_dim:
            expected = by_depth(self.depth, self.aspect_ratio, self.head_dim)
        if sizes != expected:
            raise refused("n_layer, n_head, n_embd", sizes, f"model {self.model} is {expected}")
        self._check_parts()
        if self.vocab_size != VOCAB.get(self.tokenizer, self.vocab_size):
            raise refused(
                "vocab_size", self.vocab_size, f"tokenizer {self.tokenizer} has {VOCAB[self.tokenizer]} tokens"
            )
        by_state = self.pruning == "state"
        if self.pruning != "none" and by_state != (self.optimizer == "adamwprune"):
            raise refused("pruning", self.pruning, f"with optimizer {self.optimizer}: adamwprune alone prunes by state")
        product = self.batch_size * self.gradient_accumulation * self.num_gpus
        if self.global_batch != product:
            raise refused("global_batch", self.global_batch, f"micro-batch x accumulation x ranks is {product}")
        self._check_ranks()
        for name in ("bf16_stream", "fp8"):
            if getattr(self, name) and self.dtype != "bf16":
                raise refused(name, True, f"it belongs to dtype bf16, not {self.dtype}")
        # One step of difference: the planner rounds to whole steps.
        if self.warmup_fraction is not None and abs(self.warmup_fraction * self.max_iters - self.warmup_steps) > 1:
            raise refused("warmup_steps", self.warmup_steps, f"warmup_fraction is {self.warmup_fraction}")

    def _check_ranks(self) -> None:
        """Raise ConfigError if the fields of the ranks contradict each other."""
        if self.num_gpus > 1 and not (self.use_ddp and self.ddp_backend):
            raise refused("num_gpus", self.num_gpus, "more than one rank needs use_ddp and a ddp_backend")
        if self.zero_stage not in (0, 1):
            raise refused("zero_stage", self.zero_stage, "known are 0 and 1")
        if self.zero_stage and self.optimizer in NOT_SHARDED:
            raise refused("zero_stage", self.zero_stage, f"{self.optimizer} {NOT_SHARDED[self.optimizer]}")
        if self.num_gpus % self.num_nodes:
            raise refused("num_nodes", self.num_nodes, f"it does not divide the {self.num_gpus} ranks")

    def _check_parts(self) -> None:
        """Raise ConfigError if the architecture does not allow a field, or lacks a part."""
        parts = {name: getattr(self, name) for name in NANOCHAT_FIELDS}
        if self.arch not in NANOCHAT:
            for name, value in parts.items():
                if value is not None:
                    raise refused(name, value, f"architecture {self.arch} has no such part")
            return
        for name, value in parts.items():
            if value is None:
                raise refused(name, value, f"architecture {self.arch} needs it")
        for name, value, wanted in (("bias", self.bias, False), ("weight_tying", self.weight_tying, False)):
            if value != wanted:
                raise refused(name, value, f"architecture {self.arch} has none")
        if self.dropout:
            raise refused("dropout", self.dropout, f"architecture {self.arch} has none")
        if self.n_kv_head is None or self.n_kv_head < 0 or self.n_head % (self.n_kv_head or self.n_head):
            raise refused("n_kv_head", self.n_kv_head, f"it does not divide the {self.n_head} heads")
        if (self.n_embd // self.n_head) % 2:
            raise refused("n_head", self.n_head, f"rotary positions need an even width per head, of {self.n_embd}")
        if self.n_embd < SMEAR_CHANNELS:
            raise refused("n_embd", self.n_embd, f"architecture {self.arch} needs at least {SMEAR_CHANNELS}")
        if not WINDOWS.fullmatch(self.window_pattern or ""):
            raise refused("window_pattern", self.window_pattern, "expected letters L and S")

    def with_micro_batch(self, micro_batch: int) -> Self:
        """Return the same training with another micro-batch size. Accumulation changes; the global batch does not."""
        sequences = self.global_batch // self.num_gpus
        if micro_batch < 1 or sequences % micro_batch:
            raise refused("--micro-batch", micro_batch, f"it does not divide the {sequences} sequences of a rank")
        return replace(self, batch_size=micro_batch, gradient_accumulation=sequences // micro_batch)

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return ModelShape(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            block_size=self.block_size,
            vocab_size=self.vocab_size,
            bias=self.bias,
            weight_tying=self.weight_tying,
            **(parts_of(self) or {}),
        )

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.num_gpus // self.num_nodes

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together read in one step."""
        return self.global_batch * self.block_size

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the checked configuration. Raise ConfigError if a field is missing, unknown or of another type."""
        names = cls.names()
        # Strict: a run with an ignored or missing field would not be the planned one.
        for name in values:
            if name not in names:
                raise ConfigError(
                    f"train.{name} in run.json is not a field of the trainer", hint="plan the matrix again"
                )
        for name in names:
            if name not in values:
                raise ConfigError(f"train.{name} is missing in run.json", hint="plan the matrix again")
        config = cls(**{name: typed(name, values[name], types) for name, types in field_types(TrainConfig)})
        config.check()
        return config

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all fields, in the order of run.json."""
        return tuple(TrainConfig.__annotations__)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values: what `from_json` reads."""
        return {name: getattr(self, name) for name in self.names()}


def typed(name: str, value: Any, types: tuple[type, ...]) -> Any:
    """Return a JSON value as a field of one of these types. An integer may stand for a float, nothing else."""
    if value is None and NoneType in types:
        return None
    if type(value) is int and abs(value) > EXACT:
        raise refused(name, "an integer of many digits", f"it must be at most {EXACT}")
    if float in types and type(value) is int:
        return float(value)
    if type(value) not in types or value is None or (isinstance(value, float) and not isfinite(value)):
        raise refused(name, value, f"it must be {' or '.join(t.__name__ for t in types if t is not NoneType)}")
    return value


def refused(name: str, value: object, why: str) -> ConfigError:
    """Return the error of a field with an invalid value."""
    return ConfigError(f"train.{name} is {value!r}", why=why, hint="plan the matrix again")


def changes(asked: TrainConfig, used: TrainConfig, why: str) -> list[dict[str, Any]]:
    """Return the fields that differ from what was asked, as run_used.json lists them in `adjusted`."""
    before, after = asked.to_json(), used.to_json()
    return [
        {"field": name, "from": before[name], "to": after[name], "why": why}
        for name in before
        if before[name] != after[name]
    ]


MOST_SEQUENCES = 10_000  # upper bound of the sum of integer weights: finer ones would need too long a cycle
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][a-z]{3}")  # ISO 639 and ISO 15924, as FineWeb-2 and FinePDFs name folders
BY_LANGUAGE = ("fineweb2", "finepdfs")  # datasets whose path is a language
PART = re.compile(r"([a-z][a-z0-9]*)(?:=(.+))?:([0-9.]+)")


@dataclass(frozen=True, slots=True)
class MixPart:
    """One dataset of a mix."""

    dataset: str
    path: str  # "" if the dataset needs none
    weight: int  # sequences per cycle; a cycle is the sum of all weights


def parse_mix(text: str) -> tuple[MixPart, ...]:
    """Return the parts of "DATASET:WEIGHT DATASET=PATH:WEIGHT ...", weights as integers without a common divisor.

    Raises ValueError if the text is not a mix.
    """
    found: list[tuple[str, str, Fraction]] = []
    for word in re.split(r"[\s+]+", text.strip()):
        match = PART.fullmatch(word)
        if not match:
            raise ValueError(f"{word!r} is not DATASET:WEIGHT or DATASET=PATH:WEIGHT")
        try:
            # Exact: as floats, 0.1 and 0.2 have no small common multiple.
            weight = Fraction(match[3])
        except ValueError:
            raise ValueError(f"{match[3]!r} in {word!r} is not a number") from None
        if not weight:
            raise ValueError(f"the weight in {word!r} must be above 0")
        found.append((match[1], match[2] or "", weight))
    names = [part[:2] for part in found]
    twice = next((name for name, _ in names if names.count((name, _)) > 1), None)
    if twice:
        raise ValueError(f"{twice} is listed twice")
    # Smallest integers in the same proportion.
    scale = lcm(*(weight.denominator for _, _, weight in found))
    whole = [int(weight * scale) for _, _, weight in found]
    divisor = gcd(*whole)
    if sum(whole) // divisor > MOST_SEQUENCES:
        raise ValueError(f"the weights {' '.join(map(str, whole))} add up to more than {MOST_SEQUENCES}")
    return tuple(
        MixPart(dataset, path, weight // divisor) for (dataset, path, _), weight in zip(found, whole, strict=True)
    )
