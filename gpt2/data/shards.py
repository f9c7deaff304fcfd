"""Token shards on disk: file formats, names, hashes, and dataset.json.

We write the format of llm.c and modded-nanogpt: a header of 256 little-endian int32 values (20240520, 1, number of
tokens, zeros), then the tokens as uint16. We also read nanoGPT's train.bin and val.bin, which have no header
(docs/data.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kmatrix.errors import DataError
from kmatrix.records.dataset import KINDS, RECORD, ShardInfo, kind_of, read_dataset_or_empty
from kmatrix.records.decode import as_json
from kmatrix.records.files import replacing, write_json

MAGIC, VERSION = 20240520, 1
HEADER = 256  # int32 values
HEADER_BYTES = 4 * HEADER
CHUNK_BYTES = 1 << 24  # read at once while hashing

RAW = {"train.bin", "val.bin"}  # files that may have no header (nanoGPT)
SAMPLE = 32  # tokens that show what a file without a header is
TEXT = frozenset(b"\t\n\r") | frozenset(range(32, 127))  # bytes
Tokens = npt.NDArray[np.uint16]


def write_shard(path: Path, tokens: npt.ArrayLike) -> None:
    """Write one shard atomically."""
    values = np.ascontiguousarray(tokens).astype("<u2", copy=False)  # little-endian on every machine, as in llm.c
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(values)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(header.tobytes())
        file.write(values.data)  # the buffer itself: tobytes() would copy 200 MB
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a file are."""

    offset: int  # bytes before the first token
    count: int  # tokens


