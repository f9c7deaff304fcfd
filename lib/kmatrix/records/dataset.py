"""The record dataset.json, which describes the shards next to it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from kmatrix.records.decode import Count, Record, decode, decode_optional, field

RECORD = "dataset.json"
FLAT = "flat"  # the layout of consecutive windows
STAGED = "KMATRIX_STAGED"  # environment variable: folder of data -> its copy on this node, as JSON
KINDS = {
    kind: (f"*_{kind}_*.bin", f"*_{kind}_*.npy", f"{kind}.bin", f"{kind}.npy") for kind in ("train", "val")
}  # patterns of the names of shards; nanoGPT's names last
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ShardInfo(Record, frozen=True, kw_only=True):
    """One shard, as listed in dataset.json."""

    name: str
    tokens: Count
    sha256: str
    size: Count  # bytes
    mtime_ns: Nanoseconds
    max_token: Count  # largest token
    text_bytes: Count | None = None  # UTF-8 bytes of its text; None: unknown
    start: tuple[Count, Count] | None = None  # of its text: file, document in the file; None: unknown


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
    shards: tuple[ShardInfo, ...] = ()
    sources: tuple[SourceEntry, ...] = ()  # of a mix, which has no shards of its own
    position: tuple[Count, Count] | None = None  # of the next shard: file, document in the file


STREAM = "stream.json"  # next to dataset.json: how the shards are made while runs read them
DROPPED = "-stream"  # end of the name of a folder whose shards are deleted after use
READERS = ".readers"  # below the folder: the shards that each run reads next


class StreamFile(Record, frozen=True, kw_only=True):
    """stream.json: what the shards of a folder are made from, while runs read them."""

    request: dict[str, Any]  # fields of gpt2.prepare.catalog.DatasetRequest
    data_dir: str  # folder of datasets, which relative paths of the request start at
    source: str
    commit: str | None
    recipe: dict[str, Any]
    vocab_size: Count
    drop: bool  # delete shards that no run needs any more
    sha256: str  # of source, commit and recipe


class ReaderFile(Record, frozen=True, kw_only=True):
    """.readers/<run>.json: the shards that a run reads now and next, in order. Rewritten while it runs."""

    shards: tuple[Count, ...]  # numbers, from 1
    counter: Count  # grows with each write


class ProducerFile(Record, frozen=True, kw_only=True):
    """producer.json of a run: the process that makes shards ahead of the training. Rewritten every second."""

    pid: Count
    counter: Count  # grows with each write
    doing: dict[str, str] = field(default_factory=dict)  # folder -> what it does for it now
    failed: tuple[str, str, str] | None = None  # what, why and hint of the error that ended it


def sha256_of_layout(sha256: str, layout: str) -> str:
    """Return the hash of data whose sequences have a layout: losses in two layouts are measured on different data."""
    return sha256 if layout == FLAT else hashlib.sha256(f"{layout}\0{sha256}".encode()).hexdigest()


def local_copy(folder: Path) -> Path:
    """Return the copy of a data folder on a disk of this node; the folder itself without one."""
    try:
        copies = json.loads(os.environ.get(STAGED) or "{}")
    except ValueError:
        return folder
    found = copies.get(str(folder)) if isinstance(copies, dict) else None
    return Path(found) if isinstance(found, str) else folder


def kind_of(name: str) -> str:
    """Return "train" or "val" for the name of a shard."""
    return next(kind for kind, patterns in KINDS.items() if any(Path(name).match(pattern) for pattern in patterns))


def train_shards(record: DatasetFile) -> tuple[int, ...]:
    """Return the tokens of each training shard; of a mix, those of all its datasets that are read."""
    if not record.sources:
        return tuple(shard.tokens for shard in record.shards if kind_of(shard.name) == "train")
    found: list[int] = []
    for source in record.sources:
        tokens = train_shards(read_dataset_or_empty(Path(source.path) / RECORD))
        found += tokens[: source.shards or None]
    return tuple(found)


def read_dataset(path: Path) -> DatasetFile:
    """Return a dataset.json. Raises RecordError if it is missing or damaged, SchemaError if it is too new."""
    return decode(path, DatasetFile)


def read_dataset_or_empty(path: Path) -> DatasetFile:
    """Return a dataset.json, empty if it is missing or damaged. Raises SchemaError if it is too new."""
    return decode_optional(path, DatasetFile) or DatasetFile()
