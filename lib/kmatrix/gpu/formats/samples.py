"""gpu_samples.bin: every sample of a recording, in records of one size that survive the end of their writer.

    b"KMXGPU1\\n", the length of the header (4 bytes, little-endian), the header (JSON), records

A record is the time (float64, Unix seconds) and the columns of each GPU in the header's order
(float32, little-endian, NaN: not known), filled up to a multiple of 8 bytes with NaN.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError, SchemaError
from kmatrix.gpu.formats.live import write_at
from kmatrix.gpu.formats.values import GpuSample, Snapshot

MAGIC = b"KMXGPU1\n"
SCHEMA = 1
COLUMNS = ("utilization", "memory_used", "power", "power_instant", "temperature", "sm_clock", "energy_j")
CALIBRATION_BYTES = 1536  # room at the header's start, filled in when it is known: one write inside the first page
_LENGTH = struct.Struct("<I")
_SAME = ("columns", "device_type", "simulated")  # what two recordings must share to be one file


@dataclass(frozen=True, slots=True)
class Recording:
    """What gpu_samples.bin holds.

    header: its JSON.  times: Unix seconds.  columns: for each GPU of header["gpus"], name -> values, NaN: not known.
    first: the number of records that were skipped.  lost_bytes: of a last record that was cut short.
    Times and values are views of the file: nothing is copied.
    """

    header: Mapping[str, Any]
    times: Sequence[float]
    columns: tuple[Mapping[str, Sequence[float]], ...]
    first: int = 0
    lost_bytes: int = 0

    def __len__(self) -> int:
        return len(self.times)

    def snapshot(self, index: int) -> Snapshot:
        """Return one moment. energy_j counts from the recording's start."""
        started = self.header.get("started") or {}
        time = self.times[index]
        offset = started["monotonic"] - started["wall"] if "monotonic" in started and "wall" in started else None
        samples = tuple(
            GpuSample(
                gpu_index=int(gpu["gpu_index"]),
                gpu_name=str(gpu["gpu_name"]),
                uuid=str(gpu.get("uuid") or ""),
                memory_total=gpu.get("memory_total"),
                power_limit=gpu.get("power_limit"),
                **_known(columns, index),
            )
            for gpu, columns in zip(self.header["gpus"], self.columns, strict=True)
        )
        return Snapshot(time=time, monotonic=None if offset is None else time + offset, samples=samples)

    def snapshots(self) -> Iterator[Snapshot]:
        for index in range(len(self)):
            yield self.snapshot(index)


