"""Find what makes a run impossible before it starts: memory, and a budget that ends before the first evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kmatrix.plan.feasibility import GpuModel, at_mfu, deeper, largest_batch, largest_depth, mfu_band
from kmatrix.plan.memory import MemoryNeed, memory
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import NAMED, ModelShape
from kmatrix.text import duration, memory_size

# The planned memory may be too high by this share (bench/published.py, bench/cpu_memory.py): less is only a warning in
# `make plan`.
ERROR = 0.15
CPU_TFLOPS = 8.0  # per core: more than the fastest CPU reaches with AMX in bf16; only to recognize impossible times


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """A reason why a run is impossible on a device."""

    what: str  # what the run needs, and what there is
    fix: str  # arguments that make it possible
    certain: bool  # False: an estimate, which ALLOW_RISK=y overrides


def risks(shape: ModelShape, train: TrainConfig, steps: int | None, device: GpuModel, cores: int) -> tuple[Risk, ...]:
    """Return the reasons why a run is impossible. steps: of the whole run, if known.  cores: of this machine."""
    found = (_memory_risk(shape, train, device), _budget_risk(shape, train, steps, device, cores))
    return tuple(risk for risk in found if risk is not None)


def _memory_risk(shape: ModelShape, train: TrainConfig, device: GpuModel) -> Risk | None:
    need = memory(shape, train)
    if need.process is None or need.least is None or device.memory is None:
        return None
    certain = need.least > device.memory
    if not certain and need.process / (1 + ERROR) <= device.memory:
        return None
    what = f"needs {memory_size(_stated(need, certain=certain))}, {device.name} has {memory_size(device.memory)}"
    return Risk(what=what, fix=_memory_fix(shape, train, device), certain=certain)


def _stated(need: MemoryNeed, *, certain: bool) -> float:
    """Return the bytes that explain a refusal: those of weights, gradients and states if they alone are too many."""
    size = need.least if certain else need.process
    assert size is not None  # the caller has checked
    return size


def _memory_fix(shape: ModelShape, train: TrainConfig, device: GpuModel) -> str:
    """Return the arguments with which the run fits: a smaller micro-batch, recomputation, or a smaller model."""
    for options, changed in (("", train), ("RECOMPUTE=y ", replace(train, recompute=True))):
        if batch := _batch_that_divides(shape, changed, device):
            return f"{options}BATCH_SIZE={batch} PARALLEL_BATCH_SIZE={train.global_batch}"
    if train.model in NAMED:
        small = [name for name in NAMED if _fits_alone(_named(shape, name), train, device)]
        best = max(small, key=lambda name: _named(shape, name).params, default="")
        return f"MODEL={best} BATCH_SIZE=1" if best else "a smaller BLOCK_SIZE"
    symbol = "DEPTH" if train.model == "depth" else "N_LAYER"
    layers = largest_depth(replace(train, batch_size=1), device, deeper(shape, train))
    return f"{symbol}={layers} BATCH_SIZE=1" if layers else "a smaller width or BLOCK_SIZE"


def _batch_that_divides(shape: ModelShape, train: TrainConfig, device: GpuModel) -> int:
    """Return the largest micro-batch that fits and keeps the global batch, 0 if none does."""
    most = largest_batch(shape, train, device) or 0
    per_rank = train.global_batch // train.num_gpus
    return next((batch for batch in range(min(most, per_rank), 0, -1) if per_rank % batch == 0), 0)


def _named(shape: ModelShape, name: str) -> ModelShape:
    layers, heads, width = NAMED[name]
    return replace(shape, n_layer=layers, n_head=heads, n_embd=width)


def _fits_alone(shape: ModelShape, train: TrainConfig, device: GpuModel) -> bool:
    return bool(largest_batch(shape, replace(train, batch_size=1), device))


def budget_seconds(train: TrainConfig) -> float | None:
    """Return the time limit of a run in seconds: MAX_TIME, or MAX_COST at its price; None without one."""
    limits = [train.max_time] if train.max_time else []
    if train.max_cost and train.gpu_hour_price:
        limits.append(train.max_cost / (train.gpu_hour_price * train.num_gpus) * 3600)
    return min(limits, default=None)


def _budget_risk(shape: ModelShape, train: TrainConfig, steps: int | None, device: GpuModel, cores: int) -> Risk | None:
    """Return the risk that the budget ends before the first evaluation that follows training."""
    budget = budget_seconds(train)
    if budget is None:
        return None
    first = min(train.eval_interval, steps or train.eval_interval)  # the last step is evaluated, too
    fastest = _seconds(shape, train, first, device, cores, certain=True)
    expected = _seconds(shape, train, first, device, cores, certain=False)
    certain = fastest is not None and fastest > budget
    if not certain and (expected is None or expected <= budget):
        return None
    needed = expected if expected is not None else fastest
    assert needed is not None  # one of them is above the budget
    what = f"the budget of {duration(budget)} ends before the first evaluation, after {first} steps in at least "
    reachable = math.floor(budget / needed * first)
    fixes = [f"EVAL_INTERVAL={reachable}"] if reachable else []
    limit = f"MAX_TIME={math.ceil(needed)}s" if train.max_time else f"MAX_COST={_cost(train, needed):.2f}"
    return Risk(what=what + duration(needed), fix=" or ".join([*fixes, limit]), certain=certain)


def _cost(train: TrainConfig, seconds: float) -> float:
    """Return dollars, rounded up to cents."""
    return math.ceil((train.gpu_hour_price or 0) * train.num_gpus * seconds / 36) / 100


def _seconds(
    shape: ModelShape, train: TrainConfig, steps: int, device: GpuModel, cores: int, *, certain: bool
) -> float | None:
    """Return the shortest time of some steps: at the peak of the device, or at the highest MFU that is expected."""
    tokens = steps * train.tokens_per_step
    if train.device == "cpu":
        return tokens * shape.flops_per_token / (CPU_TFLOPS * 1e12 * cores) if certain else None
    share = 1.0 if certain else mfu_band(shape, train, device)[1]
    speed = at_mfu(share, shape=shape, train=train, tokens=tokens, device=device)
    return None if speed is None else speed.seconds
