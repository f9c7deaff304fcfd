"""Token shards to batches: which sequence is read when, and the batch on the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpt2 import shards
from gpt2.config import TrainConfig
from gpt2.dist import World
from kmatrix.errors import DataError

Place = tuple[int, int]  # shard, window in that shard
Batch = tuple[torch.Tensor, torch.Tensor]  # idx (B, T) and targets (B, T), int64


class Windows:
    """The sequences of one kind of shards: windows of block_size + 1 tokens that overlap by one.

    The targets of a window are its tokens shifted by one, so that each token but a
    shard's first is a target once.
    """

    def __init__(self, folder: Path, kind: str, *, block_size: int, vocab_size: int) -> None:
        self.paths = shards.find(folder, kind)
        self.block_size, self.vocab_size = block_size, vocab_size
        self._tokens = [shards.open_shard(path) for path in self.paths]
        self.counts = tuple(max(0, (len(tokens) - 1) // block_size) for tokens in self._tokens)

    def __len__(self) -> int:
        return sum(self.counts)

    def read(self, places: Sequence[Place]) -> Batch:
        """Return the windows at the places; refuse a token that the vocabulary does not have."""
        rows = np.empty((len(places), self.block_size + 1), dtype=np.int64)  # (B, T + 1)
        for row, (shard, window) in zip(rows, places, strict=True):
            start = window * self.block_size
            row[:] = self._tokens[shard][start : start + self.block_size + 1]
        if rows.max(initial=0) >= self.vocab_size:
            self._refuse(rows, places)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def _refuse(self, rows: npt.NDArray[np.int64], places: Sequence[Place]) -> None:
        row, column = (int(i) for i in np.argwhere(rows >= self.vocab_size)[0])
        shard, window = places[row]
        index = window * self.block_size + column
        raise shards.foreign_token(self.paths[shard], index, int(rows[row, column]), self.vocab_size)

    def spread(self, count: int) -> list[Place]:
        """Return the places of `count` windows at equal distances over all shards; all where there are fewer."""
        total, ends = len(self), np.cumsum(self.counts)
        count = min(count, total)
        places: list[Place] = []
        for number in range(count):
            window = number * total // count
            shard = int(np.searchsorted(ends, window, side="right"))
            places.append((shard, window - int(ends[shard - 1]) if shard else window))
        return places


class Order:
    """The order in which training reads its windows: a function of the seed and the position, and of nothing else.

    An epoch is each window once: shards in a shuffled order, and the windows of a shard
    shuffled. Shuffles are drawn when they are needed, so a thousand shards cost what one does.
    """

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        self.counts, self.seed, self.windows = tuple(counts), seed, sum(counts)
        self._shards = lru_cache(maxsize=2)(self._shuffled_shards)
        self._windows = lru_cache(maxsize=4)(self._shuffled_windows)

    def epoch(self, position: int) -> int:
        """Return how many times every window was read before this position of the stream."""
        return position // self.windows

    def at(self, position: int) -> Place:
        """Return the window at a position of the endless stream of sequences."""
        epoch, offset = divmod(position, self.windows)
        shards_in_order, ends = self._shards(epoch)
        turn = int(np.searchsorted(ends, offset, side="right"))
        shard = int(shards_in_order[turn])
        within = offset - (int(ends[turn - 1]) if turn else 0)
        return shard, int(self._windows(epoch, shard)[within])

    def _shuffled_shards(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        order = np.random.Generator(np.random.PCG64((self.seed, epoch))).permutation(len(self.counts))
        return order, np.cumsum(np.asarray(self.counts, dtype=np.int64)[order])

    def _shuffled_windows(self, epoch: int, shard: int) -> npt.NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64((self.seed, epoch, shard + 1))).permutation(self.counts[shard])


def positions(config: TrainConfig, world: World, step: int, micro: int) -> range:
    """Return the positions of the stream that one rank reads in one micro-batch.

    W ranks of micro-batch B read what one rank of micro-batch W x B would.
    """
    start = step * config.global_batch + (micro * world.size + world.rank) * config.batch_size
    return range(start, start + config.batch_size)


class Batches:
    """The micro-batches of one rank, one after the other, on its device.

    On a GPU the next one is read in a thread, into pinned memory, while the present one is computed.
    """

    def __init__(self, config: TrainConfig, world: World, *, start_step: int = 0) -> None:
        self.config, self.world = config, world
        folder = Path(config.data_path)
        self.windows = Windows(folder, "train", block_size=config.block_size, vocab_size=config.vocab_size)
        self.order = Order(self.windows.counts, config.seed)
        if len(self.windows) < config.global_batch:
            raise DataError(
                f"{folder} has {len(self.windows)} training sequences of {config.block_size} tokens",
                why=f"one step takes {config.global_batch} sequences, and none is drawn twice in an epoch",
                fix="use more data, a smaller global batch or a shorter context",
            )
        self._turn = start_step * config.gradient_accumulation
        self._thread: ThreadPoolExecutor | None = None
        if world.device.type == "cuda":  # a thread begins on GPU 0, and would take memory there
            self._thread = ThreadPoolExecutor(1, "batches", torch.cuda.set_device, (world.device,))
        self._ahead: Future[Batch] | None = None

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step begins."""
        return self.order.epoch(step * self.config.global_batch)

    def seek(self, step: int) -> None:
        """Go on with the first micro-batch of a step."""
        self._turn, self._ahead = step * self.config.gradient_accumulation, None

    def next(self) -> Batch:
        """Return the next micro-batch: idx (B, T) and targets (B, T)."""
        turn, self._turn = self._turn, self._turn + 1
        if self._thread is None:
            return self._read(turn)
        idx, targets = self._ahead.result() if self._ahead else self._read(turn)
        self._ahead = self._thread.submit(self._read, turn + 1)
        device = self.world.device
        return idx.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def _read(self, turn: int) -> Batch:
        step, micro = divmod(turn, self.config.gradient_accumulation)
        places = [self.order.at(position) for position in positions(self.config, self.world, step, micro)]
        idx, targets = self.windows.read(places)
        return (idx.pin_memory(), targets.pin_memory()) if self._thread else (idx, targets)
