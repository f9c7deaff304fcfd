"""Token shards to batches: which sequence is read when, and the batch on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpt2 import shards
from gpt2.config import TrainConfig
from gpt2.dist import World
from gpt2.mixing import Mix
from kmatrix.errors import DataError
from kmatrix.records import read_json

Place = tuple[int, int]  # shard, window in that shard
Batch = tuple[torch.Tensor, torch.Tensor]  # idx (B, T) and targets (B, T), int64
MANY_EPOCHS = 4  # repeats beyond these add little: Muennighoff et al. 2023, arXiv:2305.16264


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One dataset of a run. weight: its sequences in each block of the mix.  shards: the first so many, 0 for all."""

    name: str
    folder: Path
    weight: int
    shards: int


def sources(config: TrainConfig) -> tuple[Source, ...]:
    """Return the datasets that a run reads: one, or those that the dataset.json of a mix lists."""
    folder = Path(config.data_path)
    if config.dataset != "mix":
        return (Source(name=config.dataset, folder=folder, weight=1, shards=config.data_shards),)
    return tuple(
        Source(name=item["name"], folder=Path(item["path"]), weight=item["weight"], shards=item["shards"])
        for item in read_json(folder / shards.RECORD)["sources"]
    )


def planned_sha256(config: TrainConfig) -> str | None:
    """Return the hash of the data as their dataset.json have it; None where one does not speak of the files."""
    if config.dataset != "mix":
        return shards.recorded_sha256(Path(config.data_path), config.data_shards)
    record = read_json(Path(config.data_path) / shards.RECORD)
    for item in record["sources"]:
        found = shards.recorded_sha256(Path(item["path"]), item["shards"])
        if found != item["sha256"]:
            return found  # of one source: it cannot be the mix's
    return str(record["sha256"])


