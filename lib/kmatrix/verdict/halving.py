"""Successive halving: the steps at which configurations are compared early, and how many go on from each.

Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (AISTATS 2016); Li et
al., Hyperband (JMLR 2018), whose eta this is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 2  # configurations that train to the end: with one, no final losses could be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A step at which the runs of a family wait, and the number of configurations that go on from there."""

    step: int  # optimizer steps; an evaluation step before the last one
    keep: int  # configurations, at least LEAST


def rungs(max_iters: int, configurations: int, eta: int, *, eval_interval: int, warmup: int = 0) -> tuple[Rung, ...]:
    """Return the rungs of a family, first to last; none if there are too few configurations or evaluations.

    With s = floor(log_eta(configurations)), they are at max_iters / eta^s, ..., max_iters / eta, each at the next
    evaluation after that and after `warmup` steps. Those that fall on the same evaluation are one, and one at the last
    step is none. From each, the best 1 / eta of the configurations that reached it go on, rounded up, but at least
    LEAST: where Hyperband ends with one configuration, here the difference between the last two is measured.
    """
    if eta < 2 or min(max_iters, configurations, eval_interval) < 1 or warmup < 0:
        raise ValueError(f"eta {eta}, {max_iters} steps, {configurations} configurations, every {eval_interval}")
    powers, power = [], eta  # integers: math.log(125, 5) is below 3
    while power <= configurations:
        powers.append(power)
        power *= eta
    earliest = [max(-(-max_iters // power), warmup, 1) for power in reversed(powers)]
    steps = dict.fromkeys(-(-step // eval_interval) * eval_interval for step in earliest)
    found, going = [], configurations
    for step in steps:
        keep = max(math.ceil(going / eta), LEAST)
        if step >= max_iters or keep >= going:
            break
        found.append(Rung(step=step, keep=keep))
        going = keep
    return tuple(found)


def most_steps(max_iters: int, configurations: int, found: Sequence[Rung]) -> int:
    """Return the steps of one seed of all configurations of a family together, if none of them ends early."""
    done, going, total = 0, configurations, 0
    for rung in found:
        total += going * (rung.step - done)
        done, going = rung.step, rung.keep
    return total + going * (max_iters - done)
