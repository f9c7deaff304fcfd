"""Token shards on disk: their format, their names, their hash, and dataset.json beside them.

A shard that we write is a header of 256 little-endian 32-bit integers (20240520, 1, the number of
tokens, zeros) and the tokens as 16-bit integers: the format of llm.c and modded-nanogpt.
Read are also nanoGPT's train.bin and val.bin, which are tokens alone, and .npy arrays (docs/data.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
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
KINDS = {
    kind: (f"*_{kind}_*.bin", f"*_{kind}_*.npy", f"{kind}.bin", f"{kind}.npy") for kind in ("train", "val")
}  # the second last is nanoGPT's
RAW = {"train.bin", "val.bin"}  # names of files that may be tokens alone
RECORD = "dataset.json"
Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One shard as dataset.json lists it.

    size: bytes.  mtime_ns: when it was last written.  max_token: the greatest token in it.
    text_bytes: of the text in UTF-8 that its tokens stand for; None where that is not known.
    """

    name: str
    tokens: int
    sha256: str
    size: int
    mtime_ns: int
    max_token: int
    text_bytes: int | None = None


def write_shard(path: Path, tokens: npt.ArrayLike) -> None:
    """Write one shard, whole or not at all."""
    values = np.ascontiguousarray(tokens).astype("<u2", copy=False)
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(values)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(header.tobytes())
        file.write(values.data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a file lie. offset: bytes before the first.  count: tokens."""

    offset: int
    count: int


def layout(path: Path) -> Layout:
    """Return where a shard's tokens lie, from its header, held against the size of the file."""
    if path.suffix == ".npy":
        found = _layout_of_npy(path)
    else:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
        plain = path.name in RAW and raw[:4] != np.array(MAGIC, dtype="<i4").tobytes()
        found = Layout(0, path.stat().st_size // 2) if plain else _layout_of_bin(path, raw)
    expected, size = found.offset + 2 * found.count, path.stat().st_size
    if found.count < 0 or size != expected:
        stands = f"at byte 8 stands {found.count} tokens" if found.offset == HEADER_BYTES else f"{found.count} tokens"
        raise damaged(path, f"{stands}: {expected} bytes, and the file has {size}")
    return found


def _layout_of_bin(path: Path, raw: bytes) -> Layout:
    if len(raw) < HEADER_BYTES:
        raise damaged(path, f"it ends at byte {len(raw)}, within the header of {HEADER_BYTES} bytes")
    magic, version, count = (int(value) for value in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise damaged(path, f"at byte 0 stands {magic}, not {MAGIC}: it is not a shard of 16-bit tokens")
    if version != VERSION:
        raise damaged(path, f"at byte 4 stands version {version}, and only {VERSION} is known")
    return Layout(HEADER_BYTES, count)


def _layout_of_npy(path: Path) -> Layout:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            offset = file.tell()
    except ValueError as error:
        raise damaged(path, f"the header at byte 0 is not one of a .npy file: {error}") from None
    if dtype != np.dtype("<u2") or len(shape) != 1:
        raise damaged(path, f"the header at byte 0 says {dtype} of shape {shape}: it is not an array of 16-bit tokens")
    return Layout(offset, int(shape[0]))


def token_count(path: Path) -> int:
    """Return the number of tokens in a shard, from its header, held against the size of the file."""
    return layout(path).count


def open_shard(path: Path) -> Tokens:
    """Return the tokens of a shard, mapped into memory and not read."""
    found = layout(path)
    if not found.count:
        return np.empty(0, dtype=np.uint16)
    return np.memmap(path, dtype="<u2", mode="r", offset=found.offset, shape=(found.count,))


def damaged(path: Path, why: str) -> DataError:
    """Return the error of a shard that cannot be read."""
    return DataError(
        f"{path} is damaged or no token shard", why=why, fix="fetch or make the shard again (docs/data.md)"
    )


def foreign_token(path: Path, index: int, token: int, vocab_size: int) -> DataError:
    """Return the error of a token that the vocabulary does not have. index: tokens from the first one."""
    return DataError(
        f"{path} holds the token {token} at byte {layout(path).offset + 2 * index}",
        why=f"the tokenizer has {vocab_size} tokens, 0 to {vocab_size - 1}",
        fix="choose the tokenizer that the shards were made with (make menuconfig, Data)",
    )


def find(folder: Path, kind: str, count: int = 0) -> list[Path]:
    """Return the shards of one kind, "train" or "val", in order of their names; refuse a folder without any.

    count: only the first so many; 0 for all.
    """
    paths = sorted({path for pattern in KINDS[kind] for path in folder.glob(pattern)})
    if len(paths) < max(count, 1):
        raise DataError(
            f"no {kind} shards: {folder / KINDS[kind][0]} matches nothing"
            if not paths
            else f"{folder} has {len(paths)} {kind} shards, and {count} are to be read",
            why="a dataset is a folder of token shards, some for training and some for validation",
            fix=f"put {', '.join(KINDS[kind])} in {folder}: `make prepare-data` makes or fetches them (docs/data.md)",
        )
    return paths[:count] if count else paths


def describe(folder: Path, vocab_size: int, **about: object) -> dict[str, Any]:
    """Return what dataset.json says of a folder of shards, and write it there where that is allowed.

    A shard whose size and time are those recorded is not read again. Every token is held
    against the vocabulary. about: dataset, source, tokenizer, recipe.
    """
    known = {shard.name: shard for shard in recorded(folder)}
    paths = {kind: find(folder, kind) for kind in KINDS}
    found = {path: known_or_read(path, known.get(path.name)) for paths_ in paths.values() for path in paths_}
    for path, shard in found.items():
        check_tokens(path, shard, vocab_size)
    value = record(list(found.values()), vocab_size=vocab_size, **about)
    with contextlib.suppress(OSError):  # a folder that is only read: the hash is computed again next time
        write_json(folder / RECORD, value)
    return value


def check_tokens(path: Path, shard: ShardInfo, vocab_size: int) -> None:
    """Refuse a shard with a token that the vocabulary does not have, by its byte."""
    if shard.max_token >= vocab_size:
        raise foreign_token(path, int(np.argmax(open_shard(path) >= vocab_size)), shard.max_token, vocab_size)


def record(listed: Sequence[ShardInfo], **about: object) -> dict[str, Any]:
    """Return what dataset.json says of these shards."""
    parts = {kind: [shard for shard in listed if kind_of(shard.name) == kind] for kind in KINDS}
    value: dict[str, Any] = {**about, "sha256": folder_sha256(listed)}
    for kind, part in parts.items():
        value[f"{kind}_tokens"] = sum(shard.tokens for shard in part)
        value[f"{kind}_bytes"] = _size_of_text(part)
    value["shards"] = [{name: getattr(shard, name) for name in ShardInfo.__slots__} for shard in listed]
    return value


def _size_of_text(part: Sequence[ShardInfo]) -> int | None:
    """Return the bytes of text in shards; None where those of one are not known."""
    sizes = [shard.text_bytes for shard in part]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def kind_of(name: str) -> str:
    """Return "train" or "val" for the name of a shard."""
    path = Path(name)
    return next(kind for kind, patterns in KINDS.items() if any(path.match(pattern) for pattern in patterns))


def known_or_read(path: Path, known: ShardInfo | None) -> ShardInfo:
    """Return what is recorded of a shard if it is unchanged, else read it."""
    stat = path.stat()
    if known and (known.size, known.mtime_ns, known.tokens) == (stat.st_size, stat.st_mtime_ns, token_count(path)):
        return known
    return read_info(path)


def read_info(path: Path, text_bytes: int | None = None) -> ShardInfo:
    """Read a shard whole, and return what dataset.json says of it."""
    found, stat = layout(path), path.stat()
    digest, greatest = hashlib.sha256(), 0
    with path.open("rb") as file:
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


def has_val(listed: Sequence[ShardInfo]) -> bool:
    """Say whether there is a validation shard."""
    return any(kind_of(shard.name) == "val" for shard in listed)


def recorded(folder: Path) -> list[ShardInfo]:
    """Return the shards that dataset.json lists; none where it is missing, damaged or of another make."""
    try:
        return [
            ShardInfo(**{name: shard.get(name) for name in ShardInfo.__slots__})
            for shard in read_json(folder / RECORD)["shards"]
            if isinstance(shard["name"], str) and isinstance(shard["max_token"], int)
        ]
    except (RecordError, OSError, KeyError, TypeError, AttributeError):
        return []


def recorded_sha256(folder: Path, count: int = 0) -> str | None:
    """Return the hash of the folder without reading a shard; None where dataset.json does not speak of these files.

    count: of the first so many training shards and all of validation; 0 for all.
    """
    known = {shard.name: shard for shard in recorded(folder)}
    paths = [*find(folder, "train", count), *find(folder, "val")]
    for path in paths:
        shard, stat = known.get(path.name), path.stat()
        if shard is None or (shard.size, shard.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            return None
    return folder_sha256([known[path.name] for path in paths])


def folder_sha256(listed: Sequence[ShardInfo]) -> str:
    """Return the hash of a dataset: of its shards' names and contents, in order of the names."""
    lines = sorted(f"{shard.name}\0{shard.sha256}\n" for shard in listed)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def position(folder: Path) -> tuple[int, int] | None:
    """Return the document at which the next shard begins, as dataset.json has it: file, document in it."""
    try:
        file, document = read_json(folder / RECORD)["position"]
        return int(file), int(document)
    except (RecordError, KeyError, TypeError, ValueError):
        return None
