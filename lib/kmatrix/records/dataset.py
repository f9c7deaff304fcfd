"""The record dataset.json, which describes the shards next to it."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from kmatrix.records.decode import Count, Record, decode, decode_optional, field
from kmatrix.records.train_config import TrainConfig

RECORD = "dataset.json"
FLAT = "flat"  # the layout of consecutive windows
# Tokens of documents per token of the rows that they are packed into: a third is dropped at a context of 2048
# (karpathy/nanochat, dev/LOG.md, 2026-01-13: 34.6 %).
PACKED_READS = 1.6
# Patterns of the names of shards; nanoGPT's names last
KINDS = {kind: (f"*_{kind}_*.bin", f"{kind}.bin") for kind in ("train", "val")}
Parts = tuple[tuple[str, float, int], ...]  # name, share of the sequences and training tokens of each dataset of a mix
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ShardInfo(Record, frozen=True, kw_only=True):
    """One shard, as listed in dataset.json."""

    name: str
    tokens: Count
    sha256: str
    size: Count  # bytes
    mtime_ns: Nanoseconds
    max_token: Count  # largest token


class SourceEntry(Record, frozen=True, kw_only=True):
    """One dataset of a mix."""

    name: str
    path: str
    weight: Count  # sequences per cycle of the mix
    shards: Count  # training shards that are read, from the first; 0: all
    sha256: str
    train_tokens: Count


class DatasetFile(Record, frozen=True, kw_only=True):
    """dataset.json. None or empty: missing."""

    recipe: dict[str, Any] = field(default_factory=dict)  # from which the shards are made
    complete: bool | None = None  # False: a part of the download
    commit: str | None = None  # of the repository that the shards come from
    sha256: str | None = None
    vocab_size: Count | None = None
    train_tokens: Count | None = None
    val_tokens: Count | None = None
    shards: tuple[ShardInfo, ...] = ()
    sources: tuple[SourceEntry, ...] = ()  # of a mix, which has no shards of its own
    position: tuple[Count, Count] | None = None  # of the next shard: file, document in the file

    def of_kind(self, kind: str) -> list[ShardInfo]:
        """Return the shards of one kind ("train" or "val"), in the order in which they are read."""
        return sorted((shard for shard in self.shards if kind_of(shard.name) == kind), key=lambda shard: shard.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A prepared dataset, as gpt2.prepare reports it."""

    path: str  # directory of the shards
    sha256: str  # of the shards that are read; of streamed data, of the first ones
    vocab_size: int
    train_tokens: int  # of the shards that are read
    val_tokens: int
    shards: int  # number of training shards that are read, from the first; 0: all
    parts: Parts = ()  # of a mix
    train_shards: tuple[int, ...] = ()  # tokens of each training shard that is read


def sha256_of_reading(sha256: str, train: TrainConfig) -> str:
    """Return the hash of data as a run reads them: losses in two layouts are measured on different data.

    sha256: of the shards; of streamed data, of the first ones.
    """
    readings = [train.data_layout] if train.data_layout != FLAT else []
    if train.data_streaming:
        readings.append("stream")
    for reading in readings:
        sha256 = hashlib.sha256(f"{reading}\0{sha256}".encode()).hexdigest()
    return sha256


def sha256_of_mix(parts: Iterable[tuple[str, int, str]]) -> str:
    """Return the hash of a mix. parts: name, weight and hash of each dataset."""
    # Weights too: they decide the order of the sequences, as the tokens do.
    lines = "".join(f"{name}\0{weight}\0{sha256}\n" for name, weight, sha256 in parts)
    return hashlib.sha256(lines.encode()).hexdigest()


def tokens_to_read(train: TrainConfig, *, share: float = 1.0) -> int:
    """Return the training tokens that have to be prepared for a run; 0 if it reads all. share: of a mix."""
    packed = 1.0 if train.data_layout == FLAT else PACKED_READS
    tokens = train.data_tokens or math.ceil(packed * train.max_iters * train.tokens_per_step)
    return tokens if share == 1.0 or not tokens else int(tokens * share) + 1


def whole_windows(tokens: int, block_size: int) -> int:
    """Return the tokens of a shard that are targets: whole windows only, and its first token is never a target."""
    return max(0, tokens - 1) // block_size * block_size


def enough_shards(tokens_of_shards: Sequence[int], tokens: int, block_size: int) -> int | None:
    """Return how many of these shards, in order, hold `tokens` tokens; None if all do not, or if it is 0: all."""
    held = itertools.accumulate(whole_windows(count, block_size) for count in tokens_of_shards)
    return next((number for number, have in enumerate(held, 1) if 0 < tokens <= have), None)


def kind_of(name: str) -> str:
    """Return "train" or "val" for the name of a shard, "" for another file."""
    return next((kind for kind, patterns in KINDS.items() if any(Path(name).match(p) for p in patterns)), "")


def train_shards(record: DatasetFile) -> tuple[int, ...]:
    """Return the tokens of each training shard; of a mix, those of all its datasets that are read."""
    if not record.sources:
        return tuple(shard.tokens for shard in record.of_kind("train"))
    found: list[int] = []
    for source in record.sources:
        tokens = train_shards(read_dataset_or_empty(Path(source.path) / RECORD))
        found += tokens[: source.shards or None]
    return tuple(found)


def read_dataset(path: Path) -> DatasetFile:
    """Return a dataset.json. Raises RecordError if it is missing or damaged."""
    return decode(path, DatasetFile)


def read_dataset_or_empty(path: Path) -> DatasetFile:
    """Return a dataset.json, empty if it is missing or damaged."""
    return decode_optional(path, DatasetFile) or DatasetFile()