class Windows:
    """The sequences of one kind of shards: windows of block_size + 1 tokens that overlap by one.

    The targets of a window are its tokens shifted by one, so that each token but a
    shard's first is a target once.
    """

    def __init__(self, folder: Path, kind: str, *, block_size: int, vocab_size: int, count: int = 0) -> None:
        self.paths = shards.find(folder, kind, count)
        self.block_size, self.vocab_size = block_size, vocab_size
        self._tokens = [shards.open_shard(path) for path in self.paths]
        self.counts = tuple(max(0, (len(tokens) - 1) // block_size) for tokens in self._tokens)

    def __len__(self) -> int:
        return sum(self.counts)

    def read(self, places: Sequence[Place]) -> Batch:
        """Return the windows at the places; refuse a token that the vocabulary does not have."""
        return batch(self.rows(places))

    def rows(self, places: Sequence[Place]) -> npt.NDArray[np.int64]:
        """Return the tokens of the windows at the places, (B, T + 1)."""
        rows = np.empty((len(places), self.block_size + 1), dtype=np.int64)
        for row, (shard, window) in zip(rows, places, strict=True):
            start = window * self.block_size
            row[:] = self._tokens[shard][start : start + self.block_size + 1]
        if rows.max(initial=0) >= self.vocab_size:
            self._refuse(rows, places)
        return rows

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


def batch(rows: npt.NDArray[np.int64]) -> Batch:
    """Return inputs and targets of windows (B, T + 1)."""
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


class Order:
    """The order in which training reads its windows: a function of the seed and the position, and of nothing else.

    An epoch is each window once: shards in a shuffled order, and the windows of a shard
    shuffled. Shuffles are drawn when they are needed, so a thousand shards cost what one does.
    """

    def __init__(self, counts: Sequence[int], seed: int, *, source: int = 0) -> None:
        self.counts, self.windows = tuple(counts), sum(counts)
        self.seed = (seed, source) if source else (seed,)  # sources of a mix are shuffled apart
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
        order = np.random.Generator(np.random.PCG64((*self.seed, epoch))).permutation(len(self.counts))
        return order, np.cumsum(np.asarray(self.counts, dtype=np.int64)[order])

    def _shuffled_windows(self, epoch: int, shard: int) -> npt.NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64((*self.seed, epoch, shard + 1))).permutation(self.counts[shard])


def positions(config: TrainConfig, world: World, step: int, micro: int) -> range:
    """Return the positions of the stream that one rank reads in one micro-batch.

    W ranks of micro-batch B read what one rank of micro-batch W x B would.
    """
    start = step * config.global_batch + (micro * world.size + world.rank) * config.batch_size
    return range(start, start + config.batch_size)


class Stream:
    """The training sequences of a run, by their position: of one dataset, or of several by their weights."""

    def __init__(self, config: TrainConfig) -> None:
        self.sources = sources(config)
        sizes = {"block_size": config.block_size, "vocab_size": config.vocab_size}
        self.windows = [Windows(source.folder, "train", count=source.shards, **sizes) for source in self.sources]
        for windows, source in zip(self.windows, self.sources, strict=True):
            least = config.global_batch if len(self.sources) == 1 else 1
            if len(windows) < least:
                raise DataError(
                    f"{source.folder} has {len(windows)} training sequences of {config.block_size} tokens",
                    why=f"one step takes {least} sequences, and none is drawn twice in an epoch",
                    fix="use more data, a smaller global batch or a shorter context",
                )
        self.mix = Mix([source.weight for source in self.sources], config.seed)
        self.orders = [Order(w.counts, config.seed, source=number) for number, w in enumerate(self.windows)]

    def read(self, at: Sequence[int]) -> Batch:
        """Return the sequences at these positions, (B, T) each."""
        drawn = [self.mix.at(position) for position in at]
        rows = np.empty((len(drawn), self.windows[0].block_size + 1), dtype=np.int64)  # (B, T + 1)
        for number, (windows, order) in enumerate(zip(self.windows, self.orders, strict=True)):
            mine = [row for row, (source, _) in enumerate(drawn) if source == number]
            rows[mine] = windows.rows([order.at(drawn[row][1]) for row in mine])
        return batch(rows)

    def epoch(self, position: int) -> int:
        """Return how many times every sequence was read before a position: of the source that was read most often."""
        drawn = self.mix.drawn(position)
        return max(order.epoch(count) for order, count in zip(self.orders, drawn, strict=True))

    def epochs(self, sequences: int) -> dict[str, float]:
        """Return how often a run of so many sequences reads each source."""
        drawn = self.mix.drawn(sequences)
        return {
            source.name: count / order.windows
            for source, order, count in zip(self.sources, self.orders, drawn, strict=True)
        }


def describe(epochs: dict[str, float]) -> list[str]:
    """Return what a log says of how often a run reads its data, and the warning where that is often."""
    lines = ["Data: " + ", ".join(f"{name} {count:.2f} epochs" for name, count in epochs.items())]
    lines += [
        f"warning: {name} is read {math.ceil(count)} times: overfitting is likely, and more than {MANY_EPOCHS} epochs "
        "add little (arXiv:2305.16264)"
        for name, count in epochs.items()
        if count > MANY_EPOCHS
    ]
    return lines


class Batches:
    """The micro-batches of one rank, one after the other, on its device.

    On a GPU the next one is read in a thread, into pinned memory, while the present one is computed.
    """

    def __init__(self, config: TrainConfig, world: World, *, start_step: int = 0) -> None:
        self.config, self.world = config, world
        self.stream = Stream(config)
        self._turn = start_step * config.gradient_accumulation
        self._thread: ThreadPoolExecutor | None = None
        if world.device.type == "cuda":  # a thread begins on GPU 0, and would take memory there
            self._thread = ThreadPoolExecutor(1, "batches", torch.cuda.set_device, (world.device,))
        self._ahead: Future[Batch] | None = None

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step begins."""
        return self.stream.epoch(step * self.config.global_batch)

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
        idx, targets = self.stream.read(positions(self.config, self.world, step, micro))
        return (idx.pin_memory(), targets.pin_memory()) if self._thread else (idx, targets)
