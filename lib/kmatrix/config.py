"""Symbols -> Config: the one place that knows what a symbol means to the control side."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kmatrix.depth_rule import batch_sequences, least_rate
from kmatrix.errors import ConfigError
from kmatrix.forms import BY_LANGUAGE, LANGUAGE, MixPart, parse_mix, variables_of
from kmatrix.kconfig.assignments import TRACKERS
from kmatrix.packing import fewest_nodes
from kmatrix.records.matrix import LOCAL
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import MODEL_FIELDS, NAMED, NANOCHAT, SMEAR_CHANNELS, VOCABULARIES, WINDOWS, ModelShape, by_depth
from kmatrix.text import plural

PREFIX = "GPT2_"
ASSUMED_CHARACTERS = 256  # vocabulary of a text that is not prepared yet
# Fields without a symbol: derived from others, or known when a matrix is made
DERIVED = {"vocab_size", "global_batch", "data_sha256", "data_shards", "init_sha256"}
SYMBOLS = {name: f"{PREFIX}{name.upper()}" for name in TrainConfig.names() if name not in DERIVED}
GPU_HOST_THREADS = 8  # CPU threads per rank on a GPU: more do not speed up a training loop
BATCH_BY_SIZE = -1  # of PARALLEL_BATCH_SIZE: by nanochat's rule
CORE_SHOTS = 10  # examples that most tasks of CORE show before a question
Values = Callable[[str], str | None]
# Datasets that need a path
PLACES = {"shards": "<folder>", "folder": "<folder or pattern>", "hub": "OWNER/NAME", "fineweb2": "deu_Latn"}
WITH_PATH = (*PLACES, *BY_LANGUAGE)  # datasets that may have one
MIXABLE = (
    *("stdlib", "finewebedu", "fineweb", "fineweb2", "finepdfs", "cosmopedia", "climbmix", "medqa"),
    *("openwebtext", "tinystories", "shakespeare", "hub", "folder", "shards"),
)


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
        results_dir=_need(symbols, "RESULTS_DIR"),
        data_dir=_need(symbols, "DATA_DIR"),
        checkpoint_dir=_need(symbols, "CHECKPOINT_DIR"),
        run_timeout_s=_need(symbols, "RUN_TIMEOUT"),
        reuse=_need(symbols, "REUSE"),
        monitor_hz=_need(symbols, "GPU_MONITOR_HZ") if _need(symbols, "GPU_MONITOR") else 0,
        trackers=tuple(name for name, symbol in TRACKERS.items() if _need(symbols, symbol)),
        tracker_project=_need(symbols, "TRACKER_PROJECT"),
        tracker_limit_s=_need(symbols, "TRACKER_LIMIT"),
        preflight=_need(symbols, "PREFLIGHT"),
        on_finish=_need(symbols, "ON_FINISH"),
        allow_risk=_need(symbols, "ALLOW_RISK"),
        engine=_need(symbols, "ENGINE"),
        gpus_per_node=symbols.get("GPUS_PER_NODE") or 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configuration of one run, resolved except for the dataset and the machine."""

    train: TrainConfig
    asked_iters: int  # steps; 0: none were asked for
    bound: str  # the field that decides the number of steps; "": none does, a budget alone limits the run

    @property
    def shape(self) -> ModelShape:
        return self.train.shape

    @property
    def global_batch(self) -> int:
        return self.train.global_batch

    @property
    def ranks(self) -> int:
        return self.train.num_gpus

    @property
    def device(self) -> str:
        return self.train.device

    @property
    def steps(self) -> int:
        """0 if a budget alone limits the run."""
        return self.train.max_iters

    @property
    def tokens_per_step(self) -> int:
        return self.train.tokens_per_step

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step


