"""SPAM: AdamW that clips spikes, and forgets its moments at intervals (Huang et al. 2025, arXiv:2501.06842)."""

from __future__ import annotations

import math
from typing import Any

import torch

CLIP_AFTER = 20  # steps since the last reset, before which the second moment is no measure (the authors' code)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Spam(torch.optim.AdamW):
    """AdamW with spike-aware clipping, momentum reset and a cosine warm-up after each reset.

    theta: an entry of a gradient whose square is above theta times its second moment is cut back to that bound;
    0: never.  interval: steps between two resets of the moments to 0; 0: none.  warmup: steps after a reset in which
    the rate rises again.  As in the authors' code the count that corrects the moments' bias goes on over a reset.
    The weight decay of a step falls with its rate.
    """

    def __init__(self, params: Any, *, theta: float, interval: int, warmup: int, **adamw: Any) -> None:
        super().__init__(params, **adamw)
        self.theta, self.interval, self.warmup = theta, interval, warmup
        for group in self.param_groups:
            group["steps"] = 0  # updates done; in the saved state, as everything in a group

    @property
    def since_reset(self) -> int:
        """Updates since the moments were last 0."""
        steps = int(self.param_groups[0]["steps"])
        return steps % self.interval if self.interval else steps

    @property
    def settled(self) -> bool:
        """Whether the moments have seen enough gradients since the last reset to say which weights matter."""
        return self.since_reset >= (min(CLIP_AFTER, self.interval // 2) if self.interval else CLIP_AFTER)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002  (torch's signature)
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["steps"] += 1
            states = [(p.grad, self.state[p]) for p in group["params"] if p.grad is not None and self.state[p]]
            if self.interval and self.since_reset == 0:
                _forget([state for _, state in states])
            elif self.theta and self.since_reset >= CLIP_AFTER:
                _cut_spikes([grad for grad, _ in states], [state["exp_avg_sq"] for _, state in states], self.theta)
            group["lr"] *= self._scale()
        try:
            super().step()
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    def _scale(self) -> float:
        """Return the share of the rate that holds in this step: 1, but for the warm-up after a reset."""
        steps, since = self.param_groups[0]["steps"], self.since_reset
        if not self.interval or steps < self.interval or since >= self.warmup:
            return 1.0
        return 1 - 0.99 * (1 + math.cos(math.pi * (since + 1) / (self.warmup + 1))) / 2


def _forget(states: list[dict[str, torch.Tensor]]) -> None:
    if moments := [state[name] for state in states for name in MOMENTS if name in state]:
        torch._foreach_zero_(moments)


def _cut_spikes(grads: list[torch.Tensor], second: list[torch.Tensor], theta: float) -> None:
    """Cut every entry back to the root of theta times its second moment; a nan stays one."""
    if not grads:
        return
    bounds = torch._foreach_sqrt(torch._foreach_mul(second, theta))
    torch._foreach_minimum_(grads, bounds)
    torch._foreach_neg_(bounds)
    torch._foreach_maximum_(grads, bounds)
