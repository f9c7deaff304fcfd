"""All optimizers of a run, used as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Optimizers:
    """One or more torch optimizers used as one. Learning rates are scaled from their initial values, the peaks."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.keeps_gradients = False  # gradients stay in the same memory from step to step
        self._peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Delete the gradients, or zero them where they are (`keeps_gradients`)."""
        for optimizer in self.optimizers:
            # Without gradients, the first backward writes instead of adding to zeros.
            optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def set_scale(self, scale: float, step: int = 0) -> None:
        """Set the learning rate of each group to `scale` times its peak, and what else depends on a 0-based step."""
        for optimizer in self.optimizers:
            begin_step = getattr(optimizer, "begin_step", None)  # of optimizers with schedules of their own
            if begin_step:
                begin_step(step)
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale

    @property
    def lr(self) -> float:
        """The current learning rate of the first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def warmed_up(self) -> bool:
        """Return whether the moments of all optimizers are usable. They are not right after a reset by SPAM."""
        return all(getattr(optimizer, "warmed_up", True) for optimizer in self.optimizers)

    @property
    def sharded(self) -> bool:
        """Return whether each rank holds a share of the states (gpt2.optim.sharded): saving them is a collective."""
        return False

    @property
    def state_bytes(self) -> int:
        """The size of the optimizer states that this rank holds."""
        sizes: list[int] = []
        for optimizer in self.optimizers:
            each(dict(optimizer.state), lambda state: sizes.append(state.numel() * state.element_size()))
        return sum(sizes)

    @property
    def averages(self) -> bool:
        """Return whether evaluation uses other weights than training."""
        return bool(self._averaging())

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Switch the model to its evaluation weights inside the context, and restore the training weights bit for bit.

        Training weights are kept as copies, because switching back by arithmetic would round them.
        """
        averaging = self._averaging()
        copies = [(p, p.detach().clone()) for o in averaging for group in o.param_groups for p in group["params"]]
        for optimizer in averaging:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in averaging:
                optimizer.train()  # for the optimizer's own flag; its arithmetic is overwritten by the copies
            with torch.no_grad():
                for parameter, weights in copies:
                    parameter.copy_(weights)

    def _averaging(self) -> list[Any]:
        """Return the optimizers that have separate evaluation weights, such as Schedule-Free."""
        # torch.optim.Optimizer has neither train() nor eval(): both are the convention of schedule_free.
        return [optimizer for optimizer in self.optimizers if hasattr(optimizer, "eval")]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a nested value with `change` applied to its tensors."""
    if isinstance(value, dict):
        return {name: each(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(each(item, change) for item in value)
    return change(value) if isinstance(value, torch.Tensor) else value
