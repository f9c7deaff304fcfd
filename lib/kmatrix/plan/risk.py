"""Find what makes a run impossible before it starts, and what is probably a mistake."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kmatrix.plan.cpu import CpuSpeed
from kmatrix.plan.feasibility import Fit, GpuModel, fit, rates
from kmatrix.plan.memory import memory
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import budget_s
from kmatrix.text import duration, memory_size, plural

# The planned memory may be too high by this share (tests/plan/test_published.py): less is only a
# warning in `make plan`.
ERROR = 0.15
START_S = {"cpu": 15, "cuda": 60}  # s until the first step, and on GPUs for compilation, at most
FASTEST_START_S = {"cpu": 3, "cuda": 5}  # s until the first step, at least: the import of torch, the device
MOST_WARMUP = 0.25  # fraction of the steps; with more, runs compare warm-ups instead of optimizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """A reason why a run is impossible on a device."""

    what: str  # what the run needs, and what there is
    fix: str  # what makes it possible, as a hint
    certain: bool = False  # False: an estimate, which ALLOW_RISK=y overrides


def risks(train: TrainConfig, device: GpuModel, cpu: CpuSpeed | None) -> tuple[Risk, ...]:
    """Return the reasons why a run is impossible. cpu: its speed if it runs on the CPU."""
    found = (_memory_risk(train, device), _budget_risk(train, device, cpu))
    return tuple(risk for risk in found if risk is not None)


def _memory_risk(train: TrainConfig, device: GpuModel) -> Risk | None:
    need = memory(train)
    if device.memory is None:
        return None
    certain = need.least > device.memory
    # On the CPU only weights, gradients and states are planned.
    if not certain and (train.device == "cpu" or need.total / (1 + ERROR) <= device.memory):
        return None
    what = f"needs {memory_size(need.least if certain else need.total)}, {device.name} has {device.room}"
    if batch := 0 if certain else _batch_that_divides(train, device):
        fix = f"pass BATCH_SIZE={batch} PARALLEL_BATCH_SIZE={train.global_batch}"
    else:
        fix = "choose a smaller model" + ("" if certain or train.recompute else ", or pass RECOMPUTE=y")
    return Risk(what=what, fix=fix, certain=certain)


def _batch_that_divides(train: TrainConfig, device: GpuModel) -> int:
    """Return the largest smaller micro-batch that fits and keeps the global batch, 0 if none does."""
    per_rank = train.global_batch // train.num_gpus
    for batch in range(min(train.batch_size, per_rank), 0, -1):
        # More accumulation may need more memory: gradients then exist during the forward pass.
        smaller = replace(train, batch_size=batch, gradient_accumulation=max(1, per_rank // batch))
        if per_rank % batch == 0 and fit(memory(smaller), device) is not Fit.NOT:
            return batch
    return 0


def _budget_risk(train: TrainConfig, device: GpuModel, cpu: CpuSpeed | None) -> Risk | None:
    """Return the risk that the budget ends before the first evaluation that follows training."""
    budget = budget_s(train)
    expected = None if budget is None else rates(train, device, cpu)
    if budget is None or expected is None:
        return None
    first = min(train.eval_interval, train.max_iters)  # the last step is evaluated, too
    shortest = FASTEST_START_S[train.device] + first * train.tokens_per_step / expected[1]
    if shortest <= budget:
        return None
    ends = f"the budget of {duration(budget)} ends before the first evaluation"
    how = f" ({cpu.text})" if cpu else ""
    return Risk(
        what=f"{ends}, after start-up and {plural(first, 'step')} in at least {duration(shortest)}{how}",
        fix=f"pass a larger {_limit(train)}, or a smaller EVAL_INTERVAL",
    )


def _limit(train: TrainConfig) -> str:
    """Return the symbol of the budget that is used up first."""
    return "MAX_TIME" if train.max_time == budget_s(train) else "MAX_COST"


def budget_warning(
    train: TrainConfig, devices: Sequence[GpuModel], cpu: CpuSpeed | None, measured_s: float | None
) -> str:
    """Return the warning that a budget ends a run before its schedule does, "" if it does not.

    measured_s: time of the whole run by earlier runs of this shape on this machine; None: the fastest device decides,
    at its highest expected speed.
    """
    budget, expected = budget_s(train), [rates(train, device, cpu) for device in devices]
    fastest = max((rate[1] for rate in expected if rate), default=math.inf)
    tokens = train.max_iters * train.tokens_per_step
    whole = measured_s or FASTEST_START_S[train.device] + tokens / fastest
    if budget is None or budget >= whole:
        return ""
    share = f"{100 * budget / whole:.3g} %"
    why = "its learning rate does not reach MIN_LR" if train.schedule != "constant" else "its last steps are left out"
    at = "at" if measured_s else "at the latest at"
    return f"the budget ends {at} {share} of the schedule ({_limit(train)}): {why}"


def warnings(train: TrainConfig) -> list[str]:
    """Return warnings about valid settings that are probably mistakes."""
    found = []
    warmup, steps = train.warmup_steps, train.max_iters
    if steps and warmup > MOST_WARMUP * steps:
        found.append(f"warm-up takes {warmup} of {steps} steps: pass WARMUP_FRACTION=0.1, or the run compares warm-ups")
    return found