def layout(path: Path) -> Layout:
    """Return where a shard's tokens are, according to its header, and check the file size."""
    check_name(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    # nanoGPT's names are also allowed for a file with a header. Tokens cannot look like MAGIC: its first half is
    # 55432, which GPT-2's vocabulary does not have.
    if path.name in RAW and raw[:4] != np.array(MAGIC, dtype="<i4").tobytes():
        _check_width(path, raw)
        return Layout(0, size // 2)
    if len(raw) < HEADER_BYTES:
        raise damaged(path, f"truncated: {len(raw)} bytes, but the header takes {HEADER_BYTES}")
    magic, version, count = (int(value) for value in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise damaged(path, f"not a 16-bit token shard: magic number {magic} at byte 0, expected {MAGIC}")
    if version != VERSION:
        raise damaged(path, f"unsupported version {version} at byte 4, expected {VERSION}")
    # The header says how many tokens follow: an incomplete copy or download is found before training reads it.
    expected = HEADER_BYTES + 2 * count
    if count < 0 or size != expected:
        raise damaged(path, f"{size} bytes, expected {expected} for {count} tokens (header, byte 8)")
    return Layout(HEADER_BYTES, count)


def _check_width(path: Path, raw: bytes) -> None:
    """Raise DataError if the beginning of a file without a header is not 16-bit tokens."""
    if path.stat().st_size % 2:
        raise damaged(path, f"{path.stat().st_size} bytes are no whole number of 16-bit tokens")
    tokens = np.frombuffer(raw[: len(raw) // 2 * 2], dtype="<u2")
    # The upper half of a 32-bit token of a vocabulary below 262,144 is 0 to 3; in a text, no such token is at every
    # second place. Of 64-bit tokens, further ones are 0.
    if len(tokens) >= SAMPLE and tokens[1::2].max() <= 3 < tokens[::2].max():
        raise damaged(path, "its tokens have 32 or 64 bits, expected 16")
    if len(tokens) >= SAMPLE and all(byte in TEXT for byte in raw):
        raise damaged(path, "it is a text, not 16-bit tokens")


def check_name(path: Path) -> None:
    """Raise DataError if a path is not UTF-8: it could not be written to dataset.json, or printed."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{os.fsencode(path)!r} is not a name in UTF-8", hint="rename it: its name is part of the dataset"
        ) from None


def token_count(path: Path) -> int:
    """Return the number of tokens in a shard, according to its header, and check the file size."""
    return layout(path).count


def open_shard(path: Path) -> Tokens:
    """Return the tokens of a shard as a memory map."""
    found = layout(path)
    if not found.count:  # an empty file cannot be mapped
        return np.empty(0, dtype=np.uint16)
    with path.open("rb") as file:
        # Private: some network file systems, such as FUSE with direct I/O, refuse shared mappings. Both are read-only.
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, dtype="<u2", count=found.count, offset=found.offset)


def damaged(path: Path, why: str) -> DataError:
    """Return the error for an unreadable shard."""
    return DataError(
        f"{path} is damaged or not a token shard", why=why, hint="download or create the shard again (docs/data.md)"
    )


def foreign_token(path: Path, index: int, token: int, vocab_size: int) -> DataError:
    """Return the error for a token outside the vocabulary. index: its position in tokens."""
    return DataError(
        f"{path} has the token {token} at byte {layout(path).offset + 2 * index}",
        why=f"the tokenizer has {vocab_size} tokens, 0 to {vocab_size - 1}",
        hint="choose the tokenizer of the shards (make menuconfig, Data)",
    )


def find(folder: Path, kind: str, count: int = 0) -> list[Path]:
    """Return the shards of one kind ("train" or "val"), sorted by name. Raises DataError if there are none.

    count: only the first `count` shards; 0: all.
    """
    # A set, because a name may match several patterns; sorted, because folders list files in any order.
    paths = sorted({path for pattern in KINDS[kind] for path in folder.glob(pattern)})
    if len(paths) < max(count, 1):
        raise DataError(
            f"no {kind} shards: {folder / KINDS[kind][0]} matches nothing"
            if not paths
            else f"{folder} has {len(paths)} {kind} shards, expected {count}",
            why="a dataset is a folder of token shards for training and validation",
            hint=f"put {', '.join(KINDS[kind])} in {folder}, or run `make prepare-data` (docs/data.md)",
        )
    return paths[:count] if count else paths


def describe(folder: Path, vocab_size: int, **about: object) -> dict[str, Any]:
    """Return dataset.json of a folder of shards, and write it if the folder is writable.

    Shards whose size and modification time are unchanged are not read again. All tokens are checked against the
    vocabulary. about: dataset, source, tokenizer, recipe.
    """
    known = {shard.name: shard for shard in recorded(folder)}
    paths = {kind: find(folder, kind) for kind in KINDS}
    found = {path: known_or_read(path, known.get(path.name)) for paths_ in paths.values() for path in paths_}
    for path, shard in found.items():
        check_tokens(path, shard, vocab_size)
    value = record(list(found.values()), vocab_size=vocab_size, **about)
    with contextlib.suppress(OSError):  # a read-only folder: the hash is computed again next time
        write_json(folder / RECORD, value)
    return value


def check_tokens(path: Path, shard: ShardInfo, vocab_size: int) -> None:
    """Raise DataError if a shard has a token outside the vocabulary."""
    if shard.max_token >= vocab_size:
        raise foreign_token(path, int(np.argmax(open_shard(path) >= vocab_size)), shard.max_token, vocab_size)


def record(listed: Sequence[ShardInfo], **about: object) -> dict[str, Any]:
    """Return dataset.json of these shards."""
    parts = {kind: [shard for shard in listed if kind_of(shard.name) == kind] for kind in KINDS}
    value: dict[str, Any] = {**about, "sha256": folder_sha256(listed)}
    for kind, part in parts.items():
        value[f"{kind}_tokens"] = sum(shard.tokens for shard in part)
        value[f"{kind}_bytes"] = _size_of_text(part)
    value["shards"] = [as_json(shard) for shard in listed]
    return value


def _size_of_text(part: Sequence[ShardInfo]) -> int | None:
    """Return the bytes of text in shards, or None if one is unknown."""
    sizes = [shard.text_bytes for shard in part]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def known_or_read(path: Path, known: ShardInfo | None) -> ShardInfo:
    """Return the recorded information on a shard if the file is unchanged, else read the file."""
    # Size and modification time instead of the hash: hashing all shards would delay each start of a large dataset.
    return known if known and is_unchanged(path, known) and known.tokens == token_count(path) else read_info(path)


def is_unchanged(path: Path, shard: ShardInfo) -> bool:
    """Return whether a file has the recorded size and modification time."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (shard.size, shard.mtime_ns)


def read_info(path: Path, text_bytes: int | None = None) -> ShardInfo:
    """Read a whole shard and return its entry in dataset.json."""
    found, stat = layout(path), path.stat()
    digest, greatest = hashlib.sha256(), 0
    with path.open("rb") as file:  # hash and largest token in one pass, because the disk is the slow part
        digest.update(file.read(found.offset))
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            greatest = max(greatest, int(np.frombuffer(chunk, dtype="<u2").max()))
    return ShardInfo(
        name=path.name,
        tokens=found.count,
        sha256=digest.hexdigest(),
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        max_token=greatest,
        text_bytes=text_bytes,
    )


def recorded(folder: Path) -> list[ShardInfo]:
    """Return the shards listed in dataset.json; [] if it is missing or damaged. Raises SchemaError if it is too new."""
    # Only a cache: without it the shards are read and hashed again.
    return list(read_dataset_or_empty(folder / RECORD).shards)


def recorded_sha256(folder: Path, count: int = 0) -> str | None:
    """Return the hash of a folder according to dataset.json, None without that.

    count: hash only the first `count` training shards, and all validation shards; 0: all.
    Raises DataError if a shard is not the one that dataset.json lists.
    """
    known = {shard.name: shard for shard in recorded(folder)}
    if not known:
        return None
    paths = [*find(folder, "train", count), *find(folder, "val")]
    for path in paths:
        if not is_recorded(path, known.get(path.name)):
            raise changed(path)
    return folder_sha256([known[path.name] for path in paths])


def changed(path: Path) -> DataError:
    """Return the error for a shard that is not the one that dataset.json lists."""
    return DataError(
        f"{path} changed after the data were prepared",
        why=f"it is not the shard that {path.parent / RECORD} lists",
        hint="restore the former shard, or run `make prepare-data` and create a new matrix",
    )


def is_recorded(path: Path, shard: ShardInfo | None) -> bool:
    """Return whether a file has the recorded size and contents. It is read only if its modification time differs."""
    stat = path.stat()
    if shard is None or shard.size != stat.st_size:
        return False
    return shard.mtime_ns == stat.st_mtime_ns or read_info(path).sha256 == shard.sha256


def folder_sha256(listed: Sequence[ShardInfo]) -> str:
    """Return the hash of a dataset: of its shards' names and hashes, sorted by name."""
    # Names too, because they decide the order in which shards are read.
    lines = sorted(f"{shard.name}\0{shard.sha256}\n" for shard in listed)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
