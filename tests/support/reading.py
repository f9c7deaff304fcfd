"""What tests of the data while training share."""

from __future__ import annotations

import torch

from gpt2.data.batches import Batches
from gpt2.dist import World
from kmatrix.records.train_config import TrainConfig


def world(rank: int = 0, size: int = 1) -> World:
    """Return the world of a rank, without a process group."""
    return World(rank=rank, local_rank=rank, size=size, device=torch.device("cpu"))


def batches_at(config: TrainConfig, step: int) -> Batches:
    """Return the batches of a run that was resumed at a step."""
    found = Batches(config, world())
    found.seek(step)
    return found


class SumOfTokens(torch.nn.Module):
    """A model whose loss is the mean of the targets, so that a validation loss can be computed by hand."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return targets.reshape(-1).float(), targets.float().mean()
