"""run.json's "train": the training configuration that the control side and the trainer share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from kmatrix.errors import ConfigError, RecordError
from kmatrix.records.decode import Amount, Int, Size, convert
from kmatrix.shapes import MODEL_FIELDS, ModelFields, ModelShape

# Fields that a run has to share with the checkpoint that it starts from.
SAME_AS_INITIAL = (*MODEL_FIELDS, "tokenizer")


def neutral(default: Any) -> Any:
    """Return a field that cannot change a result: it is not part of a run's id, and no axis."""
    return field(default=default, metadata={"changes_result": False, "changes_training": False})


def how(default: Any) -> Any:
    """Return a field that decides how, where and on what is computed: it may differ when a run is resumed.

    It is part of the id, because the last bits of a result depend on it, or what is measured.
    """
    return field(default=default, metadata={"changes_training": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(ModelFields):
    """The configuration of a run: each symbol CONFIG_GPT2_X is the field x.

    The first are ModelFields; those without a symbol come last. None: the symbol does not apply to this run.
    The planner sets every field, and the trainer needs all of them; for other readers the defaults stand for fields
    that a file does not have.
    """

    # Model
    model: str = ""  # name in kmatrix.shapes.NAMED, "depth" or "custom"
    depth: int | None = None  # layers; with aspect_ratio and head_dim it decides the sizes of model "depth"
    aspect_ratio: int | None = None  # width per layer
    head_dim: int | None = None
    dropout: float = 0.0
    init_from: str = how("")  # checkpoint with the initial weights; "": random weights
    vocab_multiple: int = 0  # the embedding is padded to a multiple of this

    # Data
    dataset: str = ""
    data_path: str = how("")  # directory of the shards; "" until the data are prepared
    data_mix: str | None = None  # as `parse_mix` reads it
    text_column: str | None = None
    data_tokens: int | None = None  # tokens to prepare; 0: as many as the run reads
    val_percent: int | None = None  # percent of the documents
    shard_tokens: int | None = None  # tokens per shard
    data_layout: str = ""  # of the sequences
    data_streaming: bool = False  # the shards are prepared while the run reads them
    tokenizer: str = ""
    bpe_vocab_size: int | None = None

    # Steps and learning rate
    batch_size: Size = how(0)  # sequences per micro-batch
    gradient_accumulation: int = how(0)  # micro-batches per step on each rank
    max_iters: Size = 0  # steps
    learning_rate: Amount = 0.0  # peak
    embedding_lr: float | None = None  # peak of the embeddings; None, here and below: that of the optimizer
    head_lr: float | None = None  # peak of the output layer, if it has its own weights
    scalar_lr: float | None = None  # peak of biases and gains
    schedule: str = ""
    min_lr: Amount = 0.0
    warmup_fraction: float | None = None  # of max_iters
    warmup_steps: Size = 0
    wsd_decay_fraction: Amount | None = None  # of max_iters
    grad_clip: float = 0.0  # L2 norm; 0: no clipping

    # Evaluation and logging
    eval_interval: Size = how(0)  # steps
    eval_samples: Size = how(0)  # sequences
    log_interval: int = neutral(0)  # steps
    log_norms: bool = neutral(False)  # norms per layer in metrics.jsonl
    seed: Int = -1  # -1: missing
    hellaswag: str = how("")  # path of hellaswag_val.jsonl; "": not measured
    core: str = how("")  # path of eval_bundle.zip; "": not measured
    benchmark_interval: int | None = how(None)  # steps; 0: at the end only
    core_examples: int | None = how(None)  # of each task; 0: all
    sample_interval: int = neutral(0)  # steps; 0: no sample texts
    sample_prompt: str | None = neutral(None)

    # Checkpoints
    save_checkpoint: bool = neutral(False)  # at the end of the run
    checkpoint_interval: Size = neutral(0)  # steps; 0: none by steps
    keep_checkpoints: int = neutral(0)  # newest periodic checkpoints that are kept
    save_best: bool = neutral(False)

    # Optimizer
    optimizer: str = ""
    weight_decay: float = 0.0
    sgd_momentum: float | None = None
    sgd_nesterov: bool | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    amsgrad: bool | None = None
    adamwprune_base: str | None = None
    spam_theta: float | None = None
    spam_interval: int | None = None  # steps
    spam_warmup_steps: int | None = None
    muon_momentum: float | None = None
    muon_nesterov: bool | None = None
    muon_ns_steps: int | None = None  # Newton-Schulz iterations
    muon_split_qkv: bool | None = None  # queries, keys and values are orthogonalized one by one
    muon_adjust_lr_fn: str | None = None  # as in torch.optim.Muon
    muon_adamw_lr: float | None = None
    adafactor_beta2_decay: float | None = None
    adafactor_clip: float | None = None
    soap_frequency: int | None = None  # steps

    # Pruning
    pruning: str = ""
    target_sparsity: Amount | None = None  # 0 to 1
    pruning_warmup: float | None = None  # of max_iters
    pruning_ramp_end: float | None = None  # of max_iters
    pruning_frequency: int | None = None  # steps

    # Device
    device: str = how("")
    use_ddp: bool = how(False)
    num_gpus: Size = how(0)  # ranks, on all nodes together
    num_nodes: Size = 0  # machines, each with num_gpus / num_nodes ranks
    ddp_backend: str | None = how(None)
    ddp_find_unused_params: bool | None = how(None)
    ddp_bf16_gradients: bool | None = how(None)
    zero_stage: int = how(0)  # 1: optimizer states are sharded over the ranks
    dtype: str = how("")
    bf16_stream: bool | None = how(None)  # the residual stream is bfloat16 under autocast
    fp8: bool | None = how(None)  # products of the blocks' layers
    deterministic: bool = how(False)  # equal runs are equal bit for bit on GPUs, too
    attention_kernel: str = how("")  # on GPUs
    recompute: bool = how(False)  # activation checkpointing
    loss_chunk: int = how(0)  # rows of logits computed at once; 0: the default of kmatrix.shapes.loss_rows; -1: all
    compile: bool = how(False)
    compile_mode: str | None = how(None)  # of torch.compile, with underscores
    cpu_threads: Size = how(0)  # per rank; 0 in a plan: an equal share of the cores
    peak_tflops: float | None = neutral(None)  # dense TFLOP/s of one device; None: from the table in kmatrix.shapes

    # Limits; max_iters already includes max_tokens and tokens_per_param
    max_time: Amount | None = None  # seconds
    max_cost: Amount | None = None  # dollars
    gpu_hour_price: Amount | None = how(None)  # dollars per GPU hour
    machine_hour_price: Amount | None = how(None)  # dollars per hour of a run on the CPU
    max_tokens: float | None = None
    tokens_per_param: float | None = None  # of kmatrix.shapes.ModelShape.budget_params

    # Early stopping and memory
    early_stopping_patience: Size = 0  # evaluations; 0: off
    early_stopping_min_delta: float | None = None  # nats/token
    stall_factor: float = neutral(0.0)  # multiple of the usual step time
    profile: str = neutral("")  # "i:j": profile steps i to j - 1; "": off

    # Without a symbol, as vocab_size
    global_batch: Size = 0  # sequences per step, all ranks
    data_sha256: str = ""
    init_sha256: str = ""  # of the initial weights in init_from
    data_shards: Size = 0  # training shards that are read, from the first; 0: all

    def with_micro_batch(self, micro_batch: int) -> Self:
        """Return the same training with another micro-batch size. Accumulation changes; the global batch does not."""
        sequences = self.global_batch // self.num_gpus
        if micro_batch < 1 or sequences % micro_batch:
            why = f"it does not divide the {sequences} sequences of a rank"
            raise ConfigError(f"a micro-batch of {micro_batch}", why=why, hint="choose a divisor")
        return replace(self, batch_size=micro_batch, gradient_accumulation=sequences // micro_batch)

    @property
    def shape(self) -> ModelShape:
        """The sizes and parts of the model. Raises ValueError if they are missing or impossible."""
        return ModelShape(**{name: getattr(self, name) for name in MODEL_FIELDS})

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
        """Return a complete configuration. Raises RecordError if a field is missing, unknown or of another type."""
        # Strict: a run with an ignored or missing field would not be the planned one.
        if wrong := sorted(set(values) ^ set(cls.names())):
            why = "it is missing" if wrong[0] not in values else "it is not a field of the trainer"
            raise RecordError(f"train.{wrong[0]} in run.json", why=why, hint="plan the matrix again")
        return convert(values, cls, "train in run.json")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all fields, in the order of run.json."""
        return tuple(one.name for one in fields(cls))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values: what `from_json` reads."""
        return {name: getattr(self, name) for name in self.names()}


# The one list of fields that cannot change a result; and of those that may differ when a run is resumed.
NEUTRAL = frozenset(one.name for one in fields(TrainConfig) if not one.metadata.get("changes_result", True))
MAY_DIFFER = frozenset(one.name for one in fields(TrainConfig) if not one.metadata.get("changes_training", True))
