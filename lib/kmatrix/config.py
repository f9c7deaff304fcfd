"""Symbols -> Config: the one place that knows what a symbol means to the control side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kmatrix.depth_rule import batch_sequences, least_rate
from kmatrix.errors import ConfigError
from kmatrix.forms import pairs
from kmatrix.kconfig.assignments import TRACKERS
from kmatrix.packing import fewest_nodes
from kmatrix.records.matrix import LOCAL
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import broken, path_problem, price_problem
from kmatrix.shapes import MODEL_FIELDS, NAMED, VOCABULARIES, ModelShape, by_depth
from kmatrix.text import plural

PREFIX = "GPT2_"
ASSUMED_CHARACTERS = 256  # vocabulary of a text that is not prepared yet
# Fields without a symbol: derived from others, or known when a matrix is made
DERIVED = {"vocab_size", "global_batch", "data_sha256", "data_shards", "init_sha256"}
SYMBOLS = {name: f"{PREFIX}{name.upper()}" for name in TrainConfig.names() if name not in DERIVED}
GPU_HOST_THREADS = 8  # CPU threads per rank on a GPU: more do not speed up a training loop
BATCH_BY_SIZE = -1  # of PARALLEL_BATCH_SIZE: by nanochat's rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of the control side."""

    results_dir: str  # directories are as written: relative ones start at the project's root
    data_dir: str
    checkpoint_dir: str
    run_timeout_s: int  # 0: no timeout
    reuse: bool
    monitor_hz: int  # samples/s of the GPU recorder, 0: no recording
    trackers: tuple[str, ...] = ()  # in a fixed order
    tracker_project: str = ""  # "": computed from host and folder
    tracker_limit_s: int = 0  # seconds that trackers may take after the end of a run
    preflight: bool = False  # train two steps of each shape first
    on_finish: str = ""  # command to run after the matrix, "" for none
    allow_risk: bool = False  # start runs that are estimated to be impossible
    engine: str = LOCAL  # where runs execute: local, slurm or kubernetes
    gpus_per_node: int = 0  # most ranks on one node; 0: not known


