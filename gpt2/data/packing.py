"""Rows that begin with the end-of-document token and are packed by best fit, as an index of the documents of a shard.

The algorithm is that of karpathy/nanochat (92d63d4, nanochat/dataloader.py). There a row is filled from a stream of
documents; here it is filled from the documents of one shard, so that a row is a function of the shard alone.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpt2.data.shards import Tokens
from kmatrix.records.files import replacing

WAITING = 1000  # documents that a row chooses from
READ_AT_ONCE = 128  # documents that are added to those
FOLDER = ".rows"  # below a dataset: the index of each shard, which takes seconds to compute
Piece = tuple[int, int]  # document, its first tokens that are used


def best_fit(
    sizes: Iterable[int], capacity: int, *, waiting: int = WAITING, read_at_once: int = READ_AT_ONCE
) -> Iterator[list[Piece]]:
    """Yield the rows of `capacity` tokens that documents of these sizes fill.

    A row takes the longest waiting document that fits, again and again. If none fits, it takes the shortest one and
    cuts it. Of equal documents the first counts. Documents left at the end that do not fill a row are dropped.
    """
    # Sorted by size, so that the best document is found by bisection. The number of the document is negative: the last
    # of equal sizes is the first document.
    ready: list[tuple[int, int]] = []
    coming = enumerate(sizes)
    left = True
    while True:
        row: list[Piece] = []
        space = capacity
        while space:
            while left and len(ready) < waiting:
                read = list(islice(coming, read_at_once))
                left = len(read) == read_at_once
                for number, size in read:
                    insort(ready, (size, -number))
            if not ready:  # what is left does not fill a row
                return
            fitting = bisect_right(ready, (space, 1)) or bisect_left(ready, (ready[0][0] + 1, -(2**62)))
            size, number = ready.pop(fitting - 1)
            row.append((-number, min(size, space)))
            space -= min(size, space)
        yield row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIndex:
    """Where the pieces of each row of a shard are."""

    rows: npt.NDArray[np.int64]  # (rows + 1,): row i has pieces rows[i] to rows[i + 1] - 1
    starts: npt.NDArray[np.int64]  # (pieces,): first token of each
    sizes: npt.NDArray[np.int32]  # (pieces,)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return the first token and the number of tokens of each piece of a row."""
        mine = slice(int(self.rows[row]), int(self.rows[row + 1]))
        return list(zip(self.starts[mine].tolist(), self.sizes[mine].tolist(), strict=True))


def index_of(tokens: Tokens, capacity: int, end: int) -> RowIndex:
    """Return the rows of a shard. end: the end-of-document token, with which every document starts."""
    starts = np.flatnonzero(tokens == end)  # tokens before the first one are left out: a row must begin with it
    sizes = np.diff(np.append(starts, len(tokens)))
    rows = list(best_fit(sizes.tolist(), capacity))
    pieces = np.array([piece for row in rows for piece in row], dtype=np.int64).reshape(-1, 2)
    return RowIndex(
        rows=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        starts=starts[pieces[:, 0]],
        sizes=pieces[:, 1].astype(np.int32),
    )


def load_index(shard: Path, tokens: Tokens, capacity: int, end: int) -> RowIndex:
    """Return the index of a shard: the stored one, or a new one, which is stored if its folder can be written."""
    path = shard.parent / FOLDER / f"{shard.name}.{capacity}.{end}.npz"
    mtime_ns = shard.stat().st_mtime_ns
    # A missing or damaged one is computed again
    with suppress(OSError, ValueError, KeyError, EOFError), np.load(path, allow_pickle=False) as file:
        if int(file["mtime_ns"]) == mtime_ns:
            return RowIndex(rows=file["rows"], starts=file["starts"], sizes=file["sizes"])
    found = index_of(tokens, capacity, end)
    with suppress(OSError):  # a read-only folder, or a full disk: every rank computes its own
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, mtime_ns=mtime_ns, **asdict(found))
            file.flush()
            os.fsync(file.fileno())
    return found
