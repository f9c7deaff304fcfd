"""Pruning: an increasing share of the weights in the blocks' matrices becomes and stays 0.

Embeddings, gains and biases are not pruned. All ranks have the same weights, averaged gradients and optimizer states,
so each computes the same masks without communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpt2.optim.groups import block_matrices
from gpt2.optim.optimizers import Optimizers

TINY = 1e-8  # added to the denominator, as in mcgrof/AdamWPrune: a weight without gradients has a second moment of 0
LAG = 4  # counts that are kept, because the log reads them one step late


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Sparsity over time: s(t) = s_f (1 - (1 - p)^3) with progress p = (t - t_0) / (t_1 - t_0).

    Source: Zhu and Gupta 2017 (arXiv:1710.01878), equation 1, with initial sparsity 0.
    """

    target: float  # final sparsity s_f, 0 to 1
    begin: int  # t_0, updates
    end: int  # t_1, updates
    every: int  # updates between two changes of the masks; the last change is at `end`

    @classmethod
    def of(cls, config: Any) -> Ramp:
        begin, end = (round(share * config.max_iters) for share in (config.pruning_warmup, config.pruning_ramp_end))
        return cls(target=config.target_sparsity, begin=begin, end=end, every=config.pruning_frequency)

    def due(self, updates: int) -> bool:
        """Return whether the masks change after this many updates."""
        within = self.begin < updates <= self.end
        # The end counts even if it is not a multiple, else the run would miss its target sparsity.
        return within and ((updates - self.begin) % self.every == 0 or updates == self.end)

    def sparsity(self, updates: int) -> float:
        """Return the target sparsity after this many updates."""
        done = min(max(updates - self.begin, 0) / (self.end - self.begin), 1.0)
        return self.target * (1 - (1 - done) ** 3)


def build(config: Any, model: nn.Module, optimizers: Optimizers) -> Pruner | None:
    """Return the configured pruner of a model, or None without pruning."""
    if config.pruning == "none":
        return None
    return Pruner(config, block_matrices(model), optimizers)


