"""Batches from token shards: the order of sequences, and the loading of micro-batches to the device."""

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

from gpt2.data import shards
from gpt2.data.packing import RowIndex, load_index, no_rows
from gpt2.data.tokenizer import end_of_document
from gpt2.dist import World
from kmatrix.errors import DataError
from kmatrix.records.dataset import FLAT, RECORD, local_copy, read_dataset, sha256_of_layout
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import plural

Place = tuple[int, int]  # shard, window in the shard
Batch = tuple[torch.Tensor, torch.Tensor]  # idx (B, T) and targets (B, T), int64
MANY_EPOCHS = 4  # repeats beyond these add little: Muennighoff et al. 2023, arXiv:2305.16264
SALT = 0x6D6978  # "mix": makes these shuffles independent of those of shards and windows


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
    if config.dataset != "mix":
        return (DataSource(name=config.dataset, folder=local_copy(folder), weight=1, shards=config.data_shards),)
    return tuple(
        DataSource(name=item.name, folder=local_copy(Path(item.path)), weight=item.weight, shards=item.shards)
        for item in read_dataset(folder / RECORD).sources
    )


def planned_sha256(config: TrainConfig) -> str | None:
    """Return the hash of the data according to dataset.json; None if that does not match the files."""
    found = _sha256_of_shards(config)
    return found and sha256_of_layout(found, config.data_layout)


def _sha256_of_shards(config: TrainConfig) -> str | None:
    if config.dataset != "mix":
        return shards.recorded_sha256(Path(config.data_path), config.data_shards)
    record = read_dataset(Path(config.data_path) / RECORD)
    for item in record.sources:  # the mix has only their hashes: the files may have changed since
        found = shards.recorded_sha256(Path(item.path), item.shards)
        if found != item.sha256:
            return found  # the hash of one dataset, which differs from the mix's
    return record.sha256


