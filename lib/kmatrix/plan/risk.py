"""Find what makes a run impossible before it starts: memory, and a budget that ends before an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kmatrix.plan.cpu import PEAK as CPU_PEAK
from kmatrix.plan.cpu import CpuSpeed
from kmatrix.plan.feasibility import Fit, GpuModel, fit, highest_rate, mfu_band, rate_at
from kmatrix.plan.memory import memory
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import budget_s
from kmatrix.shapes import ModelShape
from kmatrix.text import duration, memory_size, plural

# The planned memory may be too high by this share (tests/plan/test_published.py): less is only a
# warning in `make plan`.
ERROR = 0.15
START_S = {"cpu": 15, "cuda": 60}  # s until the first step, and on GPUs for compilation, at most
# s from the launch of a run to its first step that no run goes below: torchrun, the import of torch, the device.
FASTEST_START_S = {"cpu": 3, "cuda": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """A reason why a run is impossible on a device."""

    what: str  # what the run needs, and what there is
    fix: str  # what makes it possible, as a hint
    certain: bool  # False: an estimate, which ALLOW_RISK=y overrides


def risks(shape: ModelShape, train: TrainConfig, steps: int, device: GpuModel, cpu: CpuSpeed) -> tuple[Risk, ...]:
    """Return the reasons why a run is impossible.

    steps: of the whole run.  cpu: its speed if it runs on the CPU.
    """
    found = (_memory_risk(shape, train, device), _budget_risk(shape, train, steps, device, cpu))
    return tuple(risk for risk in found if risk is not None)


def _memory_risk(shape: ModelShape, train: TrainConfig, device: GpuModel) -> Risk | None:
    need = memory(shape, train)
    if device.memory is None:
        return None
    certain = need.least > device.memory
    # On the CPU only weights, gradients and states are planned.
    if not certain and (train.device == "cpu" or need.total / (1 + ERROR) <= device.memory):
        return None
    what = f"needs {memory_size(need.least if certain else need.total)}, {device.name} has {device.room}"
    if batch := 0 if certain else _batch_that_divides(shape, train, device):
        fix = f"pass BATCH_SIZE={batch} PARALLEL_BATCH_SIZE={train.global_batch}"
    else:
        fix = "choose a smaller model" + ("" if certain or train.recompute else ", or pass RECOMPUTE=y")
    return Risk(what=what, fix=fix, certain=certain)


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


def _budget_risk(shape: ModelShape, train: TrainConfig, steps: int, device: GpuModel, cpu: CpuSpeed) -> Risk | None:
    """Return the risk that the budget ends before the first evaluation that follows training."""
    budget = budget_s(train)
    if budget is None:
        return None
    first = min(train.eval_interval, steps)  # the last step is evaluated, too
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
        fix=f"pass a larger {_limit(train)}, or a smaller EVAL_INTERVAL",
        certain=first * train.tokens_per_step * times.peak > budget,
    )


def _limit(train: TrainConfig) -> str:
    """Return the symbol of the budget that is used up first."""
    return "MAX_TIME" if train.max_time == budget_s(train) else "MAX_COST"


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
    why = "its learning rate does not reach MIN_LR" if train.schedule != "constant" else "its last steps are left out"
    return f"the budget ends at {share} of the schedule ({_limit(train)}): {why}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


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
    slow, fast = (rate_at(share, shape, train, device) for share in mfu_band(shape, train, device))
    if slow is None or fast is None:
        return None
    highest = highest_rate(shape, train, device)
    return _TokenSeconds(peak=0.0 if highest is None else 1 / highest, fast=1 / fast, slow=1 / slow)
