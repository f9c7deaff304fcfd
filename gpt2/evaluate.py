"""The validation loss: a mean over fixed sequences, the same for every micro-batch and number of ranks.

A loss is in nats a token, and another tokenizer has other tokens; bits per byte of text compare over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gpt2.config import TrainConfig
from gpt2.data import Place, Windows, sources
from gpt2.dist import World
from gpt2.model import autocast
from gpt2.tokenizer import Tokenizer, load
from kmatrix.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The validation sequences of one dataset. places: of all ranks.  mine: those of this one."""

    name: str
    weight: int
    windows: Windows
    places: list[Place]
    mine: list[Place]

    @property
    def samples(self) -> int:
        return len(self.places)


class Validation:
    """eval_samples sequences of each dataset at equal distances over its validation set, always the same.

    They are divided among the ranks: rank r takes r, r + W, r + 2W, ...
    by_source: the loss of each dataset when it was last measured.
    bytes_per_token: UTF-8 bytes of their targets / targets; None where the vocabulary is not at hand.
    Of a mix it is a mean by the weights, as the loss is.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.parts: list[Part] = []
        for source in sources(config):
            windows = Windows(source.folder, "val", block_size=config.block_size, vocab_size=config.vocab_size)
            places = windows.spread(config.eval_samples)
            if not places:
                raise DataError(
                    f"{source.folder} has no validation sequence of {config.block_size} tokens",
                    why="every validation shard is shorter than the context and one token",
                    fix="use more validation data or a shorter context",
                )
            mine = places[world.rank :: world.size]
            self.parts.append(Part(name=source.name, weight=source.weight, windows=windows, places=places, mine=mine))
        self.samples = sum(part.samples for part in self.parts)
        self.wanted = config.eval_samples * len(self.parts)
        self.by_source: dict[str, float] = {}
        tokenizer = at_hand(config.tokenizer, Path(config.data_path))
        self.bytes_per_token = self._mean(
            [bytes_per_token(part.windows, part.places, tokenizer) for part in self.parts]
        )

    @torch.no_grad()
    def loss(self, model: torch.nn.Module, stopping: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean loss a token over the sequences, the same number on every rank; of a mix by its weights.

        None when a rank left off because it is `stopping`. No random number is drawn, and
        the model is left in training mode.
        """
        device = self.world.device
        sums = torch.zeros(len(self.parts), 2, dtype=torch.float64, device=device)  # loss x sequences, sequences
        model.eval()
        for part, of_part in zip(self.parts, sums, strict=True):
            for start in range(0, len(part.mine), self.config.batch_size):
                if stopping():
                    break
                idx, targets = part.windows.read(part.mine[start : start + self.config.batch_size])  # (B, T)
                with autocast(device.type, self.config.dtype):
                    _, loss = model(idx.to(device), targets.to(device))
                of_part[0] += loss.double() * len(idx)
                of_part[1] += len(idx)
        model.train()
        found: list[list[float]] = self.world.sum(sums).tolist()
        if any(count != part.samples for part, (_, count) in zip(self.parts, found, strict=True)):
            return None
        means = [total / count for total, count in found]
        self.by_source = {part.name: mean for part, mean in zip(self.parts, means, strict=True)}
        return self._mean(means)

    def _mean(self, values: Sequence[float | None]) -> float | None:
        """Return the mean over the datasets by their weights; None where one is not known."""
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        weights = [part.weight for part in self.parts]
        return sum(value * weight for value, weight in zip(known, weights, strict=True)) / sum(weights)


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


def at_hand(name: str, folder: Path) -> Tokenizer | None:
    """Return a dataset's tokenizer; None where the dataset came without it: training needs none."""
    try:
        return load(name, folder)
    except DataError:
        return None