def read_run(symbols: Mapping[str, Any]) -> RunConfig:
    """Return a run's configuration. symbols: effective typed values, with device and number of GPUs resolved."""
    fields = {field: symbols[name] for field, name in SYMBOLS.items()}
    layers, heads, width = _sizes(fields)
    sequences = fields["batch_size"] * fields["num_gpus"]  # per micro-batch of all ranks
    fields.update(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        vocab_size=_vocabulary(fields["tokenizer"], fields["bpe_vocab_size"]),
    )
    wanted = symbols["PARALLEL_BATCH_SIZE"]
    if wanted == BATCH_BY_SIZE:
        wanted = batch_by_size(fields)
    accumulation = wanted // sequences if wanted else fields["gradient_accumulation"]
    fields.update(
        gradient_accumulation=accumulation,
        global_batch=sequences * accumulation,
        min_lr=_least_rate(fields),
        warmup_steps=fields["warmup_steps"] or 0,
        ddp_backend=_backend(fields["ddp_backend"], fields["device"]) if fields["use_ddp"] else None,
        data_path=fields["data_path"] or "",
        init_from="" if fields["init_from"] == "none" else fields["init_from"],
    )
    return _bounded(fields)


def batch_by_size(fields: Mapping[str, Any]) -> int:
    """Return the global batch in sequences by nanochat's rule, from the sizes and the parts that decide it."""
    return batch_sequences(_shape(fields))


def _shape(fields: Mapping[str, Any]) -> ModelShape:
    return ModelShape(**{name: fields[name] for name in MODEL_FIELDS if name in fields})


def with_vocabulary(run: RunConfig, vocab_size: int) -> RunConfig:
    """Return a configuration with the vocabulary of its data, which can decide its steps (TOKENS_PER_PARAM)."""
    if run.train.vocab_size == vocab_size:
        return run
    return _bounded({**run.train.to_json(), "vocab_size": vocab_size, "max_iters": run.asked_iters})


def _bounded(fields: Mapping[str, Any]) -> RunConfig:
    """Return a run's configuration with its number of steps and of warm-up steps. fields: max_iters as asked for."""
    params = _shape(fields).budget_params if fields["tokens_per_param"] else 0
    found = length(fields, params=params, tokens_per_step=fields["global_batch"] * fields["block_size"])
    part = fields["warmup_fraction"]
    warmup = fields["warmup_steps"] if part is None else round(part * found.steps)
    train = TrainConfig(**{**fields, "max_iters": found.steps, "warmup_steps": warmup})
    return RunConfig(train=train, asked_iters=fields["max_iters"], bound=found.bound)


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
    return variables_of(texts.get("TRAINER_ENV", ""))


def nodes_divide_ranks(value: Values) -> str | None:
    """Check that every node of a run has the same number of ranks."""
    ranks, nodes = (int(value(name) or 0) for name in ("GPT2_NUM_GPUS", "GPT2_NUM_NODES"))
    if nodes > 1 and not ranks:
        return f"NUM_NODES={nodes} needs NUM_GPUS, the number of GPUs on all nodes together"
    if not nodes or ranks % nodes == 0:  # 0: not resolved yet
        return None
    fitting = max(nodes, ranks - ranks % nodes)
    return f"NUM_GPUS={ranks} is not a multiple of NUM_NODES={nodes}: pass NUM_GPUS={fitting}"


def ranks_fit_on_nodes(value: Values) -> str | None:
    """Check that no node of a run has more ranks than GPUS_PER_NODE."""
    ranks, nodes, most = (int(value(name) or 0) for name in ("GPT2_NUM_GPUS", "GPT2_NUM_NODES", "GPUS_PER_NODE"))
    if not ranks or not nodes or not most or ranks <= most * nodes:
        return None
    fix = f"pass NUM_NODES={fewest_nodes(ranks, most)}, or NUM_GPUS={most * nodes}"
    return f"NUM_GPUS={ranks} does not fit on {plural(nodes, 'node')} with GPUS_PER_NODE={most}: {fix}"


def global_batch_divides(value: Values) -> str | None:
    """Check that the global batch is a multiple of micro-batch x ranks."""
    wanted = int(value("PARALLEL_BATCH_SIZE") or 0)
    micro, ranks = (max(int(value(name) or 0), 1) for name in ("GPT2_BATCH_SIZE", "GPT2_NUM_GPUS"))
    if wanted > 0 and wanted % (micro * ranks):
        return f"a global batch of {wanted} is not a multiple of {micro} (micro-batch) x {ranks} (ranks)"
    return None


