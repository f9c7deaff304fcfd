"""Find what makes a run impossible before it starts: memory, FP8, and a budget that ends before an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kmatrix.plan.cpu import PEAK as CPU_PEAK
from kmatrix.plan.cpu import CpuSpeed
from kmatrix.plan.feasibility import (
    Fit,
    GpuModel,
    at_mfu,
    at_peak,
    deeper,
    fit,
    lacks_fp8,
    largest_depth,
    mfu_band,
)
from kmatrix.plan.memory import MemoryNeed, memory
from kmatrix.records.train_config import TrainConfig, budget_s, dollars_per_hour
from kmatrix.shapes import NAMED, ModelShape
from kmatrix.text import duration, memory_size, plural

# The planned memory may be too high by this share (bench/published.py, bench/cpu_memory.py): less is only a warning in
# `make plan`.
ERROR = 0.15
SHORTEST = 8  # tokens of context: the smallest BLOCK_SIZE
START_S = {"cpu": 15, "cuda": 60}  # s of a budget that a hint adds for start-up, and on GPUs for compilation
# s from the launch of a run to its first step that no run goes below: torchrun, the import of torch, the device.
FASTEST_START_S = {"cpu": 3, "cuda": 5}
EVALUATIONS = 2  # before the end of the first evaluation: the initial one, and itself
FORWARD = 1 / 3  # FLOPs of an evaluation per token, relative to those of training


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """A reason why a run is impossible on a device."""

    what: str  # what the run needs, and what there is
    fix: str  # arguments that make it possible
    certain: bool  # False: an estimate, which ALLOW_RISK=y overrides


def risks(
    shape: ModelShape, train: TrainConfig, steps: int | None, device: GpuModel, cpu: CpuSpeed
) -> tuple[Risk, ...]:
    """Return the reasons why a run is impossible.

    steps: of the whole run, if known.  cpu: its speed if it runs on the CPU.
    """
    found = (
        _fp8_risk(train, device),
        _memory_risk(shape, train, device),
        _budget_risk(shape, train, steps, device, cpu),
    )
    return tuple(risk for risk in found if risk is not None)


def _fp8_risk(train: TrainConfig, device: GpuModel) -> Risk | None:
    if not (train.fp8 and lacks_fp8(device)):
        return None
    return Risk(what=f"needs products in FP8, {device.name} has none", fix="FP8=n", certain=True)


def _memory_risk(shape: ModelShape, train: TrainConfig, device: GpuModel) -> Risk | None:
    need = memory(shape, train)
    if need.process is None or need.least is None or device.memory is None:
        return None
    certain = need.least > device.memory
    if not certain and need.process / (1 + ERROR) <= device.memory:
        return None
    what = f"needs {memory_size(_stated(need, certain=certain))}, {device.name} has {device.room}"
    return Risk(what=what, fix=_memory_fix(shape, train, device), certain=certain)


def _stated(need: MemoryNeed, *, certain: bool) -> float:
    """Return the bytes that explain a refusal: those of weights, gradients and states if they alone are too many."""
    size = need.least if certain else need.process
    assert size is not None  # the caller has checked
    return size


def _memory_fix(shape: ModelShape, train: TrainConfig, device: GpuModel) -> str:
    """Return the arguments with which the run fits: a smaller micro-batch, recomputation, or a smaller model."""
    if batch := _batch_that_divides(shape, train, device):
        return f"BATCH_SIZE={batch} PARALLEL_BATCH_SIZE={train.global_batch}"
    if fewer := _fewer_ranks(shape, train, device):
        return f"NUM_GPUS={fewer} PARALLEL_BATCH_SIZE={train.global_batch}"
    if batch := _batch_that_divides(shape, replace(train, recompute=True), device):
        return f"RECOMPUTE=y BATCH_SIZE={batch} PARALLEL_BATCH_SIZE={train.global_batch}"
    alone = _with_batch(train, 1)
    model = _model_that_fits(shape, alone, device)
    return f"{model or f'MODEL=tiny BLOCK_SIZE={SHORTEST}'} BATCH_SIZE=1 PARALLEL_BATCH_SIZE={train.global_batch}"


def _fewer_ranks(shape: ModelShape, train: TrainConfig, device: GpuModel) -> int:
    """Return the largest smaller number of ranks with which a run on the CPU fits, 0 if there is none.

    The ranks share the memory, and each has its own copy of the model.
    """
    for ranks in range(device.shared_by - 1, 0, -1):
        if train.global_batch % (train.batch_size * ranks) == 0 and device.memory is not None:
            fewer = replace(train, num_gpus=ranks)
            share = replace(device, memory=device.memory * device.shared_by / ranks)
            if fit(memory(shape, _with_batch(fewer, train.batch_size)), share) is not Fit.NOT:
                return ranks
    return 0


def _model_that_fits(shape: ModelShape, train: TrainConfig, device: GpuModel) -> str:
    """Return the arguments for the largest model of the same kind that fits, "" if none does.

    The context becomes shorter, and a custom model narrower, if nothing else fits.
    """
    while shape.block_size >= SHORTEST:
        if found := _smaller_model(shape, train, device):
            context = f" BLOCK_SIZE={shape.block_size}" if shape.block_size < train.block_size else ""
            return found + context
        shape = replace(shape, block_size=shape.block_size // 2)
    return ""


def _smaller_model(shape: ModelShape, train: TrainConfig, device: GpuModel) -> str:
    """Return the arguments for the largest model of the same kind that fits with this context, "" if none does."""
    if train.model in NAMED:
        small = [name for name in NAMED if fit(memory(_named(shape, name), train), device) is not Fit.NOT]
        best = max(small, key=lambda name: _named(shape, name).params, default="")
        return f"MODEL={best}" if best else ""
    if train.model == "depth":
        depth = largest_depth(train, device, deeper(shape, train))
        return f"DEPTH={min(depth, shape.n_layer)}" if depth else ""
    # Heads of the same size, so that the width stays a multiple of their number.
    size = shape.n_embd // shape.n_head
    for heads in range(shape.n_head, 0, -1):
        narrow = replace(shape, n_head=heads, n_embd=heads * size)
        if layers := largest_depth(train, device, deeper(narrow, train)):
            width = f" N_EMBD={heads * size} N_HEAD={heads}" if heads < shape.n_head else ""
            return f"N_LAYER={min(layers, shape.n_layer)}{width}"
    return ""


def _batch_that_divides(shape: ModelShape, train: TrainConfig, device: GpuModel) -> int:
    """Return the largest smaller micro-batch that fits and keeps the global batch, 0 if none does."""
    per_rank = train.global_batch // train.num_gpus
    batches = (batch for batch in range(min(train.batch_size, per_rank), 0, -1) if per_rank % batch == 0)
    return next((batch for batch in batches if fit(memory(shape, _with_batch(train, batch)), device) is not Fit.NOT), 0)


def _with_batch(train: TrainConfig, batch: int) -> TrainConfig:
    """Return the configuration with another micro-batch and the same global batch."""
    # More accumulation may need more memory: gradients then exist during the forward pass.
    accumulation = max(1, train.global_batch // (batch * train.num_gpus))
    return replace(train, batch_size=batch, gradient_accumulation=accumulation)


def _named(shape: ModelShape, name: str) -> ModelShape:
    layers, heads, width = NAMED[name]
    return replace(shape, n_layer=layers, n_head=heads, n_embd=width)


def _budget_risk(
    shape: ModelShape, train: TrainConfig, steps: int | None, device: GpuModel, cpu: CpuSpeed
) -> Risk | None:
    """Return the risk that the budget ends before the first evaluation that follows training."""
    budget = budget_s(train)
    if budget is None:
        return None
    first = min(train.eval_interval, steps or train.eval_interval)  # the last step is evaluated, too
    times = _token_seconds(shape, train, device, cpu)
    if times is None:
        return None
    shortest = FASTEST_START_S[train.device] + first * train.tokens_per_step * times.fast
    if shortest <= budget:
        return None
    ends = f"the budget of {duration(budget)} ends before the first evaluation"
    how = f" ({cpu.text})" if train.device == "cpu" else ""
    return Risk(
        what=f"{ends}, after start-up and {plural(first, 'step')} in at least {duration(shortest)}{how}",
        fix=_budget_fix(shape, train, first, budget, times),
        certain=first * train.tokens_per_step * times.peak > budget,
    )


def _budget_fix(shape: ModelShape, train: TrainConfig, first: int, budget: float, times: _TokenSeconds) -> str:
    """Return the arguments with which the first evaluation is within the budget, also at the slowest expected speed."""
    evaluation = train.eval_samples * shape.block_size * FORWARD * times.slow
    around = START_S[train.device] + EVALUATIONS * evaluation
    step = train.tokens_per_step * times.slow
    reachable = math.floor((budget - around) / step)
    fixes = [f"EVAL_INTERVAL={reachable}"] if reachable >= 1 else []
    needed = math.ceil(around + first * step)
    limits = [f"MAX_TIME={needed}s"] if train.max_time and train.max_time < needed else []
    if (cost := _cost(train, needed)) and train.max_cost and train.max_cost < cost:
        limits.append(f"MAX_COST={cost:.2f}")
    return " or ".join([*fixes, " ".join(limits)])


def steps_in(
    seconds: float, shape: ModelShape, train: TrainConfig, device: GpuModel, cpu: CpuSpeed
) -> tuple[int, int] | None:
    """Return the fewest and the most steps that are expected to fit into a time, None if the speed is unknown.

    Start-up counts, evaluations do not.  cpu: the speed of a run on the CPU.
    """
    times = _token_seconds(shape, train, device, cpu)
    if times is None:
        return None
    slow = (seconds - START_S[train.device]) / (train.tokens_per_step * times.slow)
    fast = (seconds - FASTEST_START_S[train.device]) / (train.tokens_per_step * times.fast)
    return max(0, math.floor(slow)), max(0, math.floor(fast))


def budget_warning(
    shape: ModelShape, train: TrainConfig, devices: Sequence[GpuModel], cpu: CpuSpeed, measured_s: float | None
) -> str:
    """Return the warning that a budget ends a run before its schedule does, "" if it does not.

    measured_s: time of the whole run by earlier runs of this shape on this machine; None: the expected speeds of the
    devices decide, and the warning says at most what the fastest one can do.
    """
    budget, steps = budget_s(train), train.max_iters
    if budget is None or not steps:
        return ""
    if measured_s is not None:
        share = _percent(budget / measured_s) if budget < measured_s else ""
    else:
        found = [span for device in devices if (span := steps_in(budget, shape, train, device, cpu)) is not None]
        least, most = min((low for low, _ in found), default=steps), max((high for _, high in found), default=steps)
        share = f"{_percent(least / steps)} to {_percent(most / steps)}" if most < steps else ""
    if not share:
        return ""
    symbol = "MAX_TIME" if train.max_time == budget else "MAX_COST"
    why = "its learning rate does not reach MIN_LR" if train.schedule != "constant" else "its last steps are left out"
    return f"the budget ends at {share} of the schedule ({symbol}): {why}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _cost(train: TrainConfig, seconds: float) -> float:
    """Return dollars, rounded up to cents."""
    return math.ceil((dollars_per_hour(train) or 0) * seconds / 36) / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenSeconds:
    """The time per token of all ranks together, in seconds."""

    peak: float  # at the peak of the hardware; 0.0 if only the user states it: then nothing is certain
    fast: float  # at the highest expected speed
    slow: float  # at the lowest expected speed


def _token_seconds(shape: ModelShape, train: TrainConfig, device: GpuModel, cpu: CpuSpeed) -> _TokenSeconds | None:
    """Return the time per token, None if the peak of the device is unknown."""
    if train.device == "cpu":
        per_core = shape.flops_per_token / cpu.cores
        return _TokenSeconds(peak=per_core / CPU_PEAK, fast=per_core / cpu.fast, slow=per_core / cpu.slow)
    low, high = mfu_band(shape, train, device)
    slowest, fastest = (at_mfu(share, shape=shape, train=train, tokens=None, device=device) for share in (low, high))
    if slowest is None or fastest is None:
        return None
    highest = at_peak(shape=shape, train=train, tokens=None, device=device)
    return _TokenSeconds(
        peak=0.0 if highest is None else 1 / highest.tokens_per_second,
        fast=1 / fastest.tokens_per_second,
        slow=1 / slowest.tokens_per_second,
    )
