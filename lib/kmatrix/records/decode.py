"""Decode JSON into typed records: the one reader of every JSON file and log line that kmatrix writes.

A file that does not match the types and ranges of a record is damaged: RecordError names it and the field; an optional
one counts as missing, with a warning. Unknown keys are ignored, and a file with a newer schema is refused.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kmatrix.errors import RecordError, note_damage, note_lines

SCHEMA = 1  # of the files that this version writes
field, replaced, as_tuple, Meta = msgspec.field, msgspec.structs.replace, msgspec.structs.astuple, msgspec.Meta

EXACT = 2**53  # integers up to here are exact in every JSON reader
Int = Annotated[int, Meta(ge=-EXACT, le=EXACT)]
Size = Annotated[int, Meta(ge=0, le=2**40)]  # of a model, a batch, a run: products of several stay finite
Count = Annotated[int, Meta(ge=0, le=EXACT)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]  # JSON has no infinity; sums of two stay finite
Amount = Annotated[float, Meta(ge=0, le=1e300)]  # seconds, bytes, dollars, ...
LATEST = 253_370_764_800  # Unix seconds of the year 9999: what `datetime` can show in any time zone
UnixTime = Annotated[float, Meta(ge=0, le=LATEST)]
# Files are read and written below this name, with prefixes and suffixes: it must not lead out of the matrix, and the
# longest of them must have less than 256 bytes. Printable ASCII without "/", and no "." in front.
RunName = Annotated[str, Meta(max_length=190, pattern=r"\A[!-\-0-~][ -.0-~]*\Z")]
Scalar = Int | Number | bool | str | None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all records. A subclass repeats `frozen=True, kw_only=True`, for type checkers."""


R = TypeVar("R")
SCHEMA_FIRST = re.compile(rb'\{\s*"schema": ?%d,' % SCHEMA)  # the beginning of a file of this version
DAMAGE = (msgspec.MsgspecError, ValueError, RecursionError)  # what the decoders raise


class _Header(Record, frozen=True, kw_only=True):
    schema: Count = 0


def decode(path: Path | str, kind: type[R]) -> R:
    """Return a JSON file as a record. Raises RecordError if it is missing, damaged or newer."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", hint="check that this is the directory of a run or a matrix") from None
    except OSError as error:
        hint = "check the permissions of the file and its directory"
        raise RecordError(f"{path} cannot be read", why=error.strerror or str(error), hint=hint) from None
    return decode_bytes(data, kind, str(path))


def decode_optional(path: Path, kind: type[R]) -> R | None:
    """Return `decode`, None if the file is missing or cannot be read: then it is noted."""
    try:
        return decode(path, kind)
    except RecordError as error:
        if error.why:  # it is not missing
            note_damage(path, error.why)
        return None


def decode_bytes(data: bytes, kind: type[R], name: str) -> R:
    """Return JSON text as `decode` does. name: of the file."""
    try:
        # The schema first: a newer version may mean something else by the same key. Most files begin with it.
        schema = SCHEMA if SCHEMA_FIRST.match(data) else _decoded(data, _Header).schema
        if schema <= SCHEMA:
            return _decoded(data, kind)
    except DAMAGE as error:
        raise _damage(name, error) from None
    raise RecordError(f"{name} has schema {schema}", why=f"this version of kmatrix reads schemas up to {SCHEMA}")


def convert(value: object, kind: type[R], name: str) -> R:
    """Return a JSON value as a record. Raises RecordError."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damage(name, error) from None


def decode_line(line: bytes | str, kind: type[R]) -> R | None:
    """Return a line of an append-only log as a record, or None if it is damaged."""
    try:
        return _decoded(line, kind)
    except DAMAGE:
        return None


def decode_lines(path: Path, kind: type[R]) -> list[R]:
    """Return the complete lines of an append-only log as records; none if the file is missing.

    Damaged lines are skipped and noted. An incomplete last line is no damage: its writer is at work, or was killed.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        note_damage(path, error.strerror or str(error))
        return []
    found, damaged = decoded_lines(data[: data.rfind(b"\n") + 1], kind)
    if damaged:
        note_lines(path, damaged, len(found) + damaged)
    return found


def decoded_lines(data: bytes, kind: type[R]) -> tuple[list[R], int]:
    """Return the lines of a text as records, and the number of damaged ones."""
    try:
        return _decoder(kind).decode_lines(data), 0  # type: ignore[arg-type]  # much faster than one by one
    except DAMAGE:
        lines = [line for line in data.split(b"\n") if line.strip()]
        found = [value for line in lines if (value := decode_line(line, kind)) is not None]
        return found, len(lines) - len(found)


def as_json(value: object) -> Any:
    """Return a record as JSON values: objects, arrays, texts, numbers."""
    return msgspec.to_builtins(value)


def indented_text(value: object) -> str:
    """Return `json.dumps(value, indent=2)`, several times faster: that encodes in Python."""
    text = json.dumps(value)
    try:
        return msgspec.json.format(text, indent=2)
    except msgspec.MsgspecError:  # NaN and infinity, which only Python reads
        return json.dumps(value, indent=2)


def _decoded(data: bytes | str, kind: type[R]) -> R:
    try:
        value: R = _decoder(kind).decode(data)  # type: ignore[arg-type]
    except msgspec.DecodeError as error:
        # Python writes the bytes of a file name that is not UTF-8 as half of a pair, which msgspec refuses.
        if "surrogate" not in str(error):
            raise
        value = msgspec.convert(json.loads(data), kind)
    return value


@cache  # building a decoder takes as long as decoding hundreds of lines
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _damage(name: str, error: Exception) -> RecordError:
    """Return the error of a file; its cause reads `train.batch_size: expected int, got str`."""
    text, _, place = str(error).replace("`", "").partition(" - at $")
    why = f"{place.lstrip('.')}: {text[:1].lower()}{text[1:]}" if place else text
    if isinstance(error, RecursionError):
        why = "nested too deeply"
    return RecordError(f"{name} is damaged", why=why, hint="restore it from a copy")
