"""What a run must not break although each setting is valid by itself, and what it may cost.

One list of rules: configuration targets and the expansion of a matrix ask it, and the trainer when it begins.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kmatrix.errors import ConfigError
from kmatrix.forms import BY_LANGUAGE, LANGUAGE, MixPart, parse_mix
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import NANOCHAT, SMEAR_CHANNELS, WINDOWS

CORE_SHOTS = 10  # examples that most tasks of CORE show before a question
# Datasets that need a path
PLACES = {"shards": "<folder>", "folder": "<folder or pattern>", "hub": "OWNER/NAME", "fineweb2": "deu_Latn"}
WITH_PATH = (*PLACES, *BY_LANGUAGE)  # datasets that may have one
MIXABLE = (
    *("stdlib", "finewebedu", "fineweb", "fineweb2", "finepdfs", "cosmopedia", "climbmix", "medqa"),
    *("openwebtext", "tinystories", "shakespeare", "hub", "folder", "shards"),
)


def broken(train: TrainConfig) -> Iterator[str]:
    """Yield what is wrong with a run, each with the names of the symbols and the fix.

    train: num_gpus 0 and device "auto" stand for what this machine has.
    """
    for rule in RULES:
        if why := rule(train):
            yield why


def check(train: TrainConfig) -> None:
    """Raise ConfigError if a run breaks a rule."""
    if why := next(broken(train), None):
        raise ConfigError(why, hint="change what it names, and plan the matrix again")


def length_is_bounded(train: TrainConfig) -> str | None:
    """Check that the length of a run is limited by steps, tokens, time or money."""
    if train.max_iters or train.max_time or train.max_cost:
        return None
    return "MAX_ITERS=0 needs MAX_TOKENS, TOKENS_PER_PARAM, MAX_TIME or MAX_COST"


def money_needs_a_price(train: TrainConfig) -> str | None:
    """Check that a cost limit has a price."""
    return price_problem(train, "MAX_COST") if train.max_cost else None


def price_problem(train: TrainConfig, limit: str) -> str | None:
    """Return why a limit in dollars cannot be kept: there is no price per GPU hour, on the CPU per machine hour."""
    prices = {"GPU_HOUR_PRICE": train.gpu_hour_price, "MACHINE_HOUR_PRICE": train.machine_hour_price}
    names = {"cpu": ["MACHINE_HOUR_PRICE"], "cuda": ["GPU_HOUR_PRICE"]}.get(train.device, list(prices))
    if any(prices[name] for name in names):
        return None
    return f"{limit} needs a {names[0]} above 0" + (" on the CPU" if train.device == "cpu" else "")


def profile_is_a_span(train: TrainConfig) -> str | None:
    """Check that the profiled steps are i:j with i < j."""
    first, _, last = (train.profile or "0:1").partition(":")
    if first.isdecimal() and last.isdecimal() and int(first) < int(last):
        return None
    return f"PROFILE={train.profile} is not a range of steps: expected i:j with i < j"


def benchmarks_can_be_asked(train: TrainConfig) -> str | None:
    """Check that there are examples to show before a question of CORE, and that any text becomes tokens."""
    if (train.core or train.hellaswag) and train.tokenizer == "char":
        return "HELLASWAG and CORE have characters that are not in the data: TOKENIZER=char cannot encode them"
    examples = train.core_examples if train.core else 0
    if examples and examples <= CORE_SHOTS:
        return f"CORE_EXAMPLES={examples} is too few: tasks show {CORE_SHOTS} other examples before each; 0 takes all"
    return None


def heads_divide_width(train: TrainConfig) -> str | None:
    """Check that each head has the same number of channels."""
    if train.n_embd % train.n_head:
        return f"N_EMBD={train.n_embd} is not a multiple of N_HEAD={train.n_head}"
    return None


def nanochat_has_its_parts(train: TrainConfig) -> str | None:
    """Check the sizes and parts of nanochat's models."""
    if train.arch not in NANOCHAT:
        return None
    heads, width, shared = train.n_head, train.n_embd, train.n_kv_head
    if train.dropout:
        return f"ARCH={train.arch} has no dropout: set DROPOUT=0"
    if not WINDOWS.fullmatch(train.window_pattern or ""):
        return f"WINDOW_PATTERN={train.window_pattern}: expected a letter L or S per layer, such as SSSL"
    if shared and heads % shared:
        return f"N_KV_HEAD={shared} does not divide the {heads} attention heads"
    if width // heads % 2:
        return f"ARCH={train.arch} needs an even width per head, not {width} over {heads} heads"
    return f"ARCH={train.arch} needs a width of at least {SMEAR_CHANNELS}" if width < SMEAR_CHANNELS else None


def least_rate_is_least(train: TrainConfig) -> str | None:
    """Check that the minimum learning rate is not above the peak."""
    if train.min_lr > train.learning_rate:
        return f"MIN_LR={train.min_lr:g} is above LEARNING_RATE={train.learning_rate:g}"
    return None


