"""One or more torch optimizers that step as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Optimizers:
    """One or more torch optimizers that step as one, each group at a share of its own peak learning rate.

    The rates that the optimizers have when this is made are the peaks.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self._peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_scale(self, scale: float) -> None:
        """Set each group's learning rate to `scale` times its peak."""
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale

    @property
    def lr(self) -> float:
        """The present learning rate of the first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def settled(self) -> bool:
        """Whether the moments say something; they do not right after SPAM has reset them."""
        return all(getattr(optimizer, "settled", True) for optimizer in self.optimizers)

    @property
    def averages(self) -> bool:
        """Whether the weights that are to be judged differ from those that are trained."""
        return bool(self._averaging())

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Inside, the model has the weights that are to be judged; afterwards its training weights, bit for bit.

        The training weights are kept as copies: going to the average and back by arithmetic would round them.
        """
        averaging = self._averaging()
        kept = [(p, p.detach().clone()) for o in averaging for group in o.param_groups for p in group["params"]]
        for optimizer in averaging:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in averaging:
                optimizer.train()
            with torch.no_grad():
                for parameter, weights in kept:
                    parameter.copy_(weights)

    def _averaging(self) -> list[Any]:
        """The optimizers that switch between two sets of weights, as Schedule-Free does."""
        return [optimizer for optimizer in self.optimizers if hasattr(optimizer, "eval")]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