def batch_of_the_size_divides(value: Values) -> str | None:
    """Check that the global batch by the size of the model is a multiple of micro-batch x ranks."""
    layers, heads, width = _sizes_of(value)
    shared = int(value("GPT2_N_KV_HEAD") or 0)
    if (
        int(value("PARALLEL_BATCH_SIZE") or 0) != BATCH_BY_SIZE
        or not heads
        or width % heads
        or (shared and heads % shared)
    ):
        return None
    fields = {
        "arch": value("GPT2_ARCH"),
        "n_layer": layers,
        "n_head": heads,
        "n_embd": width,
        "block_size": int(value("GPT2_BLOCK_SIZE") or 1),
        "vocab_size": _vocabulary(value("GPT2_TOKENIZER") or "", int(value("GPT2_BPE_VOCAB_SIZE") or 0)),
        "n_kv_head": shared,
        "value_embeddings": value("GPT2_VALUE_EMBEDDINGS") == "y",
    }
    wanted = batch_by_size(fields)
    micro, ranks = (max(int(value(name) or 0), 1) for name in ("GPT2_BATCH_SIZE", "GPT2_NUM_GPUS"))
    if wanted % (micro * ranks) == 0:
        return None
    fitting = next((batch for batch in range(micro, 0, -1) if wanted % (batch * ranks) == 0), 0)
    fix = f": pass BATCH_SIZE={fitting}" if fitting else ""
    shared_by = f"{micro} (micro-batch) x {ranks} (ranks)"
    return f"PARALLEL_BATCH_SIZE={BATCH_BY_SIZE} makes {wanted} sequences, not a multiple of {shared_by}{fix}"


def heads_divide_width(value: Values) -> str | None:
    """Check that the width of a custom model is a multiple of its heads."""
    width, heads = value("GPT2_N_EMBD"), value("GPT2_N_HEAD")
    if width and heads and int(width) % int(heads):
        return f"a width of {width} is not a multiple of {heads} heads"
    return None


def nanochat_has_its_parts(value: Values) -> str | None:
    """Check the sizes and parts of nanochat's models."""
    arch = value("GPT2_ARCH")
    if arch not in NANOCHAT:
        return None
    if float(value("GPT2_DROPOUT") or 0):
        return f"ARCH={arch} has no dropout: set DROPOUT=0"
    if not WINDOWS.fullmatch(value("GPT2_WINDOW_PATTERN") or ""):
        return f"WINDOW_PATTERN={value('GPT2_WINDOW_PATTERN')}: expected a letter L or S per layer, such as SSSL"
    _, heads, width = _sizes_of(value)
    shared = int(value("GPT2_N_KV_HEAD") or 0)
    problems = {
        f"N_KV_HEAD={shared} does not divide the {heads} attention heads": shared and heads % shared,
        f"ARCH={arch} needs an even width per head, not {width} over {heads} heads": heads and width // heads % 2,
        f"ARCH={arch} needs a width of at least {SMEAR_CHANNELS}": width < SMEAR_CHANNELS,
    }
    return next((problem for problem, is_there in problems.items() if is_there), None)


def least_rate_is_least(value: Values) -> str | None:
    """Check that the minimum learning rate is not above the peak."""
    least, peak = value("GPT2_MIN_LR"), value("GPT2_LEARNING_RATE")
    if least and peak and float(least) > float(peak):
        return f"MIN_LR={least} is above LEARNING_RATE={peak}"
    return None


def group_rates_need_a_rate(value: Values) -> str | None:
    """Check that a rate of its own for a group of parameters has a schedule: that is relative to the main rate."""
    names = [name for name in ("EMBEDDING_LR", "HEAD_LR", "SCALAR_LR") if value(f"GPT2_{name}")]
    if names and float(value("GPT2_LEARNING_RATE") or 0) == 0:
        return f"{names[0]} needs a LEARNING_RATE above 0, whose schedule it follows"
    return None


