"""The sequences of shards, in one of two layouts, and the order in which training reads them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpt2.data import shards
from gpt2.data.packing import RowIndex, load_index
from gpt2.data.tokenizer import load
from kmatrix.errors import DataError
from kmatrix.records.dataset import FLAT, RECORD, SourceEntry, read_dataset
from kmatrix.records.train_config import TrainConfig

SALT = 0x6D6978  # "mix": makes these shuffles independent of those of shards and windows
Place = tuple[int, int]  # shard, window in the shard
Batch = tuple[torch.Tensor, torch.Tensor]  # idx (B, T) and targets (B, T), int64


def sources(config: TrainConfig) -> tuple[SourceEntry, ...]:
    """Return the datasets of a run: one, or those listed in the dataset.json of a mix."""
    if config.dataset == "mix":
        return read_dataset(Path(config.data_path, RECORD)).sources
    name, path, count, sha256 = config.dataset, config.data_path, config.data_shards, config.data_sha256
    return (SourceEntry(name=name, path=path, shards=count, sha256=sha256, weight=1, train_tokens=0),)


class Windows:
    """The sequences of one kind of shards, each of block_size + 1 tokens. Their targets are the tokens shifted by one.

    Flat: windows that overlap by one token, so that every token except a shard's first is a target once.
    Packed: rows of documents that are packed by best fit; they do not overlap, and a document is in one row.
    """

    def __init__(self, folder: Path, kind: str, *, block_size: int, count: int = 0, end: int | None = None) -> None:
        """Raise DataError without any sequence.

        kind: "train" or "val".  count: only the first shards; 0: all.  end: the end-of-document token of packed rows.
        """
        self.block_size, self.end = block_size, end
        self.paths: list[Path] = []
        self._tokens: list[shards.Tokens] = []  # memory maps: nothing is read yet
        self.counts: tuple[int, ...] = ()  # sequences per shard
        # A run reads one shard after the other: two indices are enough, and one takes 2 MB per 100 million tokens.
        self._index = lru_cache(maxsize=2)(self._loaded)
        for path in shards.find(folder, kind, count):
            self.add(path)
        if not len(self):
            why = "no shard is longer than that; with DATA_LAYOUT=bestfit, none has end-of-document tokens"
            hint = "use more data or a shorter BLOCK_SIZE"
            raise DataError(f"{folder} has no {kind} sequence of {block_size} tokens", why=why, hint=hint)

    def add(self, path: Path) -> None:
        """Add a shard after the others."""
        self.paths.append(path)
        self._tokens.append(shards.open_shard(path))
        flat = max(0, (len(self._tokens[-1]) - 1) // self.block_size)
        self.counts += (flat if self.end is None else len(self._index(len(self.paths) - 1)),)

    def _loaded(self, shard: int) -> RowIndex:
        return load_index(self.paths[shard], self._tokens[shard], self.block_size + 1, self.end or 0)

    def __len__(self) -> int:
        return sum(self.counts)

    def read(self, places: Sequence[Place]) -> Batch:
        """Return the sequences at these places."""
        return batch(self.rows(places))

    def rows(self, places: Sequence[Place]) -> npt.NDArray[np.int64]:
        """Return the tokens of the sequences at these places: (B, T + 1)."""
        rows = np.empty((len(places), self.block_size + 1), dtype=np.int64)  # (B, T + 1); embeddings take int64
        for row, (shard, window) in zip(rows, places, strict=True):
            pieces = [(window * self.block_size, self.block_size + 1)]  # first token and number of tokens
            if self.end is not None:
                pieces = self._index(shard).pieces(window)
            np.concatenate([self._tokens[shard][start : start + size] for start, size in pieces], out=row)
        return rows

    def spread(self, count: int) -> list[Place]:
        """Return the places of `count` sequences at equal distances over all shards; all places if there are fewer."""
        # Spread out, because adjacent windows are often parts of the same document.
        starts = list(itertools.accumulate(self.counts, initial=0))  # of each shard
        count = min(count, len(self))
        chosen = [number * len(self) // count for number in range(count)]
        return [(shard := bisect_right(starts, window) - 1, window - starts[shard]) for window in chosen]


def sequences_of(config: TrainConfig, source: SourceEntry, kind: str) -> Windows:
    """Return the sequences of a dataset in the layout of a run. kind: "train" or "val"."""
    is_packed = config.data_layout != FLAT
    end = load(config.tokenizer, Path(config.data_path)).end_of_document if is_packed else None
    folder = Path(source.path)
    count = source.shards if kind == "train" else 0
    return Windows(folder, kind, block_size=config.block_size, count=count, end=end)


def batch(rows: npt.NDArray[np.int64]) -> Batch:
    """Return inputs and targets, each (B, T), of sequences (B, T + 1)."""
    # Copies, because the two overlap in one buffer, and columns of it are not contiguous.
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def on_device(reads: Iterable[Callable[[], Batch]], device: torch.device) -> Iterator[Batch]:
    """Yield batches on a device, of functions that read them into the memory of the CPU.

    On a GPU, a thread reads the next batch into pinned memory during the computation of the current one, and the copy
    runs in the GPU's stream: the process that trains waits for neither. On the CPU it would only take a core from it.
    """
    if device.type != "cuda":
        yield from (read() for read in reads)
        return
    # A new thread uses GPU 0, and would allocate memory there.
    with ThreadPoolExecutor(1, "batches", torch.cuda.set_device, (device,)) as thread:
        coming = (thread.submit(lambda read: [part.pin_memory() for part in read()], read) for read in reads)
        ahead = next(coming, None)
        while ahead is not None:
            current, ahead = ahead, next(coming, None)
            idx, targets = (part.to(device, non_blocking=True) for part in current.result())
            yield idx, targets


def permutation(seed: Sequence[int], count: int) -> npt.NDArray[np.int64]:
    """Return 0 to count - 1 in the order of a seed."""
    # PCG64 by name: NumPy may change what default_rng returns, and the order of the data must stay the same.
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)


class Order:
    """The order in which training reads the windows of one dataset: a function of seed and position only.

    Each epoch reads every window once: the shards in shuffled order, and the windows of each shard in shuffled order.
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

    def at(self, position: int) -> Place:
        """Return the window at a position of the infinite stream of sequences."""
        # Two searches instead of one shuffled list of all windows, which would take 80 MB for 10 billion tokens.
        epoch, offset = divmod(position, self.windows)
        shards_in_order, starts = self._shards(epoch)
        turn = bisect_right(starts, offset) - 1
        return shards_in_order[turn], int(self._windows(epoch, shards_in_order[turn])[offset - starts[turn]])

    def _shuffled_shards(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return the shards in their order, and the windows before each, and before the end."""
        count = len(self.counts)
        order = list(range(count)) if self.in_order else permutation((*self.seed, epoch), count).tolist()
        return order, list(itertools.accumulate((self.counts[shard] for shard in order), initial=0))

    def _shuffled_windows(self, epoch: int, shard: int) -> npt.NDArray[np.int64]:
        # + 1, because NumPy ignores zeros at the end of a seed: shard 0 would get the generator of _shuffled_shards.
        return permutation((*self.seed, epoch, shard + 1), self.counts[shard])


class Mix:
    """An infinite stream of sequences in blocks, in which every dataset occurs exactly as often as its weight.

    Each block is shuffled separately, so shares are exact after every block. weights: sequences per block.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        self.weights, self.seed, self.block = tuple(weights), seed, sum(weights)
        self._order = lru_cache(maxsize=4)(self._shuffled)  # blocks; consecutive positions share them

    def at(self, position: int) -> tuple[int, int]:
        """Return the dataset at a position of the stream, and how many of its sequences precede that position."""
        block, offset = divmod(position, self.block)
        source = int(self._order(block)[offset])
        return source, self.drawn(position)[source]

    def drawn(self, position: int) -> tuple[int, ...]:
        """Return how many sequences of each dataset precede a position."""
        block, offset = divmod(position, self.block)  # whole blocks have exact shares: only the last one is counted
        inside = np.bincount(self._order(block)[:offset], minlength=len(self.weights))
        return tuple(block * weight + int(n) for weight, n in zip(self.weights, inside, strict=True))

    def _shuffled(self, block: int) -> npt.NDArray[np.int64]:
        """Return the dataset at each position of a block: (block,)."""
        found = np.repeat(np.arange(len(self.weights)), self.weights)
        return found[permutation((self.seed, SALT, block), self.block)] if len(self.weights) > 1 else found
