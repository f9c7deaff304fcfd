"""`TrainConfig`: everything that one training run needs, resolved, typed and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Any, Self, get_args, get_type_hints

from kmatrix.errors import ConfigError
from kmatrix.shapes import BYTE_VOCAB, GPT2_VOCAB, NAMED, ModelShape, by_depth

CHOICES: dict[str, tuple[str, ...]] = {
    "model": (*NAMED, "depth", "custom"),
    "dataset": (
        *("stdlib", "finewebedu", "fineweb", "openwebtext", "tinystories", "shakespeare"),
        *("hub", "folder", "shards", "mix"),
    ),
    "tokenizer": ("gpt2", "byte", "char", "bpe"),
    "schedule": ("cosine", "linear", "constant", "wsd"),
    "adamwprune_base": ("adamw", "adamwspam"),
    "pruning": ("none", "magnitude", "movement", "state"),
    "device": ("cuda", "cpu"),
    "dtype": ("fp32", "bf16"),
    "ddp_backend": ("nccl", "gloo"),
    "nan_policy": ("stop", "skip", "rollback"),
    "spike_policy": ("record", "skip", "rollback"),
    "oom_policy": ("fail", "halve"),
}
MAY_BE_NONE = ("ddp_backend", "adamwprune_base", "spike_policy")
VOCAB = {"gpt2": GPT2_VOCAB, "byte": BYTE_VOCAB}  # of char and bpe: the dataset's
AT_LEAST_ONE = (
    *("n_layer", "n_head", "n_embd", "block_size", "vocab_multiple", "vocab_size", "batch_size"),
    *("gradient_accumulation", "global_batch", "max_iters", "eval_interval", "eval_samples", "log_interval"),
    *("num_gpus", "cpu_threads", "keep_checkpoints"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The symbols CONFIG_GPT2_X as fields x; None where a symbol does not apply to this run.

    batch_size, global_batch: sequences.  block_size: tokens.  num_gpus: ranks.
    data_tokens, shard_tokens: tokens.  val_percent: of the documents.  data_shards: of training, the first so many that
    are read; 0 for all.
    peak_tflops: dense peak of one device in TFLOP/s; None: from the table by the device's name.
    max_time: seconds.  max_cost: dollars.  gpu_hour_price: dollars for a GPU and hour.
    max_tokens, max_epochs, tokens_per_param: max_iters holds what follows from them.
    early_stopping_patience, bad_steps_limit: evaluations, steps.  early_stopping_min_delta: nats.  spike_window: steps.
    stall_factor: times the usual time.  stall_floor: seconds.  profile: "i:j", steps i to j - 1, or "".
    The fields without a symbol of their own stand last: they follow from others.
    """

    model: str
    arch: str
    depth: int | None
    aspect_ratio: int | None
    head_dim: int | None
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    dropout: float
    bias: bool
    weight_tying: bool
    vocab_multiple: int
    dataset: str
    data_path: str
    data_mix: str | None
    text_column: str | None
    data_tokens: int | None
    val_percent: int | None
    shard_tokens: int | None
    tokenizer: str
    bpe_vocab_size: int | None
    batch_size: int
    gradient_accumulation: int
    max_iters: int
    learning_rate: float
    schedule: str
    min_lr: float
    warmup_fraction: float | None
    warmup_steps: int
    wsd_decay_fraction: float | None
    grad_clip: float
    eval_interval: int
    eval_samples: int
    log_interval: int
    seed: int
    hellaswag: str
    hellaswag_interval: int | None
    hellaswag_examples: int | None
    sample_interval: int
    sample_prompt: str | None
    sample_tokens: int | None
    sample_temperature: float | None
    save_checkpoint: bool
    checkpoint_interval: int
    keep_checkpoints: int
    keep_every: int
    save_best: bool
    async_checkpoint: bool
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
    spam_interval: int | None
    spam_warmup_steps: int | None
    muon_momentum: float | None
    muon_nesterov: bool | None
    muon_ns_steps: int | None
    muon_adamw_lr: float | None
    adafactor_beta2_decay: float | None
    adafactor_clip: float | None
    soap_frequency: int | None
    pruning: str
    target_sparsity: float | None
    pruning_warmup: float | None
    pruning_ramp_end: float | None
    pruning_frequency: int | None
    pruning_global: bool | None
    device: str
    use_ddp: bool
    num_gpus: int
    ddp_backend: str | None
    ddp_find_unused_params: bool | None
    dtype: str
    tf32: bool
    flash_attention: bool
    recompute: bool
    loss_chunk: int
    compile: bool
    cpu_threads: int
    peak_tflops: float | None
    max_time: float | None
    max_cost: float | None
    gpu_hour_price: float | None
    max_tokens: float | None
    max_epochs: float | None
    tokens_per_param: float | None
    early_stopping_patience: int
    early_stopping_min_delta: float | None
    nan_policy: str
    spike_zscore: float
    spike_window: int | None
    spike_policy: str | None
    bad_steps_limit: int | None
    oom_policy: str
    stall_factor: float
    stall_floor: int
    profile: str
    vocab_size: int
    global_batch: int
    data_sha256: str
    data_shards: int
    checkpoint_dir: str

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known and not (name in MAY_BE_NONE and value is None):
                raise refused(name, value, f"known are {', '.join(known)}")
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise refused(name, getattr(self, name), "it must be a whole number above zero")
        self._check_agreement()

    def _check_agreement(self) -> None:
        """Refuse fields that contradict each other: one of them would be ignored."""
        if self.n_embd % self.n_head:
            raise refused("n_head", self.n_head, f"it does not divide the width of {self.n_embd}")
        sizes = (self.n_layer, self.n_head, self.n_embd)
        expected = NAMED.get(self.model, sizes)
        if self.model == "depth" and self.depth and self.aspect_ratio and self.head_dim:
            expected = by_depth(self.depth, self.aspect_ratio, self.head_dim)
        if sizes != expected:
            raise refused("n_layer, n_head, n_embd", sizes, f"model {self.model} is {expected}")
        if self.vocab_size != VOCAB.get(self.tokenizer, self.vocab_size):
            raise refused(
                "vocab_size", self.vocab_size, f"tokenizer {self.tokenizer} has {VOCAB[self.tokenizer]} tokens"
            )
        if (self.pruning == "state") != (self.optimizer == "adamwprune"):
            raise refused("pruning", self.pruning, f"with optimizer {self.optimizer}: adamwprune alone prunes by state")
        product = self.batch_size * self.gradient_accumulation * self.num_gpus
        if self.global_batch != product:
            raise refused("global_batch", self.global_batch, f"micro-batch x accumulation x ranks is {product}")
        if self.num_gpus > 1 and not (self.use_ddp and self.ddp_backend):
            raise refused("num_gpus", self.num_gpus, "more than one rank needs use_ddp and a ddp_backend")
        if self.warmup_fraction is not None and abs(self.warmup_fraction * self.max_iters - self.warmup_steps) > 1:
            raise refused("warmup_steps", self.warmup_steps, f"warmup_fraction is {self.warmup_fraction}")

    def with_micro_batch(self, micro_batch: int) -> Self:
        """Return the same training in other micro-batches: the accumulation follows, and the global batch stays."""
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
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together read in one step."""
        return self.global_batch * self.block_size

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration in "train" of a run.json; every field must be there, and no other."""
        hints = get_type_hints(cls)
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(
                    f"train.{name} in run.json is not a field of the trainer", fix="plan the matrix again"
                )
        for name in names:
            if name not in values:
                raise ConfigError(f"train.{name} is missing in run.json", fix="plan the matrix again")
        return cls(**{name: typed(name, values[name], hints[name]) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values: what `from_json` reads."""
        return asdict(self)


def typed(name: str, value: Any, hint: Any) -> Any:
    """Return a JSON value as the field's type; a whole number may stand for a float, nothing else for another."""
    types = get_args(hint) or (hint,)
    if value is None and NoneType in types:
        return None
    if float in types and type(value) is int:
        return float(value)
    if type(value) not in types or value is None:
        raise refused(name, value, f"it must be {' or '.join(t.__name__ for t in types if t is not NoneType)}")
    return value


def refused(name: str, value: object, why: str) -> ConfigError:
    """Return the error of a field that cannot be put in force."""
    return ConfigError(f"train.{name} is {value!r}", why=why, fix="plan the matrix again")


def changes(asked: TrainConfig, used: TrainConfig, why: str) -> list[dict[str, Any]]:
    """Return the fields that differ from what was asked, as run_used.json lists them in `adjusted`."""
    before, after = asked.to_json(), used.to_json()
    return [
        {"field": name, "from": before[name], "to": after[name], "why": why}
        for name in before
        if before[name] != after[name]
    ]
