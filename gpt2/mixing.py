"""Which dataset each sequence of a mix is from: a function of the seed and the position, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

SALT = 0x6D6978  # "mix": apart from the shuffles of shards and windows, which the same seed decides


class Mix:
    """An endless stream of sequences in blocks; each block holds every source exactly as often as its weight says.

    The order within a block is shuffled anew for each one, so a share is exact after each block, and off by less than
    one block's part of the source anywhere else. weights: sequences of each source in a block.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        self.weights, self.seed = tuple(weights), seed
        self.block = sum(weights)
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def at(self, position: int) -> tuple[int, int]:
        """Return the source of a position of the stream, and how many sequences of it stand before that position."""
        block, offset = divmod(position, self.block)
        sources, before = self._order(block)
        source = int(sources[offset])
        return source, block * self.weights[source] + int(before[offset])

    def drawn(self, position: int) -> tuple[int, ...]:
        """Return how many sequences of each source stand before a position."""
        block, offset = divmod(position, self.block)
        inside = np.bincount(self._order(block)[0][:offset], minlength=len(self.weights))
        return tuple(block * weight + int(n) for weight, n in zip(self.weights, inside, strict=True))

    def _shuffled(self, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the sources of a block's positions, and for each how many of the same stand before it."""
        sources = np.repeat(np.arange(len(self.weights)), self.weights)
        if len(self.weights) > 1:
            sources = np.random.Generator(np.random.PCG64((self.seed, SALT, block))).permutation(sources)
        before = np.empty_like(sources)
        for source in range(len(self.weights)):
            mine = sources == source
            before[mine] = np.arange(mine.sum())
        return sources, before
