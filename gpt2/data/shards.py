"""Token shards on disk: their format, their hashes, and dataset.json.

We write the format of llm.c and modded-nanogpt: a header of 256 little-endian int32 values (20240520, 1, number of
tokens, zeros), then the tokens as uint16. We also read nanoGPT's train.bin and val.bin, which have no header.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
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
WITHOUT_HEADER = ("train.bin", "val.bin")  # of nanoGPT
SAMPLE_BYTES = 64  # that show what a file without a header is
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


def open_shard(path: Path) -> Tokens:
    """Return the tokens of a shard as a memory map. Raises DataError if it is damaged."""
    offset, count = layout(path)
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype=np.uint16)
    with path.open("rb") as file:
        # Private: some network file systems, such as FUSE with direct I/O, refuse shared mappings. Both are read-only.
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, dtype="<u2", count=count, offset=offset)


def layout(path: Path) -> tuple[int, int]:
    """Return the byte of the first token of a shard, and the number of its tokens.

    Raises DataError if the file is damaged, or not a shard.
    """
    check_name(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    magic, version, count = (int(value) for value in np.frombuffer(raw[:12].ljust(12, b"\0"), dtype="<i4"))
    # A file of this name may have a header. Tokens cannot look like MAGIC: its first half is 55432, which GPT-2's
    # vocabulary does not have.
    if path.name in WITHOUT_HEADER and magic != MAGIC:
        if why := _not_tokens(raw, size):
            raise _damaged(path, why)
        return 0, size // 2
    if (magic, version) != (MAGIC, VERSION):
        raise _damaged(path, f"it begins with {magic}, {version}; 16-bit tokens with {MAGIC}, {VERSION}")
    # The header says how many tokens follow: an incomplete copy or download is found before training reads it.
    if size != (expected := HEADER_BYTES + 2 * count):
        raise _damaged(path, f"{size} bytes, expected {expected} for {count} tokens (header, byte 8)")
    return HEADER_BYTES, count


def _not_tokens(raw: bytes, size: int) -> str:
    """Return why a file without a header does not have 16-bit tokens, "" if it may. raw: its beginning."""
    if size % 2:
        return f"{size} bytes are no whole number of 16-bit tokens"
    if len(raw) < SAMPLE_BYTES:
        return ""
    tokens = np.frombuffer(raw, dtype="<u2")
    # The upper half of a 32-bit token of a vocabulary below 262,144 is 0 to 3; in a text, no such token is at every
    # second place. Of 64-bit tokens, further ones are 0.
    if tokens[1::2].max() <= 3 < tokens[::2].max():
        return "its tokens have 32 or 64 bits, expected 16"
    return "it is a text, not 16-bit tokens" if raw.isascii() and 0 not in raw else ""


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is damaged or not a token shard", why=why, hint="download or create the shard again (docs/data.md)"
    )


def check_name(path: Path) -> None:
    """Raise DataError if a path is not UTF-8: it could not be written to dataset.json, or printed."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{os.fsencode(path)!r} is not a name in UTF-8", hint="rename it: its name is part of the dataset"
        ) from None


def find(folder: Path, kind: str, count: int = 0) -> list[Path]:
    """Return the shards of one kind ("train" or "val"), sorted by name.

    count: only the first `count` shards; 0: all. Raises DataError if there are fewer, or none.
    """
    # A set, because a name may match several patterns; sorted, because folders list files in any order.
    paths = sorted({path for pattern in KINDS[kind] for path in folder.glob(pattern)})
    if len(paths) < max(count, 1):
        raise DataError(
            f"{folder} has {len(paths)} {kind} shards, expected {count or 'one or more'}",
            why=f"their names match {' or '.join(KINDS[kind])}",
            hint="run `make prepare-data` (docs/data.md)",
        )
    return paths[:count] if count else paths