class Pruner:
    """The pruning masks of one model. Call `gradients` before clipping and `weights` after each update.

    A pruned weight never comes back. Methods, by the score whose lowest values are pruned first:
    magnitude: |w|.
    movement: -sum over steps of gradient x w (Sanh et al. 2020, arXiv:2005.07683, equation 3 with a constant rate).
    state: w^2 |m| / (sqrt(v) + 1e-8) with the optimizer's moments m and v (mcgrof/AdamWPrune).
    """

    def __init__(self, config: Any, matrices: Sequence[nn.Parameter], optimizers: Optimizers) -> None:
        self.method = config.pruning
        self.ramp = Ramp.of(config)
        self.matrices: list[torch.Tensor] = list(matrices)
        self.optimizers = optimizers
        self.total = sum(matrix.numel() for matrix in self.matrices)
        self.pruned = [torch.zeros_like(matrix, dtype=torch.bool) for matrix in self.matrices]
        self.movement = [torch.zeros_like(matrix) for matrix in self.matrices if self.method == "movement"]
        self.begun = self.waiting = False
        # (updates, zeros) of the newest mask changes. Zeros stay on the device until the log reads them, a step later,
        # because copying at once would make the loop wait for the GPU.
        self._measured: deque[tuple[int, torch.Tensor | float]] = deque([(0, 0.0)], maxlen=LAG)

    @torch.no_grad()
    def gradients(self) -> None:
        """Update the movement scores with a step's averaged gradients, and zero the gradients of pruned weights."""
        for number, matrix in enumerate(self.matrices):
            if matrix.grad is None:
                continue
            if self.movement:  # a factor that is the same in all steps, such as the learning rate, decides no order
                self.movement[number].addcmul_(matrix.grad, matrix, value=-1)
            # Otherwise pruned weights would count in the norm that clips, and keep feeding the optimizer's moments.
            if self.begun:
                matrix.grad.masked_fill_(self.pruned[number], 0.0)

    @torch.no_grad()
    def weights(self, updates: int) -> None:
        """Zero pruned weights after an update, and prune more if that is due."""
        # If SPAM has just reset the moments, the change waits until they can rank weights again.
        self.waiting = self.waiting or self.ramp.due(updates)
        changed = self.waiting and self.optimizers.warmed_up
        if changed:
            # -inf ranks pruned weights first, so the new masks contain the old ones: no weight comes back.
            pairs = zip(map(self._score, range(len(self.matrices))), self.pruned, strict=True)
            scores = [score.masked_fill(gone, -torch.inf) for score, gone in pairs]
            self.pruned = lowest(scores, round(self.ramp.sparsity(updates) * self.total))
        if changed or self.begun:  # in each step: momentum and weight decay move them even without a gradient
            for matrix, gone in zip(self.matrices, self.pruned, strict=True):
                matrix.masked_fill_(gone, 0.0)
        if changed:
            self.begun, self.waiting = True, False
            self._measured.append((updates, torch.stack([(matrix == 0).sum() for matrix in self.matrices]).sum()))

    def sparsity(self, updates: int) -> float:
        """Return the share of zeros in the pruned matrices, as counted at the last change until so many updates."""
        place = max((n for n, (at, _) in enumerate(self._measured) if at <= updates), default=0)
        at, zeros = self._measured[place]
        self._measured[place] = (at, float(zeros))  # copied from the device only once
        return float(zeros) / self.total

    def state_dict(self) -> dict[str, Any]:
        measured = [(at, float(zeros)) for at, zeros in self._measured]
        return {"pruned": self.pruned, "movement": self.movement, "measured": measured, "waiting": self.waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine, saved = [*self.pruned, *self.movement], [*state["pruned"], *state["movement"]]
        for tensor, value in zip(mine, saved, strict=True):
            tensor.copy_(value)
        self.waiting = state["waiting"]
        self._measured = deque(((int(at), float(zeros)) for at, zeros in state["measured"]), maxlen=LAG)
        self.begun = self._measured[-1][0] > 0

    def _score(self, number: int) -> torch.Tensor:
        """Return the scores of a matrix by its number."""
        matrix = self.matrices[number]
        if self.method == "magnitude":
            return matrix.abs()
        if self.method == "movement":
            return self.movement[number]
        state = next(o.state[matrix] for o in self.optimizers.optimizers if matrix in o.state)
        score: torch.Tensor = matrix.square() * state["exp_avg"].abs() / (state["exp_avg_sq"].sqrt() + TINY)
        return score


def lowest(scores: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return masks of exactly the `count` lowest values of all tensors together; of equal values, the first ones.

    The threshold is found by bisection over the 32 bits of a float, without sorting, concatenation or synchronization.
    """
    keys = [_sortable(score) for score in scores]
    # Find the smallest key with at least `count` keys up to it. The bounds are tensors on the device (int64, so their
    # sum cannot overflow), and torch.where chooses between them: an `if` would wait for the GPU 32 times.
    # torch.full, because torch.tensor would copy from the CPU, and wait for the GPU.
    low, high = (torch.full((), value, device=keys[0].device) for value in (-(2**31), 2**31 - 1))
    for _ in range(32):
        middle = (low + high) >> 1
        enough = torch.stack([(key <= middle).sum() for key in keys]).sum() >= count
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    # All below the threshold, and of those equal to it the first ones until the count is exact.
    masks = [key < low for key in keys]
    left = count - torch.stack([mask.sum() for mask in masks]).sum()
    for place, key in enumerate(keys):
        equal = (key == low).flatten()
        taken = equal & (equal.cumsum(0) <= left)
        masks[place] |= taken.view_as(key)
        left = left - taken.sum()
    return masks


def _sortable(score: torch.Tensor) -> torch.Tensor:
    """Return integers with the same order as the float32 values."""
    # IEEE 754 stores sign and magnitude: the bits of positive floats are in order, those of negative ones in reverse.
    bits = score.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