def read(symbols: Mapping[str, Any]) -> Config:
    """Return the settings of the control side. symbols: effective typed values."""
    return Config(
        results_dir=symbols["RESULTS_DIR"],
        data_dir=symbols["DATA_DIR"],
        checkpoint_dir=symbols["CHECKPOINT_DIR"],
        run_timeout_s=symbols["RUN_TIMEOUT"],
        reuse=symbols["REUSE"],
        monitor_hz=symbols["GPU_MONITOR_HZ"] if symbols["GPU_MONITOR"] else 0,
        trackers=tuple(name for name, symbol in TRACKERS.items() if symbols[symbol]),
        tracker_project=symbols["TRACKER_PROJECT"],
        tracker_limit_s=symbols["TRACKER_LIMIT"],
        preflight=symbols["PREFLIGHT"],
        on_finish=symbols["ON_FINISH"],
        allow_risk=symbols["ALLOW_RISK"],
        engine=symbols["ENGINE"],
        gpus_per_node=symbols["GPUS_PER_NODE"] or 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configuration of one run, resolved except for the dataset and the machine."""

    train: TrainConfig
    asked_iters: int  # steps; 0: none were asked for
    asked_batch: int  # sequences per step; 0: what accumulation makes
    bound: str  # the field that decides the number of steps; "": none does, a budget alone limits the run

    @property
    def tokens(self) -> int:
        return self.train.max_iters * self.train.tokens_per_step


def read_run(symbols: Mapping[str, Any]) -> RunConfig:
    """Return a run's configuration. symbols: effective typed values, with device and number of GPUs resolved."""
    fields = {field: symbols[name] for field, name in SYMBOLS.items()}
    layers, heads, width = _sizes(fields)
    sequences = fields["batch_size"] * (fields["num_gpus"] or 1)  # per micro-batch of all ranks
    fields.update(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        vocab_size=_vocabulary(fields["tokenizer"], fields["bpe_vocab_size"]),
    )
    wanted = symbols["PARALLEL_BATCH_SIZE"]
    if wanted == BATCH_BY_SIZE:
        shape = _shape(fields)
        wanted = batch_sequences(shape) if shape else 0
    accumulation = max(1, wanted // sequences) if wanted else fields["gradient_accumulation"]
    fields.update(
        gradient_accumulation=accumulation,
        global_batch=sequences * accumulation,
        min_lr=_least_rate(fields),
        warmup_steps=fields["warmup_steps"] or 0,
        ddp_backend=_backend(fields["ddp_backend"], fields["device"]) if fields["use_ddp"] else None,
        data_path=fields["data_path"] or "",
        init_from="" if fields["init_from"] == "none" else fields["init_from"],
    )
    return _bounded(fields, asked_batch=wanted)


def _shape(fields: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a model, None if it is impossible: kmatrix.rules says why."""
    try:
        return ModelShape(**{name: fields[name] for name in MODEL_FIELDS})
    except ValueError:
        return None


def with_vocabulary(run: RunConfig, vocab_size: int) -> RunConfig:
    """Return a configuration with the vocabulary of its data, which can decide its steps (TOKENS_PER_PARAM)."""
    if run.train.vocab_size == vocab_size:
        return run
    fields = {**run.train.to_json(), "vocab_size": vocab_size, "max_iters": run.asked_iters}
    return _bounded(fields, asked_batch=run.asked_batch)


def _bounded(fields: Mapping[str, Any], *, asked_batch: int) -> RunConfig:
    """Return a run's configuration with its number of steps and of warm-up steps. fields: max_iters as asked for."""
    shape = _shape(fields) if fields["tokens_per_param"] else None
    params = shape.budget_params if shape else 0
    steps, bound = length(fields, params=params, tokens_per_step=fields["global_batch"] * fields["block_size"])
    part = fields["warmup_fraction"]
    warmup = fields["warmup_steps"] if part is None else round(part * steps)
    train = TrainConfig(**{**fields, "max_iters": steps, "warmup_steps": warmup})
    return RunConfig(train=train, asked_iters=fields["max_iters"], asked_batch=asked_batch, bound=bound)


def cpu_threads(asked: int, *, device: str, cores: int, ranks: int) -> int:
    """Return the CPU threads per rank: `asked`, or an equal share of the cores if that is 0."""
    share = max(1, cores // ranks)
    # On the CPU all cores compute; next to a GPU, threads only prepare batches.
    return asked or (share if device == "cpu" else min(share, GPU_HOST_THREADS))


def resolve_device(asked: str, gpu_counts: Sequence[int], detected: int, *, backend: str | None = None) -> str:
    """Return "cuda" or "cpu" for `auto`, other devices unchanged.

    gpu_counts: values of NUM_GPUS (0: all GPUs).  detected: number of GPUs that may be used here.
    `auto` selects the CPU only if no run asks for several GPUs or for nccl, which needs GPUs.
    """
    if asked != "auto":
        return asked
    return "cuda" if detected or backend == "nccl" or max(gpu_counts, default=0) > 1 else "cpu"


def resolve_count(asked: int, device: str, detected: int) -> int:
    """Return the number of ranks: for 0 all detected GPUs, or one process on the CPU."""
    if asked:
        return asked
    if device == "cuda" and not detected:
        raise ConfigError(
            "NUM_GPUS=0 selects all GPUs, but no GPU was found",
            hint="pass NUM_GPUS=<number> to plan for another machine, or DEVICE=cpu",
        )
    return detected if device == "cuda" else 1


def environment(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the trainer of a run gets. texts: effective values by symbol."""
    return pairs(texts.get("TRAINER_ENV", ""))


def broken_rules(symbols: Mapping[str, Any], run: RunConfig) -> Iterator[str]:
    """Yield what is wrong with a run, with the names of the symbols and the fix.

    symbols: effective typed values, those of `read_run`.
    """
    yield from (why for why in (_batch_problem(symbols, run), _nodes_problem(symbols, run)) if why)
    if why := path_problem(run.train.dataset, run.train.data_path):
        yield f"DATASET={run.train.dataset} {why} (DATA_PATH)"
    if symbols["BUDGET_DOLLARS"] and (why := price_problem(run.train, "BUDGET_DOLLARS")):
        yield why
    yield from broken(run.train)


def _batch_problem(symbols: Mapping[str, Any], run: RunConfig) -> str | None:
    """Return why a global batch is not a multiple of micro-batch x ranks, None if it is."""
    wanted, micro, ranks = run.asked_batch, run.train.batch_size, run.train.num_gpus or 1
    if wanted % (micro * ranks) == 0:
        return None
    asked = symbols["PARALLEL_BATCH_SIZE"]
    makes = f" makes {wanted} sequences," if asked == BATCH_BY_SIZE else " is"
    fitting = next((batch for batch in range(micro, 0, -1) if wanted % (batch * ranks) == 0), 0)
    fix = f": pass BATCH_SIZE={fitting}" if fitting else ""
    return f"PARALLEL_BATCH_SIZE={asked}{makes} not a multiple of BATCH_SIZE={micro} x NUM_GPUS={ranks}{fix}"


def _nodes_problem(symbols: Mapping[str, Any], run: RunConfig) -> str | None:
    """Return why a node of a run has more ranks than GPUS_PER_NODE, None if it has not."""
    ranks, nodes, most = run.train.num_gpus, run.train.num_nodes, symbols["GPUS_PER_NODE"]
    if not ranks or not nodes or not most or ranks <= most * nodes:
        return None
    fix = f"pass NUM_NODES={fewest_nodes(ranks, most)}, or NUM_GPUS={most * nodes}"
    return f"NUM_GPUS={ranks} does not fit on {plural(nodes, 'node')} with GPUS_PER_NODE={most}: {fix}"


def _vocabulary(tokenizer: str, bpe_size: int | None) -> int:
    """Return the vocabulary that is assumed before the data are prepared."""
    if tokenizer == "bpe" and bpe_size is not None:
        return bpe_size
    return VOCABULARIES.get(tokenizer, ASSUMED_CHARACTERS)


def _sizes(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    if fields["model"] == "depth":
        return by_depth(fields["depth"], fields["aspect_ratio"], fields["head_dim"])
    if fields["model"] == "custom":
        return fields["n_layer"], fields["n_head"], fields["n_embd"]
    return NAMED[fields["model"]]


def _least_rate(fields: Mapping[str, Any]) -> float:
    """Return the learning rate at the end of a run."""
    peak: float = fields["learning_rate"]
    if fields["schedule"] == "constant":
        return peak
    asked: float | None = fields.get("min_lr")
    return least_rate(fields["optimizer"], peak) if asked is None else asked


def _backend(asked: str, device: str) -> str:
    """Return the backend of torch.distributed. asked: gloo, nccl or auto."""
    if asked != "auto":
        return asked
    return "nccl" if device == "cuda" else "gloo"


ROUNDING = 1e-9  # relative: 3e9 tokens are a whole number of steps of 0.1


def length(fields: Mapping[str, Any], *, params: int, tokens_per_step: int) -> tuple[int, str]:
    """Return the steps of a run, 0 if nothing limits them, and the field that decides, "" for none.

    They are the smallest of max_iters, max_tokens and tokens_per_param x params.

    fields: of a run, max_iters as asked for.  A bound is never exceeded, but every run has at least one step.
    """
    per_param = fields["tokens_per_param"]
    tokens = {"max_tokens": fields["max_tokens"], "tokens_per_param": None if per_param is None else per_param * params}
    steps = {name: max(1, math.floor(n / tokens_per_step + ROUNDING)) for name, n in tokens.items() if n is not None}
    if fields["max_iters"]:
        steps["max_iters"] = fields["max_iters"]
    if not steps:
        return 0, ""
    bound = min(steps, key=lambda name: steps[name])
    return steps[bound], bound
