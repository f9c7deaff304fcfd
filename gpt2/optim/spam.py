"""SPAM: AdamW with clipped spikes and moments that are reset at intervals."""

from __future__ import annotations

import math
from typing import Any

import torch

CLIP_AFTER = 20  # steps after a reset until the second moment is a usable bound (the authors' code)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # names in the state of torch's AdamW; the last with AMSGrad


class Spam(torch.optim.AdamW):
    """SPAM: AdamW with spike-aware clipping, momentum reset and a cosine warm-up after each reset.

    Source: Huang et al. 2025, arXiv:2501.06842, and the authors' code.
    theta: a gradient entry whose square exceeds theta times its second moment is clipped to that bound; 0: no clipping.
    interval: steps between resets of the moments; 0: no resets.  warmup: steps of warm-up after a reset.
    As in the authors' code, a reset does not restart bias correction, and the warm-up does not reduce weight decay.
    """

    def __init__(self, params: Any, *, theta: float, interval: int, warmup: int, **adamw: Any) -> None:
        super().__init__(params, **adamw)
        self.theta, self.interval, self.warmup = theta, interval, warmup
        for group in self.param_groups:
            group["steps"] = 0  # updates done; in the saved state, as everything in a group

    @property
    def since_reset(self) -> int:
        """Updates since the moments were last reset."""
        steps = int(self.param_groups[0]["steps"])
        return steps % self.interval if self.interval else steps

    @property
    def warmed_up(self) -> bool:
        """Return whether the moments have seen enough gradients since the last reset to rank weights."""
        # Half of a short interval: with fewer than 20 steps between resets they would never be warm.
        return self.since_reset >= (min(CLIP_AFTER, self.interval // 2) if self.interval else CLIP_AFTER)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002  (torch's signature)
        former = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        for group in self.param_groups:
            group["steps"] += 1
            # AdamW creates its states in its first step: until then there is nothing to reset or to compare with.
            states = [(p.grad, self.state[p]) for p in group["params"] if p.grad is not None and self.state[p]]
            if states and self.interval and self.since_reset == 0:
                # The step count stays, so bias correction does not restart.
                torch._foreach_zero_([state[name] for _, state in states for name in MOMENTS if name in state])
            elif states and self.theta and self.since_reset >= CLIP_AFTER:
                _clip_spikes([grad for grad, _ in states], [state["exp_avg_sq"] for _, state in states], self.theta)
            group["lr"] *= self.rate_factor
            group["weight_decay"] /= self.rate_factor  # AdamW decays by rate x decay, which the warm-up must not change
        try:
            super().step()
        finally:  # the schedule sets the rate from the peak, and a checkpoint must not store a scaled one
            for group, (rate, decay) in zip(self.param_groups, former, strict=True):
                group["lr"], group["weight_decay"] = rate, decay

    @property
    def rate_factor(self) -> float:
        """The factor of the learning rate in the newest step: 1, or 0.01 to 1 during the warm-up after a reset."""
        steps, since = self.param_groups[0]["steps"], self.since_reset
        if not self.interval or steps < self.interval or since >= self.warmup:
            return 1.0
        # Half a cosine that starts with 1 % of the rate in the step of the reset, as in the authors' code. The first
        # interval has the run's own warm-up.
        return 1 - 0.99 * (1 + math.cos(math.pi * since / (self.warmup + 1))) / 2


# torch._foreach_*: one kernel for a list of tensors. Private, but torch's own optimizers are written with them.
def _clip_spikes(grads: list[torch.Tensor], second: list[torch.Tensor], theta: float) -> None:
    """Clip every entry to the square root of theta times its second moment. NaN stays NaN."""
    # Not clamp: minimum and maximum take tensors as bounds and propagate NaN, which the loop has to see.
    bounds = torch._foreach_sqrt(torch._foreach_mul(second, theta))
    torch._foreach_minimum_(grads, bounds)
    torch._foreach_neg_(bounds)
    torch._foreach_maximum_(grads, bounds)
