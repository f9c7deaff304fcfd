"""What depends on the step alone: its learning rate, and the seed of its random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of all random numbers that one rank draws in a step (dropout), whatever was drawn before."""
    # SeedSequence mixes the three, so that adjacent steps and ranks are independent. >> 1: a positive int64.
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> 1)


def scale(config: Any, step: int) -> float:
    """Return learning rate / peak learning rate at a 0-based step; 0 if the peak is 0.

    config: schedule, learning_rate, min_lr, warmup_steps, max_iters and, for wsd, wsd_decay_fraction.
    The rate rises as (step + 1) / (warmup_steps + 1), as in nanoGPT, peaks at step `warmup_steps`, and is min_lr from
    the last step, max_iters - 1, on.
    """
    if config.learning_rate == 0:
        return 0.0  # min_lr / learning_rate is not defined
    # One more in both: the first step has a rate above 0, and the peak comes after the warm-up, not at its last step.
    if step < config.warmup_steps:
        return float((step + 1) / (config.warmup_steps + 1))
    if config.schedule == "constant":
        return 1.0
    least = config.min_lr / config.learning_rate
    return float(least + (1.0 - least) * _height(config, step))


def _height(config: Any, step: int) -> float:
    """Return the position of the rate between minimum (0) and peak (1) after the warm-up."""
    last = config.max_iters - 1
    start = config.warmup_steps
    # Warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395): the same line as "linear", but it starts late.
    if config.schedule == "wsd":
        if not config.wsd_decay_fraction:
            return 1.0
        decay_steps = max(1, round(config.wsd_decay_fraction * config.max_iters))
        start = max(start, last - decay_steps)
    if step >= last:
        return 0.0
    progress = max(0.0, (step - start) / (last - start))
    if config.schedule == "cosine":  # one half period of Loshchilov and Hutter 2016, arXiv:1608.03983
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule in ("linear", "wsd"):
        return float(1.0 - progress)
    raise ValueError(f"schedule {config.schedule!r} is not one of cosine, linear, constant, wsd")
