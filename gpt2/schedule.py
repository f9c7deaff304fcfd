"""The learning rate of each step, as a share of its peak: plain arithmetic."""

from __future__ import annotations

import math
from typing import Any


def scale(config: Any, step: int) -> float:
    """Return rate / peak rate at a 0-based step; 0 where the peak is 0.

    config: has schedule, learning_rate, min_lr, warmup_steps, max_iters and, for wsd, wsd_decay_fraction, as
    gpt2.config.TrainConfig.  The rate rises as (step + 1) / (warmup_steps + 1), as in nanoGPT, has its peak at
    step `warmup_steps`, and is min_lr at the last step, max_iters - 1, and after it.
    """
    if config.learning_rate == 0:
        return 0.0
    if step < config.warmup_steps:
        return float((step + 1) / (config.warmup_steps + 1))
    if config.schedule == "constant":
        return 1.0
    least = config.min_lr / config.learning_rate
    return float(least + (1.0 - least) * _height(config, step))


def _height(config: Any, step: int) -> float:
    """Return where the rate is between its least (0) and its peak (1), warm-up being over."""
    last = config.max_iters - 1
    start = config.warmup_steps
    if config.schedule == "wsd":
        if not config.wsd_decay_fraction:
            return 1.0
        decay_steps = max(1, round(config.wsd_decay_fraction * config.max_iters))
        start = max(start, last - decay_steps)
    if step >= last:
        return 0.0
    progress = max(0.0, (step - start) / (last - start))
    if config.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule in ("linear", "wsd"):
        return float(1.0 - progress)
    raise ValueError(f"schedule {config.schedule!r} is not one of cosine, linear, constant, wsd")
