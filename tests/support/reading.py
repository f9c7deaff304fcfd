"""What tests of data and checkpoints share: ranks, batches and states without a training loop."""

from __future__ import annotations

from typing import Any

import torch

from gpt2.checkpoint import TrainingState
from gpt2.data.batches import Batches
from gpt2.dist import World
from gpt2.model.base import LanguageModel
from gpt2.optim.builders import build_optimizers
from kmatrix.records.train_config import TrainConfig


def world(rank: int = 0, size: int = 1) -> World:
    """Return the world of a rank, without a process group."""
    return World(rank=rank, size=size, device=torch.device("cpu"))


def batches_at(config: TrainConfig, step: int) -> Batches:
    """Return the batches of a run that was resumed at a step."""
    found = Batches(config, world())
    found.seek(step)
    return found


def training_state(config: TrainConfig, model: LanguageModel, **more: Any) -> TrainingState:
    """Return the state of a training that has not begun."""
    return TrainingState(config=config, world=world(), model=model, optimizers=build_optimizers(config, model), **more)


class SumOfTokens(torch.nn.Module):
    """A model whose loss is the mean of the targets, so that a validation loss can be computed by hand."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return targets.reshape(-1).float(), targets.float().mean()