def group_rates_need_a_rate(train: TrainConfig) -> str | None:
    """Check that a rate of its own for a group of parameters has a schedule: that is relative to the main rate."""
    rates = {"EMBEDDING_LR": train.embedding_lr, "HEAD_LR": train.head_lr, "SCALAR_LR": train.scalar_lr}
    names = [name for name, rate in rates.items() if rate is not None]
    if names and not train.learning_rate:
        return f"{names[0]} needs a LEARNING_RATE above 0, whose schedule it follows"
    return None


def nesterov_needs_momentum(train: TrainConfig) -> str | None:
    """Check the momentum of Nesterov SGD: PyTorch refuses 0."""
    return "SGD_NESTEROV needs an SGD_MOMENTUM above 0" if train.sgd_nesterov and not train.sgd_momentum else None


def pruning_has_a_ramp(train: TrainConfig) -> str | None:
    """Check that the pruning ramp ends at a later step than it begins: its formula divides by their distance."""
    begin, end, steps = train.pruning_warmup, train.pruning_ramp_end, train.max_iters
    if begin is None or end is None:
        return None
    if begin >= end or (steps and round(begin * steps) == round(end * steps)):
        of = f" in a run of {steps} steps" if steps else ""
        return f"PRUNING_RAMP_END={end:g} is not after PRUNING_WARMUP={begin:g}{of}"
    return None


def spam_warms_up_within_an_interval(train: TrainConfig) -> str | None:
    """Check that the warm-up after a momentum reset ends before the next reset."""
    interval, warmup = train.spam_interval, train.spam_warmup_steps
    if interval and warmup and warmup > interval:
        return f"SPAM_WARMUP_STEPS={warmup} is above SPAM_INTERVAL={interval}"
    return None


def mix_can_be_read(train: TrainConfig) -> str | None:
    """Check that a mix lists datasets with weights."""
    if train.dataset != "mix":
        return None
    try:
        parts = parse_mix(train.data_mix or "")
    except ValueError as error:
        return f'DATASET=mix needs DATA_MIX="finewebedu:65 tinystories:34 stdlib:1": {error}'
    found = (why for part in parts if (why := _part_problem(part)))
    return next((f"DATA_MIX={train.data_mix}: {why}" for why in found), None)


def _part_problem(part: MixPart) -> str | None:
    """Return what is wrong with a dataset of a mix, or None."""
    dataset, path = part.dataset, part.path
    if dataset not in MIXABLE:
        near = difflib.get_close_matches(dataset, MIXABLE, 3)
        known = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(MIXABLE)}"
        return f"unknown dataset {dataset!r}: {known}"
    if path and dataset not in WITH_PATH:
        return f"{dataset} has no path: write {dataset}:<weight>"
    return f"{dataset} {why}" if (why := path_problem(dataset, path)) else None


def path_problem(dataset: str, path: str) -> str | None:
    """Return what is wrong with the path of a dataset, or None. path: as it is asked for, not where shards are."""
    if dataset in PLACES and not path:
        return f"needs a path: {PLACES[dataset]}"
    if dataset in BY_LANGUAGE and path and not LANGUAGE.fullmatch(path):
        return "needs a language such as deu_Latn"
    return None


def nodes_divide_ranks(train: TrainConfig) -> str | None:
    """Check that every node of a run has the same number of ranks."""
    ranks, nodes = train.num_gpus, train.num_nodes
    if nodes > 1 and not ranks:
        return f"NUM_NODES={nodes} needs NUM_GPUS, the number of GPUs on all nodes together"
    if not nodes or ranks % nodes == 0:  # 0: not resolved yet
        return None
    return f"NUM_GPUS={ranks} is not a multiple of NUM_NODES={nodes}: pass NUM_GPUS={max(nodes, ranks - ranks % nodes)}"


def dollars_per_hour(train: TrainConfig) -> float | None:
    """Return the price of what an attempt holds: of its GPUs, or on the CPU of the machine; None without a price."""
    if train.device == "cpu":
        return train.machine_hour_price or None
    return (train.gpu_hour_price or 0.0) * (train.num_gpus or 1) or None


def cost_limit_s(train: TrainConfig) -> float | None:
    """Return the time (s) that the cost budget of a run pays for, None without a budget or a price."""
    price = dollars_per_hour(train)
    return None if train.max_cost is None or price is None else 3600 * train.max_cost / price


def budget_s(train: TrainConfig) -> float | None:
    """Return the time (s) that the time and cost budgets of a run allow, None without a budget."""
    limits = (train.max_time, cost_limit_s(train))
    return min((limit for limit in limits if limit is not None), default=None)


RULES = (
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
    mix_can_be_read,
    spam_warms_up_within_an_interval,
    nodes_divide_ranks,
)
