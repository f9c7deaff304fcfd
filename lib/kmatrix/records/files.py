"""How a file is written whole, and how it is read back.

Readers accept every older schema and refuse a newer one by name. A reader of an
append-only log takes the complete lines and leaves a half-written last one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError, SchemaError

SCHEMA = 1


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write `value` so that a reader sees the old file or the new one, never half of one.

    durable: wait until the disk has it. Not worth it for what is old after a second.
    """
    write_bytes(path, (json.dumps({"schema": SCHEMA, **value}, indent=2) + "\n").encode(), durable=durable)


def write_json_array(path: Path, values: list[Any]) -> None:
    """Write an array in the original project's format, which carries no schema."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file aside, flush it to the disk where it is to be durable, and put it in place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object of ours. Raises RecordError when it is missing, damaged or too new."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", fix="is this the folder of a run or of a matrix?") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(
            f"{path} is not whole",
            why=str(error),
            fix="delete it, and run the run again: make reproduce RUN=<its folder>",
        ) from None
    if not isinstance(value, dict):
        raise RecordError(f"{path} is not a record of kmatrix", why="it holds no JSON object")
    if int(value.get("schema", 0)) > SCHEMA:
        raise SchemaError(
            f"{path} has schema {value['schema']}",
            why=f"this kmatrix reads schemas up to {SCHEMA}",
            fix="use the newer kmatrix that wrote it",
        )
    return value


def append_jsonl(path: Path, value: Mapping[str, Any]) -> None:
    """Append one line to an append-only log."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"schema": SCHEMA, **value}) + "\n")


def end_torn_line(path: Path) -> None:
    """End the last line of an append-only log that a crash cut short, so that the next begins on a line of its own."""
    try:
        with path.open("rb+") as file:
            if file.seek(0, 2) and file.seek(-1, 2) is not None and file.read(1) != b"\n":
                file.write(b"\n")
    except FileNotFoundError:
        return


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of an append-only log; nothing where there is no file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.endswith("\n"):
                    return
                try:
                    value = json.loads(line)
                except json.JSONDecodeError:
                    continue  # a line that a crash cut short, with later attempts after it
                if isinstance(value, dict):
                    yield value
    except FileNotFoundError:
        return