class SampleFile:
    """Appends samples to gpu_samples.bin. Raises OSError when the disk takes nothing more: whole records stay.

    A file of the same GPUs that is there already is continued; its header stays. One of other GPUs is
    put beside it as gpu_samples.1.bin, .2 and so on.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        count = len(header["gpus"]) * len(header.get("columns", COLUMNS))
        self._record = struct.Struct(f"<d{count + count % 2}f")
        self._filling = (math.nan,) * (count % 2)
        self.continued = _can_continue(path, header)
        if path.exists() and not self.continued:
            path.rename(_aside(path))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not self.continued:
                write_at(self._file, _encode(header), 0)
            length = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, len(MAGIC)))[0]
            self._start = len(MAGIC) + _LENGTH.size + length
            whole = (os.fstat(self._file).st_size - self._start) // self._record.size
            self._end = self._start + whole * self._record.size
            os.ftruncate(self._file, self._end)
        except OSError:
            os.close(self._file)
            raise

    def append(self, time: float, values: Sequence[float]) -> None:
        """Append one moment. values: the columns of the first GPU, of the second and so on; NaN: not known."""
        write_at(self._file, self._record.pack(time, *values, *self._filling), self._end)
        self._end += self._record.size

    def calibrated(self, calibration: Mapping[str, Any]) -> None:
        """Put the calibration in the header."""
        text = json.dumps(calibration, separators=(",", ":")).encode()
        if len(text) <= CALIBRATION_BYTES:
            begin = len(MAGIC) + _LENGTH.size + len(_OPENING)
            write_at(self._file, text.ljust(CALIBRATION_BYTES), begin)

    def close(self) -> None:
        os.close(self._file)


def read_samples(path: Path, first: int = 0) -> Recording:
    """Read gpu_samples.bin, also while it is written. first: how many records to skip. Raises RecordError.

    A last record that was cut short is left out and counted.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", fix="was the run recorded? see gpu_events.jsonl") from None
    try:
        header, start = _header(path, file)
        size = os.fstat(file).st_size
        data: Any = mmap.mmap(file, size, access=mmap.ACCESS_READ) if size else b""
    finally:
        os.close(file)
    names = list(header["columns"])
    count = len(header["gpus"]) * len(names)
    words = 2 + count + count % 2  # of 4 bytes
    begin = start + 4 * words * first
    whole = max(0, size - begin) // (4 * words)
    view = memoryview(data)[begin : begin + 4 * words * whole] if whole else memoryview(b"")
    floats = view.cast("f") if whole else memoryview(array("f"))
    doubles = view.cast("d") if whole else memoryview(array("d"))
    columns = tuple(
        {name: floats[2 + gpu * len(names) + at :: words] for at, name in enumerate(names)}
        for gpu in range(len(header["gpus"]))
    )
    lost = max(0, size - begin) - 4 * words * whole
    return Recording(header, doubles[:: words // 2], columns, first=first, lost_bytes=lost)


_OPENING = b'{"calibration":'


def _encode(header: Mapping[str, Any]) -> bytes:
    """Return everything before the records: as long as a multiple of 8, so that records can be read in place."""
    rest = json.dumps({"schema": SCHEMA, "columns": list(COLUMNS), **_less(header, "calibration")}, allow_nan=False)
    calibration = json.dumps(header.get("calibration"), separators=(",", ":")).encode().ljust(CALIBRATION_BYTES)
    text = _OPENING + calibration + b"," + rest.encode()[1:]
    text += b" " * (-(len(MAGIC) + _LENGTH.size + len(text)) % 8)
    return MAGIC + _LENGTH.pack(len(text)) + text


def _header(path: Path, file: int) -> tuple[dict[str, Any], int]:
    """Return the header and where the records begin."""
    begin = os.pread(file, len(MAGIC) + _LENGTH.size, 0)
    if begin[: len(MAGIC)] != MAGIC or len(begin) < len(MAGIC) + _LENGTH.size:
        if begin.startswith(b"KMXGPU") and len(begin) >= len(MAGIC):
            raise SchemaError(
                f"{path} is of a newer kind, {begin[:7].decode(errors='replace')}", fix="use a newer kmatrix"
            )
        raise RecordError(f"{path} is no GPU recording", why="it does not begin with KMXGPU1")
    length = _LENGTH.unpack(begin[len(MAGIC) :])[0]
    text = os.pread(file, length, len(begin))
    try:
        header = json.loads(text)
        shape = len(header["gpus"]) * len(header["columns"])
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} has a header that is not whole", why=str(error)) from None
    if int(header.get("schema", 0)) > SCHEMA:
        raise SchemaError(f"{path} has schema {header['schema']}", why=f"this kmatrix reads up to {SCHEMA}")
    if not shape:
        raise RecordError(f"{path} holds no GPU")
    return header, len(begin) + length


def _can_continue(path: Path, header: Mapping[str, Any]) -> bool:
    """Whether records of `header` may follow those that the file holds."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        known, start = _header(path, file)
        if os.fstat(file).st_size < start:
            return False
    except RecordError:
        return False
    finally:
        os.close(file)
    wanted = {"columns": list(COLUMNS), **header}
    return all(known.get(key) == wanted.get(key) for key in _SAME) and _names(known) == _names(header)


def _names(header: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(gpu["gpu_index"], gpu.get("uuid")) for gpu in header["gpus"]]


def _aside(path: Path) -> Path:
    """Return the first free name of the kind gpu_samples.1.bin."""
    number = 1
    while (other := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return other


def _less(header: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in header.items() if name != key}


def _known(columns: Mapping[str, Sequence[float]], index: int) -> dict[str, Any]:
    return {name: _none(values[index]) for name, values in columns.items() if name in COLUMNS}


def _none(value: float) -> float | None:
    return None if math.isnan(value) else value
