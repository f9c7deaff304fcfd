"""gpu_samples.bin: every sample of a recording, in fixed-size records that survive a crash of the writer.

    b"KMXGPU3\\n", header length (4 bytes, little-endian), header (JSON), records

A record is the time (Unix s) and the monotonic time (s), both float64, and then the columns of each GPU in the order of
the header: float32, and float64 for energy, of which float32 would lose joules after an hour. All are little-endian,
NaN is unknown.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Required, TypedDict, cast

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.json_array import write_at
from kmatrix.gpu.formats.limits import Limits, limits_of, time_limits
from kmatrix.gpu.formats.samples import GpuSample, Snapshot
from kmatrix.gpu.formats.sound import SoundRecords, sound_ranges
from kmatrix.gpu.formats.summary import HeaderRecord
from kmatrix.records.decode import convert, decode_line
from kmatrix.records.files import finite
from kmatrix.text import plural

MAGIC = b"KMXGPU3\n"
SCHEMA = 3
# Order in a record. The header names them, so that later versions can add columns.
COLUMNS = ("utilization", "memory_used", "power", "power_instant", "temperature", "sm_clock", "energy_j")
TYPES = "ffffffd"  # struct formats of COLUMNS; their sizes add up to a multiple of 8, so that doubles stay aligned
BEFORE = 2  # doubles before the columns: time, monotonic time
FACTS_BYTES = 256  # reserved at the end of the header for each device whose name, UUID or memory is not known yet
CALIBRATION_BYTES = 1536  # reserved at the start of the header: written later, by one write within the first page
_LENGTH = struct.Struct("<I")
_SAME = ("columns", "device_type", "simulated")  # must be equal to continue a file, else it would mix two sources
Calibrated = Mapping[str, Mapping[str, float | None]]  # column -> period_ms, call_us
_OPENING = b'{"calibration":'  # first key of the header: its offset must not depend on the others


class HeaderGpu(TypedDict, total=False):
    """One device in the header."""

    gpu_index: Required[int]
    gpu_name: Required[str]
    uuid: str | None
    rank: int | None
    memory_total: float | None  # MiB
    power_limit: float | None  # W


class RecordingHeader(TypedDict, total=False):
    """The header of gpu_samples.bin: see docs/formats.md."""

    schema: int
    columns: list[str]
    types: str  # struct format of each column, "f" or "d"
    run_id: str | None
    started: dict[str, float]  # wall: Unix s, monotonic: s
    hz: float  # requested rate
    simulated: bool
    device_type: str  # nvidia or cpu
    energy_source: str | None
    gpus: Required[list[HeaderGpu]]
    calibration: Calibrated | None


@dataclass(frozen=True, slots=True)
class Recording:
    """The content of gpu_samples.bin. Times and values are views of the mapped file, nothing is copied.

    Records whose times cannot be true are left out: those that a power loss replaced by zeros, for example.
    """

    header: RecordingHeader
    times: Sequence[float]  # Unix s; go back when the clock of the machine is set back
    monotonic: Sequence[float]  # s, restarts when the machine boots
    # Per GPU of header["gpus"]: name -> values. NaN, and what is outside of the limits: unknown.
    columns: tuple[Mapping[str, Sequence[float]], ...]
    first: int = 0  # number of records skipped
    damaged: int = 0  # number of records left out
    limits: tuple[Mapping[str, Limits], ...] = ()  # per GPU: name -> lowest and highest possible value

    def __len__(self) -> int:
        return len(self.times)

    @property
    def records(self) -> int:
        """The number of complete records after the skipped ones, with the damaged ones."""
        return len(self) + self.damaged

    def values(self, gpu: int, index: int) -> dict[str, float | None]:
        """Return the values of one sample of a GPU, by its place in the header. None: unknown."""
        limits = self.limits[gpu]
        found: dict[str, float | None] = {}
        for name, column in self.columns[gpu].items():
            (low, high), value = limits[name], column[index]
            found[name] = value if low <= value <= high else None
        return found

    def snapshot(self, index: int) -> Snapshot:
        """Return one sample of all GPUs. `energy_j` counts from the start of the recording."""
        rows = [self.values(gpu, index) for gpu in range(len(self.columns))]
        samples = tuple(
            GpuSample(
                gpu_index=int(gpu["gpu_index"]),
                gpu_name=str(gpu["gpu_name"]),
                uuid=str(gpu.get("uuid") or ""),
                memory_total=gpu.get("memory_total"),
                power_limit=gpu.get("power_limit"),
                **cast(dict[str, Any], {name: values[name] for name in COLUMNS if name in values}),
            )
            for gpu, values in zip(self.header["gpus"], rows, strict=True)
        )
        return Snapshot(time=self.times[index], monotonic=self.monotonic[index], samples=samples)

    def snapshots(self) -> Iterator[Snapshot]:
        for index in range(len(self)):
            yield self.snapshot(index)


class SampleFile:
    """Appends samples to gpu_samples.bin. Raises OSError on a full disk; complete records stay readable.

    An existing file of the same GPUs is continued with its header. A file of other GPUs is renamed to
    gpu_samples.1.bin, .2 and so on.
    """

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        self._record = struct.Struct(f"<{BEFORE}d{TYPES * len(header['gpus'])}")
        self.continued = _can_continue(path, header)
        # Other GPUs than in the last attempt have other columns. The old samples are kept, and counted by the report.
        self.renamed = path.exists() and not self.continued
        if self.renamed:
            path.rename(_free_name(path))
        self._path, self._file = path, os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not self.continued:
                write_at(self._file, _encode(header), 0)
            length = _LENGTH.unpack(os.pread(self._file, _LENGTH.size, len(MAGIC)))[0]
            self._start = len(MAGIC) + _LENGTH.size + length
            whole = (os.fstat(self._file).st_size - self._start) // self._record.size
            self._end = self._start + whole * self._record.size
            os.ftruncate(self._file, self._end)  # without the incomplete record of a recorder that was killed
        except OSError:
            os.close(self._file)
            raise

    def append(self, time: float, monotonic: float, values: Sequence[float]) -> None:
        """Append one sample. `values`: the columns of the first GPU, the second, and so on. NaN: unknown."""
        self.extend([(time, monotonic, *values)])

    def extend(self, samples: Sequence[Sequence[float]]) -> None:
        """Append samples with one write: Unix s, monotonic s, then the values of all GPUs."""
        data = b"".join([self._record.pack(*sample) for sample in samples])
        write_at(self._file, data, self._end)
        self._end += len(data)

    def write_calibration(self, calibration: Calibrated) -> None:
        """Write the calibration to its reserved place in the header."""
        text = json.dumps(calibration, separators=(",", ":")).encode()
        if len(text) <= CALIBRATION_BYTES:
            begin = len(MAGIC) + _LENGTH.size + len(_OPENING)
            write_at(self._file, text.ljust(CALIBRATION_BYTES), begin)

    def write_facts(self, header: RecordingHeader) -> bool:
        """Write the devices of a header, which may be known only now. Return False if they do not fit in the file."""
        known, _ = _header(self._path, self._file)
        facts = {key: header.get(key) for key in ("gpus", "simulated", "energy_source")}
        text = _text(cast(RecordingHeader, {**known, **facts}))
        begin = len(MAGIC) + _LENGTH.size
        if len(text) > self._start - begin:
            return False
        write_at(self._file, text.ljust(self._start - begin), begin)
        return True

    def close(self) -> None:
        os.close(self._file)


def read_samples(path: Path, first: int = 0, *, mapped: bool = True) -> Recording:
    """Read gpu_samples.bin, also while it is being written. Raises RecordError.

    `first`: number of records to skip, damaged ones included. An incomplete last record is omitted.
    `mapped`: without a copy in memory; the process is killed if a disk then fails to read a part of it.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise RecordError(f"{path} is missing", hint="check in gpu_events.jsonl whether the run was recorded") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    try:
        header, start = _header(path, file)
        size = os.fstat(file).st_size
        # Mapped, not read: a live screen reads a file of hundreds of MB twice per second.
        # Private: some network file systems, such as FUSE with direct I/O, refuse shared mappings.
        data: Any = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) if size and mapped else b""
        if not mapped:
            data = _read_all(path, file, size)
            size = len(data)
    finally:
        os.close(file)  # the mapping stays valid
    layout = _layout_of(path, header)
    begin = start + layout.record * first
    whole = max(0, size - begin) // layout.record
    view = memoryview(data)[begin : begin + layout.record * whole] if whole else memoryview(b"")
    # Two views of the same bytes: every float or double in steps of a record is a column.
    floats = view.cast("f") if whole else memoryview(array("f"))
    doubles = view.cast("d") if whole else memoryview(array("d"))

    def column(form: str, offset: int) -> Sequence[float]:
        """Return the value at this offset (bytes) of every record."""
        values, width = (doubles, 8) if form == "d" else (floats, 4)
        return values[offset // width :: layout.record // width]

    times, monotonic = column("d", 0), column("d", 8)
    columns = tuple(
        {name: column(form, offset + gpu * layout.device) for name, form, offset in layout.columns}
        for gpu in range(len(header["gpus"]))
    )
    recording = Recording(
        header,
        times,
        monotonic,
        columns,
        first=first,
        limits=_limits(header),
    )
    started = header.get("started")
    began = finite(started.get("wall")) if isinstance(started, dict) else None
    ranges = sound_ranges(times, time_limits(began), monotonic)
    return recording if ranges == [(0, whole)] or not whole else _without_damaged(recording, SoundRecords(ranges))


def _without_damaged(recording: Recording, sound: SoundRecords) -> Recording:
    """Return the sound records of a recording."""
    return replace(
        recording,
        times=sound.of(recording.times),
        columns=tuple({name: sound.of(values) for name, values in gpu.items()} for gpu in recording.columns),
        monotonic=sound.of(recording.monotonic),
        damaged=len(recording) - len(sound),
    )


def _limits(header: RecordingHeader) -> tuple[Mapping[str, Limits], ...]:
    """Return the limits of each column of each GPU."""
    is_rank = header.get("device_type") == "cpu"
    return tuple(
        {name: limits_of(name, gpu.get("memory_total"), is_rank=is_rank) for name in header["columns"]}
        for gpu in header["gpus"]
    )


def damage_note(path: Path, damaged: int) -> tuple[str, ...]:
    """Return the note about the damaged records of a recording, none without any."""
    return (f"{path.name} is damaged: {plural(damaged, 'sample')} left out",) if damaged else ()


def _read_all(path: Path, file: int, size: int) -> bytes:
    """Return the first `size` bytes of a file, fewer if it became shorter. Raises RecordError."""
    try:
        with os.fdopen(os.dup(file), "rb") as copy:
            copy.seek(0)
            return copy.read(size)
    except OSError as error:
        raise RecordError(f"{path} cannot be read", why=error.strerror or str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The sizes and offsets of the values in a record, in bytes."""

    record: int  # size of a record
    device: int  # size of the columns of one device
    columns: tuple[tuple[str, str, int], ...]  # name, struct format, offset in the record for the first device


def _layout_of(path: Path, header: RecordingHeader) -> _Layout:
    """Return the layout of the records. Raises RecordError if the header does not describe one."""
    names, types, begin = list(header["columns"]), str(header.get("types")), 8 * BEFORE
    offsets = [begin + struct.calcsize(f"<{types[:at]}") for at in range(len(types))] if set(types) <= {*"fd"} else []
    device = struct.calcsize(f"<{types}") if offsets else 0
    size = begin + device * len(header["gpus"])
    aligned = all(
        form == "f" or (offset % 8 == 0 and device % 8 == 0) for form, offset in zip(types, offsets, strict=False)
    )
    if len(offsets) != len(names) or not aligned:
        raise RecordError(f"{path} has a damaged header", why=f"types {types!r} for {len(names)} columns")
    columns = tuple(zip(names, types, offsets, strict=True))
    return _Layout(record=size + size % 8, device=device, columns=columns)


def _encode(header: RecordingHeader) -> bytes:
    """Return everything before the records. Its length is a multiple of 8, so that records can be mapped in place."""
    text = _text(header)
    unknown = [gpu for gpu in header["gpus"] if not gpu.get("uuid") or gpu.get("memory_total") is None]
    text += b" " * (FACTS_BYTES * len(unknown))
    text += b" " * (-(len(MAGIC) + _LENGTH.size + len(text)) % 8)
    return MAGIC + _LENGTH.pack(len(text)) + text


def _text(header: RecordingHeader) -> bytes:
    """Return a header as JSON, with the calibration in its reserved place."""
    known = {"schema": SCHEMA, "columns": list(COLUMNS), "types": TYPES, **_without(header, "calibration")}
    rest = json.dumps(known, allow_nan=False)
    calibration = json.dumps(header.get("calibration"), separators=(",", ":")).encode().ljust(CALIBRATION_BYTES)
    return _OPENING + calibration + b"," + rest.encode()[1:]


def _header(path: Path, file: int) -> tuple[RecordingHeader, int]:
    """Return the header and the offset of the first record."""
    begin = os.pread(file, len(MAGIC) + _LENGTH.size, 0)
    if not begin.startswith(MAGIC) or len(begin) < len(MAGIC) + _LENGTH.size:
        if begin.startswith(MAGIC):
            raise RecordError(f"{path} has a damaged header", why=f"it ends after {plural(len(begin), 'byte')}")
        raise RecordError(f"{path} is not a GPU recording", why="it does not begin with KMXGPU3")
    length = _LENGTH.unpack(begin[len(MAGIC) :])[0]
    text = os.pread(file, length, len(begin))
    header = decode_line(text, dict[str, Any])
    if header is None:
        raise RecordError(f"{path} has a damaged header", why="it is not a JSON object")
    known = convert(header, HeaderRecord, f"the header of {path}")
    if known.schema > SCHEMA:
        raise RecordError(f"{path} has schema {known.schema}", why=f"this kmatrix reads up to {SCHEMA}")
    if not known.gpus or not known.columns:
        raise RecordError(f"{path} contains no GPU")
    return cast(RecordingHeader, header), len(begin) + length


def _can_continue(path: Path, header: RecordingHeader) -> bool:
    """Return whether records with this header can be appended to an existing file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        known, start = _header(path, file)
        if os.fstat(file).st_size < start:
            return False  # the recorder was killed while it wrote the header
    except RecordError:
        return False
    finally:
        os.close(file)
    wanted = {"columns": list(COLUMNS), **header}
    return all(known.get(key) == wanted.get(key) for key in _SAME) and _identities(known) == _identities(header)


def _identities(header: RecordingHeader) -> list[tuple[int, str | None]]:
    return [(gpu["gpu_index"], gpu.get("uuid")) for gpu in header["gpus"]]


def _free_name(path: Path) -> Path:
    """Return the first unused name of the form gpu_samples.1.bin."""
    number = 1
    while (other := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return other


def _without(header: RecordingHeader, key: str) -> dict[str, object]:
    return {name: value for name, value in header.items() if name != key}
