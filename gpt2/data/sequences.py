"""The sequences of shards, in one of two layouts, and the order in which training reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpt2.data import shards
from gpt2.data.packing import RowIndex, load_index
from gpt2.data.tokenizer import end_of_document
from kmatrix.errors import DataError
from kmatrix.records.dataset import FLAT, RECORD, local_copy, read_dataset
from kmatrix.records.train_config import TrainConfig

Place = tuple[int, int]  # shard, window in the shard
Batch = tuple[torch.Tensor, torch.Tensor]  # idx (B, T) and targets (B, T), int64


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One dataset of a run."""

    name: str
    folder: Path
    weight: int  # sequences per block of the mix
    shards: int  # training shards that are read, from the first; 0: all


def sources(config: TrainConfig) -> tuple[DataSource, ...]:
    """Return the datasets of a run: one, or those listed in the dataset.json of a mix."""
    folder = Path(config.data_path)
    copy = Path if config.data_streaming else local_copy  # a copy does not grow
    if config.dataset != "mix":
        return (DataSource(name=config.dataset, folder=copy(folder), weight=1, shards=config.data_shards),)
    return tuple(
        DataSource(name=item.name, folder=copy(Path(item.path)), weight=item.weight, shards=item.shards)
        for item in read_dataset(folder / RECORD).sources
    )


