"""Token shards on disk: their format, their names, their hash, and dataset.json beside them.

A shard is a header of 256 little-endian 32-bit integers (20240520, 1, the number of
tokens, zeros) and the tokens as 16-bit integers: the format of llm.c and modded-nanogpt
(docs/data.md).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kmatrix.errors import DataError, RecordError
from kmatrix.records import read_json, write_json

MAGIC, VERSION = 20240520, 1
HEADER = 256  # 32-bit integers
HEADER_BYTES = 4 * HEADER
CHUNK_BYTES = 1 << 24
KINDS = {"train": "*_train_*.bin", "val": "*_val_*.bin"}
Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One shard as dataset.json lists it.

    size: bytes.  mtime_ns: when it was last written.  max_token: the greatest token in it.
    """

    name: str
    tokens: int
    sha256: str
    size: int
    mtime_ns: int
    max_token: int


def write_shard(path: Path, tokens: npt.ArrayLike) -> None:
    """Write one shard. The caller puts it, or its folder, in place in one step."""
    values = np.asarray(tokens).astype("<u2")
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(values)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(values.tobytes())


def token_count(path: Path) -> int:
    """Return the number of tokens in a shard, from its header, held against the size of the file."""
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise damaged(path, f"it ends at byte {len(raw)}, within the header of {HEADER_BYTES} bytes")
    magic, version, count = (int(value) for value in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise damaged(path, f"at byte 0 stands {magic}, not {MAGIC}: it is not a shard of 16-bit tokens")
    if version != VERSION:
        raise damaged(path, f"at byte 4 stands version {version}, and only {VERSION} is known")
    expected, size = HEADER_BYTES + 2 * count, path.stat().st_size
    if count < 0 or size != expected:
        raise damaged(path, f"at byte 8 stands {count} tokens: {expected} bytes, and the file has {size}")
    return count


def open_shard(path: Path) -> Tokens:
    """Return the tokens of a shard, mapped into memory and not read."""
    count = token_count(path)
    if not count:
        return np.empty(0, dtype=np.uint16)
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def damaged(path: Path, why: str) -> DataError:
    """Return the error of a shard that cannot be read."""
    return DataError(
        f"{path} is damaged or no token shard", why=why, fix="fetch or make the shard again (docs/data.md)"
    )


def foreign_token(path: Path, index: int, token: int, vocab_size: int) -> DataError:
    """Return the error of a token that the vocabulary does not have. index: tokens from the first one."""
    return DataError(
        f"{path} holds the token {token} at byte {HEADER_BYTES + 2 * index}",
        why=f"the tokenizer has {vocab_size} tokens, 0 to {vocab_size - 1}",
        fix="choose the tokenizer that the shards were made with (make menuconfig, Data)",
    )


def find(folder: Path, kind: str) -> list[Path]:
    """Return the shards of one kind, "train" or "val", in order of their names; refuse a folder without any."""
    paths = sorted(folder.glob(KINDS[kind]))
    if not paths:
        raise DataError(
            f"no {kind} shards: {folder / KINDS[kind]} matches nothing",
            why="a dataset is a folder of token shards, some for training and some for validation",
            fix=f"put *_train_*.bin and *_val_*.bin in {folder}: Hugging Face kjj0/finewebedu10B-gpt2 and "
            "karpathy/fineweb-edu-100B-gpt2-token-shards hold them ready-made, llm.c's dev/data makes them",
        )
    return paths


def describe(folder: Path, vocab_size: int, **about: str) -> dict[str, Any]:
    """Return what dataset.json says of a folder of shards, and write it there where that is allowed.

    A shard whose size and time are those recorded is not read again. Every token is held
    against the vocabulary. about: dataset, source, tokenizer.
    """
    known = {shard.name: shard for shard in recorded(folder)}
    paths = {kind: find(folder, kind) for kind in KINDS}
    shards = {path: known_or_read(path, known.get(path.name)) for paths_ in paths.values() for path in paths_}
    for path, shard in shards.items():
        if shard.max_token >= vocab_size:
            raise foreign_token(path, int(np.argmax(open_shard(path) >= vocab_size)), shard.max_token, vocab_size)
    value: dict[str, Any] = {
        **about,
        "sha256": folder_sha256(list(shards.values())),
        "train_tokens": sum(shards[path].tokens for path in paths["train"]),
        "val_tokens": sum(shards[path].tokens for path in paths["val"]),
        "shards": [{name: getattr(shard, name) for name in ShardInfo.__slots__} for shard in shards.values()],
    }
    with contextlib.suppress(OSError):  # a folder that is only read: the hash is computed again next time
        write_json(folder / "dataset.json", value)
    return value


def known_or_read(path: Path, known: ShardInfo | None) -> ShardInfo:
    """Return what is recorded of a shard if it is unchanged, else read it."""
    count, stat = token_count(path), path.stat()
    if known and (known.size, known.mtime_ns, known.tokens) == (stat.st_size, stat.st_mtime_ns, count):
        return known
    digest, greatest = hashlib.sha256(), 0
    with path.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
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


def recorded(folder: Path) -> list[ShardInfo]:
    """Return the shards that dataset.json lists; none where it is missing, damaged or of another make."""
    try:
        return [
            ShardInfo(**{name: shard[name] for name in ShardInfo.__slots__})
            for shard in read_json(folder / "dataset.json")["shards"]
        ]
    except (RecordError, OSError, KeyError, TypeError):
        return []


def recorded_sha256(folder: Path) -> str | None:
    """Return the hash of the folder without reading a shard; None where dataset.json does not speak of these files."""
    known = {shard.name: (shard.size, shard.mtime_ns) for shard in recorded(folder)}
    there = {path.name: path.stat() for kind in KINDS for path in find(folder, kind)}
    if known != {name: (stat.st_size, stat.st_mtime_ns) for name, stat in there.items()}:
        return None
    return folder_sha256(recorded(folder))


def folder_sha256(shards: Sequence[ShardInfo]) -> str:
    """Return the hash of a dataset: of its shards' names and contents, in order of the names."""
    lines = sorted(f"{shard.name}\0{shard.sha256}\n" for shard in shards)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
