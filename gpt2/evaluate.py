"""The validation loss: a mean over fixed sequences, the same for every micro-batch and number of ranks.

A loss is in nats a token, and another tokenizer has other tokens; bits per byte of text compare over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from gpt2.config import TrainConfig
from gpt2.data import Place, Windows
from gpt2.dist import World
from gpt2.model import autocast
from gpt2.tokenizer import Tokenizer, load
from kmatrix.errors import DataError


class Validation:
    """eval_samples sequences at equal distances over the validation set, always the same.

    They are divided among the ranks: rank r takes r, r + W, r + 2W, ...
    bytes_per_token: UTF-8 bytes of their targets / targets; None where the vocabulary is not at hand.
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
        self.bytes_per_token = bytes_per_token(self.windows, places, at_hand(config.tokenizer, folder))

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


def bytes_per_token(windows: Windows, places: Sequence[Place], tokenizer: Tokenizer | None) -> float | None:
    """Return the mean length in bytes of the targets of some windows, or None where that cannot be known.

    The end of a document is a target of 0 bytes: what the model pays for it is part of what the text costs.
    """
    lengths = tokenizer.token_bytes() if tokenizer else None
    if lengths is None:
        return None
    total = 0
    for place in places:
        _, targets = windows.read([place])  # (1, T)
        total += int(lengths[np.asarray(targets)].sum())
    return total / (len(places) * windows.block_size) or None


def bits_per_byte(loss: float | None, bytes_per_token: float | None) -> float | None:
    """Return a loss in nats a token as bits for each byte of text: loss / ln 2 / bytes a token."""
    if loss is None or bytes_per_token is None:
        return None
    return loss / math.log(2) / bytes_per_token


def at_hand(name: str, folder: Path) -> Tokenizer | None:
    """Return a dataset's tokenizer; None where the dataset came without it: training needs none."""
    try:
        return load(name, folder)
    except DataError:
        return None
