"""Batches from token shards: the order of sequences, and the loading of micro-batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpt2.data import shards
from gpt2.data.loader import Loader
from gpt2.data.sequences import Batch, Order, batch, sequences_of, sources
from gpt2.data.streaming import GrowingShards, Say, wait_for
from gpt2.dist import World
from kmatrix.errors import DataError
from kmatrix.records.dataset import RECORD, read_dataset, sha256_of_mix, sha256_of_reading, tokens_to_read
from kmatrix.records.train_config import TrainConfig

SALT = 0x6D6978  # "mix": makes these shuffles independent of those of shards and windows


def check_data(config: TrainConfig, say: Say) -> None:
    """Raise DataError if the data changed since the run was planned; log a note if that is unknown."""
    folder = Path(config.data_path)
    found = planned_sha256(config)
    if found is None:
        say(f"Data: {folder} has no dataset.json; the hash of its files is not checked")
    elif found != config.data_sha256:  # a loss on other data must not be compared with the rest of the matrix
        raise DataError(
            f"the data in {folder} changed after the run was planned",
            why=f"hash {found[:12]}..., expected {config.data_sha256[:12]}...",
            hint="restore the former shards, or create a new matrix",
        )


def planned_sha256(config: TrainConfig) -> str | None:
    """Return the hash of the data according to dataset.json, None without that. Raises DataError if a shard changed."""
    folder = Path(config.data_path)
    if config.dataset == "mix":  # it has only the hashes of its datasets, whose files may have changed since
        parts = read_dataset(folder / RECORD).sources
        hashes = [shards.recorded_sha256(Path(part.path), part.shards) or "" for part in parts]
        found: str | None = sha256_of_mix(
            (part.name, part.weight, sha256) for part, sha256 in zip(parts, hashes, strict=True)
        )
    else:
        found = shards.recorded_sha256(folder, config.data_shards)
    return found and sha256_of_reading(found, config)


def positions(config: TrainConfig, world: World, step: int, micro: int) -> range:
    """Return the stream positions of one micro-batch on one rank.

    W ranks with micro-batch B read the same sequences as one rank with micro-batch W x B.
    """
    # Micro-batches in turn, rank by rank: a step reads consecutive positions, however it is divided.
    start = step * config.global_batch + (micro * world.size + world.rank) * config.batch_size
    return range(start, start + config.batch_size)


class Batches:
    """The consecutive micro-batches of one rank, from one dataset or from a weighted mix, on its device."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.sources = sources(config)
        self.mix = Mix([source.weight for source in self.sources], config.seed)
        self.windows = [sequences_of(config, source, "train") for source in self.sources]
        self.orders = [
            Order(windows.counts, config.seed, source=number, in_order=config.data_streaming)
            for number, windows in enumerate(self.windows)
        ]
        self.growing: list[GrowingShards] = []  # of streamed data
        if config.data_streaming:
            for source, windows, order in zip(self.sources, self.windows, self.orders, strict=True):
                tokens = tokens_to_read(config, share=source.weight / self.mix.block)
                self.growing.append(GrowingShards(source, windows, order, tokens=tokens))
        self._next = 0  # number of the next micro-batch since the run's start
        self._loader = Loader(world.device)
        self._ahead: Future[Batch] | None = None

    def describe(self) -> list[str]:
        """Return a log line on how often the run reads its data."""
        if self.growing:
            return ["Data: streamed, so the number of epochs is not known"]
        drawn = self.mix.drawn(self.config.max_iters * self.config.global_batch)
        found = zip(self.sources, self.orders, drawn, strict=True)
        epochs = [f"{source.name} {count / order.windows:.2f} epochs" for source, order, count in found]
        return [f"Data: {', '.join(epochs)}"]

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step starts; of a mix, that of the dataset read most often."""
        drawn = self.mix.drawn(step * self.config.global_batch)
        return max(order.epoch(count) for order, count in zip(self.orders, drawn, strict=True))

    def wait(self, stopping: Callable[[], bool], say: Say) -> float | None:
        """Wait until all ranks can read the data of the next step. Return the seconds; None after a stop."""
        end = (self._next // self.config.gradient_accumulation + 1) * self.config.global_batch
        if self._covers(end):
            return 0.0
        return wait_for(self.growing, self.mix.drawn(end), self.world, stopping, say)

    def _covers(self, end: int) -> bool:
        """Return whether the sequences before a position can be read: those of streamed data may not be there yet."""
        return all(one.covers(count) for one, count in zip(self.growing, self.mix.drawn(end), strict=False))

    def seek(self, step: int) -> None:
        """Continue with the first micro-batch of a step."""
        self._next, self._ahead = step * self.config.gradient_accumulation, None  # what was read ahead is not next

    def next(self) -> Batch:
        """Return the next micro-batch: idx (B, T) and targets (B, T)."""
        current = self._loader.finish(self._ahead or self._begin(self._next))
        self._next += 1
        # That of a later step may not be prepared yet
        reads_ahead = self._loader.reads_ahead and self._covers(self._positions(self._next).stop)
        self._ahead = self._begin(self._next) if reads_ahead else None
        return current

    def _begin(self, number: int) -> Future[Batch]:
        return self._loader.begin(lambda: self.read(self._positions(number)))

    def _positions(self, number: int) -> range:
        """Return the positions of a micro-batch of this rank. number: since the run's start."""
        return positions(self.config, self.world, *divmod(number, self.config.gradient_accumulation))

    def read(self, at: Sequence[int]) -> Batch:
        """Return the sequences at these positions: idx and targets, each (B, T)."""
        # Group by dataset, so that each one is read at once, and write the rows back in the order of the positions.
        drawn = [self.mix.at(position) for position in at]
        rows = np.empty((len(drawn), self.config.block_size + 1), dtype=np.int64)  # (B, T + 1)
        for number, (windows, order) in enumerate(zip(self.windows, self.orders, strict=True)):
            mine = [row for row, (source, _) in enumerate(drawn) if source == number]
            rows[mine] = windows.rows([order.at(drawn[row][1]) for row in mine])
        return batch(rows)


class Mix:
    """An infinite stream of sequences in blocks, in which every dataset occurs exactly as often as its weight.

    Each block is shuffled separately, so shares are exact after every block. weights: sequences per block.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        self.weights, self.seed = tuple(weights), seed
        self.block = sum(weights)
        self._order = lru_cache(maxsize=4)(self._shuffled)  # blocks; consecutive positions share them

    def at(self, position: int) -> tuple[int, int]:
        """Return the dataset at a position of the stream, and how many of its sequences precede that position."""
        block, offset = divmod(position, self.block)
        sources, before = self._order(block)
        source = int(sources[offset])
        return source, block * self.weights[source] + int(before[offset])

    def drawn(self, position: int) -> tuple[int, ...]:
        """Return how many sequences of each dataset precede a position."""
        block, offset = divmod(position, self.block)  # whole blocks have exact shares: only the last one is counted
        inside = np.bincount(self._order(block)[0][:offset], minlength=len(self.weights))
        return tuple(block * weight + int(n) for weight, n in zip(self.weights, inside, strict=True))

    def _shuffled(self, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the dataset at each position of a block, and how many of the same dataset precede it."""
        sources = np.repeat(np.arange(len(self.weights)), self.weights)  # (block,)
        if len(self.weights) > 1:
            sources = np.random.Generator(np.random.PCG64((self.seed, SALT, block))).permutation(sources)
        before = np.empty_like(sources)
        for source in range(len(self.weights)):
            mine = sources == source
            before[mine] = np.arange(mine.sum())
        return sources, before