class Windows:
    """The sequences of one kind of shards: windows of block_size + 1 tokens that overlap by one token.

    The targets of a window are its tokens shifted by one, so every token except a shard's first is a target once.
    """

    def __init__(self, folder: Path, kind: str, *, block_size: int, count: int = 0) -> None:
        """kind: "train" or "val".  count: only the first shards; 0: all.  Raises DataError without any sequence."""
        self.block_size = block_size
        self.paths: list[Path] = []
        self._tokens: list[shards.Tokens] = []  # memory maps: nothing is read yet
        self.counts: tuple[int, ...] = ()  # sequences per shard
        for path in shards.find(folder, kind, count):
            self.add(path)
        if not len(self):
            raise DataError(
                f"{folder} has no {kind} sequence of {block_size} tokens",
                why="no shard is longer than that; with DATA_LAYOUT=bestfit, none has end-of-document tokens",
                hint="use more data or a shorter BLOCK_SIZE",
            )

    def add(self, path: Path) -> None:
        """Add a shard after the others."""
        self.paths.append(path)
        self._tokens.append(shards.open_shard(path))
        self.counts += (self._count(len(self.paths) - 1),)

    def _count(self, shard: int) -> int:
        """Return the number of sequences of a shard."""
        return max(0, (len(self._tokens[shard]) - 1) // self.block_size)

    def __len__(self) -> int:
        return sum(self.counts)

    def read(self, places: Sequence[Place]) -> Batch:
        """Return the windows at these places."""
        return batch(self.rows(places))

    def rows(self, places: Sequence[Place]) -> npt.NDArray[np.int64]:
        """Return the tokens of the windows at these places: (B, T + 1)."""
        rows = np.empty((len(places), self.block_size + 1), dtype=np.int64)  # (B, T + 1); embeddings take int64
        for row, place in zip(rows, places, strict=True):
            end = 0
            for start, size in self._pieces(place):
                row[end : end + size] = self._tokens[place[0]][start : start + size]
                end += size
        return rows

    def _pieces(self, place: Place) -> Sequence[tuple[int, int]]:
        """Return the first token and the number of tokens of each part of a sequence, block_size + 1 in all."""
        return ((place[1] * self.block_size, self.block_size + 1),)

    def spread(self, count: int) -> list[Place]:
        """Return the places of `count` windows at equal distances over all shards; all places if there are fewer."""
        # Spread out, because adjacent windows are often parts of the same document.
        total, ends = len(self), np.cumsum(self.counts)
        count = min(count, total)
        places: list[Place] = []
        for number in range(count):
            window = number * total // count
            shard = int(np.searchsorted(ends, window, side="right"))
            places.append((shard, window - int(ends[shard - 1]) if shard else window))
        return places


class PackedRows(Windows):
    """Sequences that begin with the end-of-document token and are packed by best fit, of one kind of shards.

    end: that token.  A sequence is a row of block_size + 1 tokens; rows do not overlap, and a document is in one row.
    """

    def __init__(self, folder: Path, kind: str, *, block_size: int, end: int, count: int = 0) -> None:
        self.end = end
        # A run reads one shard after the other: two indices are enough, and one takes 2 MB per 100 million tokens.
        self._index = lru_cache(maxsize=2)(self._loaded)
        super().__init__(folder, kind, block_size=block_size, count=count)

    def _loaded(self, shard: int) -> RowIndex:
        return load_index(self.paths[shard], self._tokens[shard], self.block_size + 1, self.end)

    def _count(self, shard: int) -> int:
        return len(self._index(shard))

    def _pieces(self, place: Place) -> Sequence[tuple[int, int]]:
        return self._index(place[0]).pieces(place[1])


def sequences_of(config: TrainConfig, source: DataSource, kind: str) -> Windows:
    """Return the sequences of a dataset in the layout of a run. kind: "train" or "val"."""
    count = source.shards if kind == "train" else 0
    if config.data_layout == FLAT:
        return Windows(source.folder, kind, block_size=config.block_size, count=count)
    end = end_of_document(config.tokenizer, Path(config.data_path))
    return PackedRows(source.folder, kind, block_size=config.block_size, count=count, end=end)


def batch(rows: npt.NDArray[np.int64]) -> Batch:
    """Return inputs and targets, each (B, T), of windows (B, T + 1)."""
    # Copies, because the two overlap in one buffer, and columns of it are not contiguous.
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


class Order:
    """The order in which training reads the windows of one dataset: a function of seed and position only.

    Each epoch reads every window once: the shards in shuffled order, and the windows of each shard in shuffled order.
    Shuffles are generated on demand, so the cost does not depend on the number of shards.
    in_order: the shards follow each other instead, because further ones may be added (`extend`) during the first epoch.
    """

    def __init__(self, counts: Sequence[int], seed: int, *, source: int = 0, in_order: bool = False) -> None:
        self.in_order = in_order
        self.seed = (seed, source) if source else (seed,)  # datasets of a mix are shuffled independently
        # A cache per object, not `cache` on the methods, which would keep every object alive. A step reads at most from
        # a few epochs and shards; a shard of 100 million tokens has 100,000 windows, 0.8 MB as int64.
        self._shards = lru_cache(maxsize=2)(self._shuffled_shards)
        self._windows = lru_cache(maxsize=4)(self._shuffled_windows)
        self.extend(counts)

    def extend(self, counts: Sequence[int]) -> None:
        """Set the windows of all shards, of which the first are those that are known."""
        self.counts, self.windows = tuple(counts), sum(counts)
        self._shards.cache_clear()

    def epoch(self, position: int) -> int:
        """Return how often every window was read before this position."""
        return position // self.windows

    def at(self, position: int) -> Place:
        """Return the window at a position of the infinite stream of sequences."""
        # Two searches instead of one shuffled list of all windows, which would take 80 MB for 10 billion tokens.
        epoch, offset = divmod(position, self.windows)
        shards_in_order, ends = self._shards(epoch)
        turn = int(np.searchsorted(ends, offset, side="right"))
        shard = int(shards_in_order[turn])
        within = offset - (int(ends[turn - 1]) if turn else 0)
        return shard, int(self._windows(epoch, shard)[within])

    def _shuffled_shards(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the shards in their order, and the windows up to the end of each."""
        # PCG64 by name: NumPy may change what default_rng returns, and the order of the data must stay the same.
        order = np.arange(len(self.counts))
        if not self.in_order:
            order = np.random.Generator(np.random.PCG64((*self.seed, epoch))).permutation(len(self.counts))
        return order, np.cumsum(np.asarray(self.counts, dtype=np.int64)[order])

    def _shuffled_windows(self, epoch: int, shard: int) -> npt.NDArray[np.int64]:
        # + 1, because NumPy ignores zeros at the end of a seed: shard 0 would get the generator of _shuffled_shards.
        return np.random.Generator(np.random.PCG64((*self.seed, epoch, shard + 1))).permutation(self.counts[shard])