class Windows:
    """The sequences of one kind of shards: windows of block_size + 1 tokens that overlap by one token.

    The targets of a window are its tokens shifted by one, so every token except a shard's first is a target once.
    """

    def __init__(self, folder: Path, kind: str, *, block_size: int, vocab_size: int, count: int = 0) -> None:
        self.paths = shards.find(folder, kind, count)
        self.block_size, self.vocab_size = block_size, vocab_size
        self._tokens = [shards.open_shard(path) for path in self.paths]  # memory maps: nothing is read yet
        self.counts = tuple(self._count(shard) for shard in range(len(self.paths)))

    def _count(self, shard: int) -> int:
        """Return the number of sequences of a shard."""
        return max(0, (len(self._tokens[shard]) - 1) // self.block_size)

    def __len__(self) -> int:
        return sum(self.counts)

    def read(self, places: Sequence[Place]) -> Batch:
        """Return the windows at these places. Raises DataError if a token is outside the vocabulary."""
        return batch(self.rows(places))

    def rows(self, places: Sequence[Place]) -> npt.NDArray[np.int64]:
        """Return the tokens of the windows at these places: (B, T + 1)."""
        rows = np.empty((len(places), self.block_size + 1), dtype=np.int64)  # (B, T + 1); embeddings take int64
        for row, place in zip(rows, places, strict=True):
            end = 0
            for start, size in self._pieces(place):
                row[end : end + size] = self._tokens[place[0]][start : start + size]
                end += size
        # Shards of another tokenizer. On a GPU an index outside the embedding ends the process without naming it.
        if rows.max(initial=0) >= self.vocab_size:
            self._refuse(rows, places)
        return rows

    def _pieces(self, place: Place) -> Sequence[tuple[int, int]]:
        """Return the first token and the number of tokens of each part of a sequence, block_size + 1 in all."""
        return ((place[1] * self.block_size, self.block_size + 1),)

    def _refuse(self, rows: npt.NDArray[np.int64], places: Sequence[Place]) -> None:
        row, column = (int(i) for i in np.argwhere(rows >= self.vocab_size)[0])
        place = places[row]
        index = [start + offset for start, size in self._pieces(place) for offset in range(size)][column]
        raise shards.foreign_token(self.paths[place[0]], index, int(rows[row, column]), self.vocab_size)

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

    def __init__(self, folder: Path, kind: str, *, block_size: int, vocab_size: int, end: int, count: int = 0) -> None:
        self.end = end
        # A run reads one shard after the other: two indices are enough, and one takes 2 MB per 100 million tokens.
        self._index = lru_cache(maxsize=2)(self._loaded)
        super().__init__(folder, kind, block_size=block_size, vocab_size=vocab_size, count=count)
        if not len(self):
            raise no_rows(folder, end)

    def _loaded(self, shard: int) -> RowIndex:
        return load_index(self.paths[shard], self._tokens[shard], self.block_size + 1, self.end)

    def _count(self, shard: int) -> int:
        return len(self._index(shard))

    def _pieces(self, place: Place) -> Sequence[tuple[int, int]]:
        return self._index(place[0]).pieces(place[1])


def sequences_of(config: TrainConfig, source: DataSource, kind: str) -> Windows:
    """Return the sequences of a dataset in the layout of a run. kind: "train" or "val"."""
    count = source.shards if kind == "train" else 0
    sizes = {"block_size": config.block_size, "vocab_size": config.vocab_size, "count": count}
    if config.data_layout == FLAT:
        return Windows(source.folder, kind, **sizes)
    return PackedRows(source.folder, kind, end=end_of_document(config.tokenizer, Path(config.data_path)), **sizes)


def batch(rows: npt.NDArray[np.int64]) -> Batch:
    """Return inputs and targets, each (B, T), of windows (B, T + 1)."""
    # Copies, because the two overlap in one buffer, and columns of it are not contiguous.
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


class Order:
    """The order in which training reads the windows of one dataset: a function of seed and position only.

    Each epoch reads every window once: the shards in shuffled order, and the windows of each shard in shuffled order.
    Shuffles are generated on demand, so the cost does not depend on the number of shards.
    """

    def __init__(self, counts: Sequence[int], seed: int, *, source: int = 0) -> None:
        self.counts, self.windows = tuple(counts), sum(counts)
        self.seed = (seed, source) if source else (seed,)  # datasets of a mix are shuffled independently
        # A cache per object, not `cache` on the methods, which would keep every object alive. A step reads at most from
        # a few epochs and shards; a shard of 100 million tokens has 100,000 windows, 0.8 MB as int64.
        self._shards = lru_cache(maxsize=2)(self._shuffled_shards)
        self._windows = lru_cache(maxsize=4)(self._shuffled_windows)

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

    def describe(self) -> str:
        """Describe the order of an epoch."""
        return f"{plural(len(self.counts), 'shard')} with {plural(self.windows, 'sequence')} in a new random order"

    def _shuffled_shards(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        # PCG64 by name: NumPy may change what default_rng returns, and the order of the data must stay the same.
        order = np.random.Generator(np.random.PCG64((*self.seed, epoch))).permutation(len(self.counts))
        return order, np.cumsum(np.asarray(self.counts, dtype=np.int64)[order])

    def _shuffled_windows(self, epoch: int, shard: int) -> npt.NDArray[np.int64]:
        # + 1, because NumPy ignores zeros at the end of a seed: shard 0 would get the generator of _shuffled_shards.
        return np.random.Generator(np.random.PCG64((*self.seed, epoch, shard + 1))).permutation(self.counts[shard])


def positions(config: TrainConfig, world: World, step: int, micro: int) -> range:
    """Return the stream positions of one micro-batch on one rank.

    W ranks with micro-batch B read the same sequences as one rank with micro-batch W x B.
    """
    # Micro-batches in turn, rank by rank: a step reads consecutive positions, however it is divided.
    start = step * config.global_batch + (micro * world.size + world.rank) * config.batch_size
    return range(start, start + config.batch_size)


class Stream:
    """The training sequences of a run by position, from one dataset or from a weighted mix."""

    def __init__(self, config: TrainConfig) -> None:
        self.sources = sources(config)
        self.windows = [sequences_of(config, source, "train") for source in self.sources]
        for windows, source in zip(self.windows, self.sources, strict=True):
            # A mix may contain a dataset that is smaller than a step: it is only repeated more often.
            least = config.global_batch if len(self.sources) == 1 else 1
            if len(windows) < least:
                raise DataError(
                    f"{source.folder} has {len(windows)} training sequences of {config.block_size} tokens",
                    why=f"a step takes {least} sequences, and an epoch reads each sequence once",
                    hint="use more data, a smaller global batch or a shorter context",
                )
        self.mix = Mix([source.weight for source in self.sources], config.seed)
        self.orders = [Order(w.counts, config.seed, source=number) for number, w in enumerate(self.windows)]

    def read(self, at: Sequence[int]) -> Batch:
        """Return the sequences at these positions: idx and targets, each (B, T)."""
        # Group by dataset, so that each one is read at once, and write the rows back in the order of the positions.
        drawn = [self.mix.at(position) for position in at]
        rows = np.empty((len(drawn), self.windows[0].block_size + 1), dtype=np.int64)  # (B, T + 1)
        for number, (windows, order) in enumerate(zip(self.windows, self.orders, strict=True)):
            mine = [row for row, (source, _) in enumerate(drawn) if source == number]
            rows[mine] = windows.rows([order.at(drawn[row][1]) for row in mine])
        return batch(rows)

    def epoch(self, position: int) -> int:
        """Return the epochs completed before a position; of a mix, those of the dataset read most often."""
        drawn = self.mix.drawn(position)
        return max(order.epoch(count) for order, count in zip(self.orders, drawn, strict=True))

    def begun(self, start: int, end: int) -> list[str]:
        """Describe the epochs that begin with a sequence from `start` to `end` - 1, and their new orders."""
        found = []
        drawn = zip(self.sources, self.orders, self.mix.drawn(start), self.mix.drawn(end), strict=True)
        for source, order, first, last in drawn:
            epoch = order.epoch(last - 1) if last else 0
            if last > first and (epoch > order.epoch(first) or first % order.windows == 0):
                found.append(f"epoch {epoch} of {source.name}: {order.describe()}")
        return found

    def epochs(self, sequences: int) -> dict[str, float]:
        """Return how often a run with this many sequences reads each dataset."""
        drawn = self.mix.drawn(sequences)
        return {
            source.name: count / order.windows
            for source, order, count in zip(self.sources, self.orders, drawn, strict=True)
        }


def describe(epochs: dict[str, float]) -> list[str]:
    """Return log lines on how often a run reads its data, with a warning if that is too often."""
    lines = ["Data: " + ", ".join(f"{name} {count:.2f} epochs" for name, count in epochs.items())]
    lines += [
        f"warning: {name} is read {math.ceil(count)} times: overfitting is likely, and more than {MANY_EPOCHS} epochs "
        "add little (arXiv:2305.16264)"
        for name, count in epochs.items()
        if count > MANY_EPOCHS
    ]
    return lines


class Batches:
    """The consecutive micro-batches of one rank, on its device.

    On a GPU, a thread reads the next micro-batch into pinned memory during the computation of the current one.
    """

    def __init__(self, config: TrainConfig, world: World, *, start_step: int = 0) -> None:
        self.config, self.world = config, world
        self.stream = Stream(config)
        self._next = start_step * config.gradient_accumulation  # number of the next micro-batch since the run's start
        self._thread: ThreadPoolExecutor | None = None
        if world.device.type == "cuda":  # a new thread uses GPU 0, and would allocate memory there
            self._thread = ThreadPoolExecutor(1, "batches", torch.cuda.set_device, (world.device,))
        self._ahead: Future[Batch] | None = None

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step starts."""
        return self.stream.epoch(step * self.config.global_batch)

    def epochs_begun(self, step: int) -> list[str]:
        """Describe the epochs that begin within a step."""
        start = step * self.config.global_batch
        return self.stream.begun(start, start + self.config.global_batch)

    def seek(self, step: int) -> None:
        """Continue with the first micro-batch of a step."""
        self._next, self._ahead = step * self.config.gradient_accumulation, None  # what was read ahead is not next

    def next(self) -> Batch:
        """Return the next micro-batch: idx (B, T) and targets (B, T)."""
        number, self._next = self._next, self._next + 1
        if self._thread is None:  # on the CPU a thread would only take a core from the computation
            return self._read(number)
        idx, targets = self._ahead.result() if self._ahead else self._read(number)
        self._ahead = self._thread.submit(self._read, number + 1)
        device = self.world.device
        # From pinned memory: the copy runs in the GPU's stream while this process continues.
        return idx.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def _read(self, number: int) -> Batch:
        step, micro = divmod(number, self.config.gradient_accumulation)
        idx, targets = self.stream.read(positions(self.config, self.world, step, micro))
        return (idx.pin_memory(), targets.pin_memory()) if self._thread else (idx, targets)


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
