"""Successive halving: the steps at which configurations are compared early, and how many go on from each.

Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (AISTATS 2016); Li et
al., Hyperband (JMLR 2018), whose eta this is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A step at which the runs of a family wait, and the number of configurations that go on from there."""

    step: int  # optimizer steps; an evaluation step before the last one
    keep: int  # configurations, at least 1


def rungs(max_iters: int, configurations: int, eta: int, *, eval_interval: int, warmup: int = 0) -> tuple[Rung, ...]:
    """Return the rungs of a family, first to last; none if there are too few configurations or evaluations.

    With s = floor(log_eta(configurations)), there are at most s rungs, at max_iters / eta^s, ..., max_iters / eta, each
    at the next evaluation and after the warm-up of `warmup` steps. From a rung, the best 1 / eta of those that reached
    it go on, rounded up. If two rungs fall on one evaluation, it keeps as many as the later of them, because no steps
    lie between the two. A rung at the last step compares nothing early, so it is left out, and with it its selection.
    """
    if eta < 2 or min(max_iters, configurations, eval_interval) < 1 or warmup < 0:
        raise ValueError(f"eta {eta}, {max_iters} steps, {configurations} configurations, every {eval_interval}")
    found: dict[int, int] = {}  # step -> configurations that go on
    keep = configurations
    for power in range(_whole_log(configurations, eta), 0, -1):
        step = _next_evaluation(max(max_iters / eta**power, warmup), eval_interval)
        if step >= max_iters:
            break
        keep = math.ceil(keep / eta)
        found[step] = keep
    return tuple(Rung(step=step, keep=kept) for step, kept in found.items())


def steps_at_most(max_iters: int, configurations: int, eta_rungs: tuple[Rung, ...]) -> int:
    """Return the steps of all configurations of a family together, one seed each, with these rungs."""
    done, going, total = 0, configurations, 0
    for rung in eta_rungs:
        total += going * (rung.step - done)
        done, going = rung.step, rung.keep
    return total + going * (max_iters - done)


def _whole_log(number: int, base: int) -> int:
    """Return the largest power of `base` that is at most `number`, as its exponent. Exact, unlike math.log."""
    exponent = 0
    while base ** (exponent + 1) <= number:
        exponent += 1
    return exponent


def _next_evaluation(step: float, eval_interval: int) -> int:
    """Return the first evaluation step above 0 that is not before `step`."""
    return max(1, math.ceil(step / eval_interval)) * eval_interval