def nesterov_needs_momentum(value: Values) -> str | None:
    """Check the momentum of Nesterov SGD: PyTorch refuses 0."""
    if value("GPT2_SGD_NESTEROV") == "y" and float(value("GPT2_SGD_MOMENTUM") or 0) == 0:
        return "SGD_NESTEROV needs an SGD_MOMENTUM above 0"
    return None


def pruning_has_a_ramp(value: Values) -> str | None:
    """Check that the pruning ramp ends at a later step than it begins."""
    if (value("GPT2_PRUNING") or "none") == "none":
        return None
    steps = int(value("GPT2_MAX_ITERS") or 0)  # 0: not known yet
    begin, end = (float(value(f"GPT2_PRUNING_{name}") or 0) for name in ("WARMUP", "RAMP_END"))
    if begin >= end or (steps and round(begin * steps) == round(end * steps)):
        return f"PRUNING_RAMP_END={end:g} is not after PRUNING_WARMUP={begin:g} in a run of {steps or 'unknown'} steps"
    return None


def spam_warms_up_within_an_interval(value: Values) -> str | None:
    """Check that the warm-up after a momentum reset ends before the next reset."""
    interval, warmup = (int(value(f"GPT2_SPAM_{name}") or 0) for name in ("INTERVAL", "WARMUP_STEPS"))
    if interval and warmup > interval:
        return f"SPAM_WARMUP_STEPS={warmup} is above SPAM_INTERVAL={interval}"
    return None


def own_data_need_a_place(value: Values) -> str | None:
    """Check that a custom dataset has a path."""
    dataset, path = value("GPT2_DATASET"), value("GPT2_DATA_PATH")
    if dataset in PLACES and not path:
        return f'DATASET={dataset} needs DATA_PATH="{PLACES[dataset]}"'
    if dataset in BY_LANGUAGE and path and not LANGUAGE.fullmatch(path):
        return f"DATA_PATH={path} is not a language of {dataset}: expected one such as deu_Latn"
    return None


def mix_can_be_read(value: Values) -> str | None:
    """Check that a mix lists datasets with weights."""
    text = value("GPT2_DATA_MIX")
    if value("GPT2_DATASET") != "mix":
        return None
    try:
        parts = parse_mix(text or "")
    except ValueError as error:
        return f'DATASET=mix needs DATA_MIX="finewebedu:65 tinystories:34 stdlib:1": {error}'
    found = (why for part in parts if (why := _part_problem(part)))
    return next((f"DATA_MIX={text}: {why}" for why in found), None)


def _part_problem(part: MixPart) -> str | None:
    """Return what is wrong with a dataset of a mix, or None."""
    dataset, path = part.dataset, part.path
    if dataset not in MIXABLE:
        near = difflib.get_close_matches(dataset, MIXABLE, 3)
        known = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(MIXABLE)}"
        return f"unknown dataset {dataset!r}: {known}"
    if dataset in PLACES and not path:
        return f"{dataset} needs a path: {dataset}={PLACES[dataset]}:<weight>"
    if path and dataset in BY_LANGUAGE and not LANGUAGE.fullmatch(path):
        return f"{path} is not a language: expected one such as {dataset}=deu_Latn"
    if path and dataset not in WITH_PATH:
        return f"{dataset} has no path: write {dataset}:<weight>"
    return None


def length_is_bounded(value: Values) -> str | None:
    """Check that the length of a run is limited by steps, tokens, time or money."""
    limits = ("MAX_TOKENS", "TOKENS_PER_PARAM", "MAX_TIME", "MAX_COST")
    if value("GPT2_MAX_ITERS") == "0" and not any(value(f"GPT2_{name}") for name in limits):
        return f"MAX_ITERS=0 needs {', '.join(limits[:-1])} or {limits[-1]}"
    return None


