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
    """Return the tokens of a shard as a memory map. Raises DataError if it is damaged, or not a shard."""
    check_name(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
        # Private: some network file systems, such as FUSE with direct I/O, refuse shared mappings. Both are read-only.
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) if size else b""
    magic, version, count = np.frombuffer(raw[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    # The header says how many tokens follow: an incomplete copy is found before training reads it.
    if (magic, version, size) == (MAGIC, VERSION, HEADER_BYTES + 2 * count):
        return np.frombuffer(mapped, dtype="<u2", offset=HEADER_BYTES)
    # nanoGPT's names may have a header. Tokens cannot look like MAGIC: GPT-2's vocabulary does not have its first half.
    if path.name in WITHOUT_HEADER and magic != MAGIC and not size % 2 and _may_be_tokens(raw):
        return np.frombuffer(mapped, dtype="<u2")
    why = f"{size} bytes with the header {magic}, {version}, {count}; expected {MAGIC}, {VERSION}, number of tokens"
    raise DataError(f"{path} is damaged or not a shard of 16-bit tokens", why=why, hint="make it again (docs/data.md)")


def _may_be_tokens(raw: bytes) -> bool:
    """Return whether the beginning of a file without a header may be 16-bit tokens: not wider ones, and no text."""
    tokens = np.frombuffer(raw, dtype="<u2")
    # The upper half of a 32-bit token of a vocabulary below 262,144 is 0 to 3; of 64-bit tokens, further ones are 0.
    is_wide = tokens[1::2].max(initial=0) <= 3 < tokens[::2].max(initial=0)
    return len(raw) < SAMPLE_BYTES or not (is_wide or (raw.isascii() and 0 not in raw))


def check_name(path: Path) -> None:
    """Raise DataError if a path is not UTF-8: it could not be written to dataset.json, or printed."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        name = os.fsencode(path)
        raise DataError(f"{name!r} is not a name in UTF-8", hint="rename it: it is part of the dataset") from None


def find(folder: Path, kind: str, count: int = 0) -> list[Path]:
    """Return the shards of one kind ("train" or "val"), sorted by name.

    count: only the first `count` shards; 0: all. Raises DataError if there are fewer, or none.
    """
    # A set, because a name may match several patterns; sorted, because folders list files in any order.
    paths = sorted({path for pattern in KINDS[kind] for path in folder.glob(pattern)})
    if len(paths) < max(count, 1):
        what = f"{folder} has {len(paths)} {kind} shards, expected {count or 'one or more'}"
        why = f"their names match {' or '.join(KINDS[kind])}"
        raise DataError(what, why=why, hint="check DATA_PATH, or run `make prepare-data`")
    return paths[:count] if count else paths


def describe(folder: Path, vocab_size: int, **about: object) -> dict[str, Any]:
    """Return dataset.json of a folder of shards, and write it if the folder is writable.

    All tokens are checked against the vocabulary. about: dataset, source, tokenizer, recipe.
    """
    known = {shard.name: shard for shard in read_dataset_or_empty(folder / RECORD).shards}
    listed = [read_info(path, known.get(path.name)) for kind in KINDS for path in find(folder, kind)]
    value = record(listed, vocab_size=vocab_size, **about)
    with suppress(OSError):  # a read-only folder: the hash is computed again next time
        write_json(folder / RECORD, value)
    return value


def record(listed: Sequence[ShardInfo], vocab_size: int, **about: object) -> dict[str, Any]:
    """Return dataset.json of these shards. Raises DataError if one has a token outside the vocabulary."""
    for shard in listed:
        if shard.max_token >= vocab_size:
            why = f"the tokenizer has {vocab_size} tokens, 0 to {vocab_size - 1}"
            raise DataError(f"{shard.name} has the token {shard.max_token}", why=why, hint="choose its TOKENIZER=")
    train, val = (sum(shard.tokens for shard in listed if kind_of(shard.name) == kind) for kind in KINDS)
    numbers = {"vocab_size": vocab_size, "sha256": folder_sha256(listed), "train_tokens": train, "val_tokens": val}
    return {**about, **numbers, "shards": [as_json(shard) for shard in listed]}


def read_info(path: Path, known: ShardInfo | None = None) -> ShardInfo:
    """Return the entry of a shard in dataset.json: `known` if its size and time are those of the file.

    Otherwise all of the file is read, which would delay each start with a large dataset.
    """
    stat = path.stat()
    if known and (stat.st_size, stat.st_mtime_ns) == (known.size, known.mtime_ns):
        return known
    tokens = open_shard(path)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    size, mtime_ns, most = stat.st_size, stat.st_mtime_ns, int(tokens.max(initial=0))
    return ShardInfo(name=path.name, tokens=len(tokens), sha256=sha256, size=size, mtime_ns=mtime_ns, max_token=most)


def is_recorded(path: Path, shard: ShardInfo) -> bool:
    """Return whether a file has the recorded contents. It is read only if its modification time differs."""
    return path.is_file() and path.stat().st_size == shard.size and read_info(path, shard).sha256 == shard.sha256


def current_sha256(folder: Path, count: int = 0) -> str:
    """Return the hash of the first `count` training shards (0: all) and all validation shards of a folder."""
    known = {shard.name: shard for shard in read_dataset_or_empty(folder / RECORD).shards}
    paths = [*find(folder, "train", count), *find(folder, "val")]
    return folder_sha256([read_info(path, known.get(path.name)) for path in paths])


def folder_sha256(listed: Sequence[ShardInfo]) -> str:
    """Return the hash of a dataset: of its shards' names and hashes, sorted by name."""
    # Names too, because they decide the order in which shards are read.
    lines = sorted(f"{shard.name}\0{shard.sha256}\n" for shard in listed)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