def describe(folder: Path, vocab_size: int, **about: object) -> dict[str, Any]:
    """Return dataset.json of a folder of shards, and write it if the folder is writable.

    All tokens are checked against the vocabulary. about: dataset, source, tokenizer, recipe.
    """
    known = {shard.name: shard for shard in read_dataset_or_empty(folder / RECORD).shards}
    listed: list[ShardInfo] = []
    for path in [*find(folder, "train"), *find(folder, "val")]:
        listed.append(read_info(path, known.get(path.name)))
        check_tokens(path, listed[-1], vocab_size)
    value = record(listed, vocab_size=vocab_size, **about)
    with suppress(OSError):  # a read-only folder: the hash is computed again next time
        write_json(folder / RECORD, value)
    return value


def check_tokens(path: Path, shard: ShardInfo, vocab_size: int) -> None:
    """Raise DataError if a shard has a token outside the vocabulary."""
    if shard.max_token >= vocab_size:
        index = int(np.argmax(open_shard(path) >= vocab_size))
        raise DataError(
            f"{path} has the token {open_shard(path)[index]} at byte {layout(path)[0] + 2 * index}",
            why=f"the tokenizer has {vocab_size} tokens, 0 to {vocab_size - 1}",
            hint="choose the tokenizer of the shards (make menuconfig, Data)",
        )


def record(listed: Sequence[ShardInfo], **about: object) -> dict[str, Any]:
    """Return dataset.json of these shards."""
    tokens = {kind: sum(shard.tokens for shard in listed if kind_of(shard.name) == kind) for kind in KINDS}
    return {
        **about,
        "sha256": folder_sha256(listed),
        "train_tokens": tokens["train"],
        "val_tokens": tokens["val"],
        "shards": [as_json(shard) for shard in listed],
    }


def read_info(path: Path, known: ShardInfo | None = None) -> ShardInfo:
    """Return the entry of a shard in dataset.json: `known` if its size and time are those of the file.

    Otherwise all of the file is read, which would delay each start with a large dataset.
    """
    if known and is_unchanged(path, known):
        return known
    stat = path.stat()
    offset, count = layout(path)
    digest, greatest = hashlib.sha256(), 0
    with path.open("rb") as file:  # hash and largest token in one pass, because the disk is the slow part
        digest.update(file.read(offset))
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            greatest = max(greatest, int(np.frombuffer(chunk, dtype="<u2").max()))
    return ShardInfo(
        name=path.name,
        tokens=count,
        sha256=digest.hexdigest(),
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        max_token=greatest,
    )


def is_unchanged(path: Path, shard: ShardInfo) -> bool:
    """Return whether a file has the recorded size and modification time."""
    if not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (shard.size, shard.mtime_ns)


def is_recorded(path: Path, shard: ShardInfo) -> bool:
    """Return whether a file has the recorded contents. It is read only if its modification time differs."""
    return path.is_file() and path.stat().st_size == shard.size and read_info(path, shard).sha256 == shard.sha256


def recorded_sha256(folder: Path, count: int = 0) -> str | None:
    """Return the hash of a folder according to dataset.json, None without that.

    count: hash only the first `count` training shards, and all validation shards; 0: all.
    Raises DataError if a shard is not the one that dataset.json lists.
    """
    known = {shard.name: shard for shard in read_dataset_or_empty(folder / RECORD).shards}
    if not known:
        return None
    paths = [*find(folder, "train", count), *find(folder, "val")]
    for path in paths:
        if path.name not in known or not is_recorded(path, known[path.name]):
            raise changed(path)
    return folder_sha256([known[path.name] for path in paths])


def changed(path: Path) -> DataError:
    """Return the error for a shard that is not the one that dataset.json lists."""
    return DataError(
        f"{path} changed after the data were prepared",
        why=f"it is not the shard that {path.parent / RECORD} lists",
        hint="restore the former shard, or run `make prepare-data` and create a new matrix",
    )


def folder_sha256(listed: Sequence[ShardInfo]) -> str:
    """Return the hash of a dataset: of its shards' names and hashes, sorted by name."""
    # Names too, because they decide the order in which shards are read.
    lines = sorted(f"{shard.name}\0{shard.sha256}\n" for shard in listed)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