def money_needs_a_price(value: Values) -> str | None:
    """Check that a cost limit, of the run or the matrix, has a price: per GPU hour, on the CPU per machine hour."""
    limited = [name for name in ("MAX_COST", "BUDGET_DOLLARS") if _amount(value, name)]
    device = value("GPT2_DEVICE")
    prices = {"cpu": ("MACHINE_HOUR_PRICE",), "cuda": ("GPU_HOUR_PRICE",)}
    names = prices.get(device or "", ("GPU_HOUR_PRICE", "MACHINE_HOUR_PRICE"))
    if limited and not any(_amount(value, name) for name in names):
        return f"{limited[0]} needs a {names[0]} above 0" + (" on the CPU" if device == "cpu" else "")
    return None


def _amount(value: Values, name: str) -> float:
    """Return a price or a limit in dollars, 0.0 if it is not set."""
    return float(value(name if name == "BUDGET_DOLLARS" else f"GPT2_{name}") or 0)


def profile_is_a_span(value: Values) -> str | None:
    """Check that the profiled steps are i:j with i < j."""
    text = value("GPT2_PROFILE")
    first, _, last = (text or "0:1").partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        return f"PROFILE={text} is not a range of steps: expected i:j with i < j"
    return None


def benchmarks_can_be_asked(value: Values) -> str | None:
    """Check that there are examples to show before a question of CORE, and that any text becomes tokens."""
    if (value("GPT2_CORE") or value("GPT2_HELLASWAG")) and value("GPT2_TOKENIZER") == "char":
        return "HELLASWAG and CORE have characters that are not in the data: TOKENIZER=char cannot encode them"
    examples = int(value("GPT2_CORE_EXAMPLES") or 0) if value("GPT2_CORE") else 0
    if 0 < examples <= CORE_SHOTS:
        return f"CORE_EXAMPLES={examples} is too few: tasks show {CORE_SHOTS} other examples before each; 0 takes all"
    return None


RULES = (
    global_batch_divides,
    batch_of_the_size_divides,
    length_is_bounded,
    money_needs_a_price,
    profile_is_a_span,
    benchmarks_can_be_asked,
    heads_divide_width,
    nanochat_has_its_parts,
    least_rate_is_least,
    nesterov_needs_momentum,
    group_rates_need_a_rate,
    pruning_has_a_ramp,
    own_data_need_a_place,
    mix_can_be_read,
    spam_warms_up_within_an_interval,
    nodes_divide_ranks,
    ranks_fit_on_nodes,
)


def _need(symbols: Mapping[str, Any], name: str) -> Any:
    if symbols.get(name) is None:
        raise ConfigError(f"the Kconfig files define no {name}", hint="add it to your Kconfig file")
    return symbols[name]


def _vocabulary(tokenizer: str, bpe_size: int | None) -> int:
    """Return the vocabulary that is assumed before the data are prepared."""
    if tokenizer == "bpe" and bpe_size is not None:
        return bpe_size
    return VOCABULARIES.get(tokenizer, ASSUMED_CHARACTERS)


def _sizes_of(value: Values) -> tuple[int, int, int]:
    names = ("depth", "aspect_ratio", "head_dim", "n_layer", "n_head", "n_embd")
    sizes = {name: int(value(f"GPT2_{name.upper()}") or 0) for name in names}
    return _sizes({**sizes, "model": value("GPT2_MODEL") or "custom"})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a run."""

    steps: int  # 0: none of the fields is set
    bound: str  # the field that decides; "": none does


def length(fields: Mapping[str, Any], *, params: int, tokens_per_step: int) -> Length:
    """Return the length of a run: the smallest of max_iters, max_tokens and tokens_per_param x params.

    fields: of a run, max_iters as asked for.  A bound is never exceeded, but every run has at least one step.
    """
    per_param = fields["tokens_per_param"]
    tokens = {"max_tokens": fields["max_tokens"], "tokens_per_param": None if per_param is None else per_param * params}
    steps = {name: max(1, math.floor(n / tokens_per_step + ROUNDING)) for name, n in tokens.items() if n is not None}
    if fields["max_iters"]:
        steps["max_iters"] = fields["max_iters"]
    if not steps:
        return Length(steps=0, bound="")
    bound = min(steps, key=lambda name: steps[name])
    return Length(steps=steps[bound], bound=bound)
