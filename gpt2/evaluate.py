"""The validation loss: a mean over fixed sequences, the same for every micro-batch and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gpt2.config import TrainConfig
from gpt2.data import Windows
from gpt2.dist import World
from gpt2.model import autocast
from kmatrix.errors import DataError


class Validation:
    """eval_samples sequences at equal distances over the validation set, always the same.

    They are divided among the ranks: rank r takes r, r + W, r + 2W, ...
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        folder = Path(config.data_path)
        self.windows = Windows(folder, "val", block_size=config.block_size, vocab_size=config.vocab_size)
        places = self.windows.spread(config.eval_samples)
        if not places:
            raise DataError(
                f"{folder} has no validation sequence of {config.block_size} tokens",
                why="every *_val_*.bin is shorter than the context and one token",
                fix="use more validation data or a shorter context",
            )
        self.samples = len(places)
        self._mine = places[world.rank :: world.size]

    @torch.no_grad()
    def loss(self, model: torch.nn.Module, stopping: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean loss a token over the sequences, the same number on every rank.

        None when a rank left off because it is `stopping`. No random number is drawn, and
        the model is left in training mode.
        """
        device = self.world.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss x sequences, sequences
        model.eval()
        for start in range(0, len(self._mine), self.config.batch_size):
            if stopping():
                break
            idx, targets = self.windows.read(self._mine[start : start + self.config.batch_size])  # (B, T)
            with autocast(device.type, self.config.dtype):
                _, loss = model(idx.to(device), targets.to(device))
            sums[0] += loss.double() * len(idx)
            sums[1] += len(idx)
        model.train()
        total, sequences = self.world.sum(sums).tolist()
        return total / sequences if sequences == self.samples else None
