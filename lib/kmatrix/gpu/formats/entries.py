"""A piece of an array of JSON entries -> a block: decoded at once, into the few fields that are needed.

Where an array may be cut is learned from its first two entries; that a cut was right is proven by the piece, which is
whole JSON only then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from kmatrix.gpu.formats.blocks import Block, Floats, Part
from kmatrix.gpu.formats.reading import CLOCKS, MEMORY, TOTAL, hottest

CLOSE = ord("]")
LEARN = 1 << 20  # bytes in which the first two entries must lie
_BETWEEN = re.compile(r'\s*,\s*\{\s*"[^"\\]*"')  # from behind an entry to the first key of the next
_Number = float | None | UnsetType


def between(data: bytearray) -> bytes | None:
    """Return what stands between the first two entries, from the space before a brace to the next one's first key."""
    text = data[1:LEARN].decode("utf-8", "replace").lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    found = _BETWEEN.match(text, end)
    if found is None or text[end - 1] != "}":
        return None
    begin = len(text[: end - 1].rstrip(" \t\r\n"))
    return text[begin : found.end()].encode()


def cut(data: bytearray, separator: bytes | None) -> int:
    """Return where the last entry that is whole seems to end; 0 where none does."""
    at = data.rfind(separator) if separator else -1
    return data.index(b"}", at) + 1 if at > 0 else 0


def decoded(data: bytearray, end: int, *, closed: bool) -> Block | None:
    """Return the block of the entries up to `end`; None where they must be read one by one.

    closed: the array's own bracket is among them. Else the byte at `end` is lent to one.
    """
    if not end:
        return None
    try:
        if closed:
            moments = _DECODER.decode(data)
        else:
            lent, data[end] = data[end], CLOSE
            try:
                moments = _DECODER.decode(memoryview(data)[: end + 1])
            finally:
                data[end] = lent
        return _block(moments) if moments else None
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # whatever it is, the exact reader says so, with its place


class _Clocks(msgspec.Struct, gc=False):
    gpu: _Number = UNSET
    sm: _Number = UNSET
    graphics: _Number = UNSET


class _Gpu(msgspec.Struct, gc=False):
    """One GPU at one moment, as it stands in a file: UNSET is not there, None is null."""

    gpu_index: int | None = None
    gpu_name: str | None = None
    uuid: str | None = None
    utilization: float | None = None
    memory_used: _Number = UNSET
    memory_used_mb: _Number = UNSET
    memory_mb: _Number = UNSET
    memory_total: _Number = UNSET
    memory_total_mb: _Number = UNSET
    power: float | None = None
    temperature: _Number = UNSET
    temperatures: dict[str, float | None] | None = None
    sm_clock: _Number = UNSET
    clocks: _Clocks | None = None
    energy_j: float | None = None


class _Entry(_Gpu, kw_only=True, gc=False):
    """One moment: of all GPUs, or of one, whose fields then stand beside the time."""

    timestamp: datetime | float
    multi_gpu_data: list[_Gpu] | UnsetType = UNSET


_DECODER = msgspec.json.Decoder(list[_Entry])


def _block(moments: list[_Entry]) -> Block | None:
    """Return the columns of these moments; None where one has no GPU, or a GPU has no index."""
    several = [moment.multi_gpu_data for moment in moments]
    lists = [gpus for gpus in several if gpus is not UNSET]
    if lists and (len(lists) < len(several) or not all(lists)):
        return None
    gpus: list[_Gpu] = list(chain.from_iterable(lists)) if lists else list(moments)
    counts = list(map(len, lists)) if lists else [1] * len(moments)
    indices = list(map(attrgetter("gpu_index"), gpus))
    if None in indices:
        return None
    rows, every = np.repeat(np.arange(len(moments)), counts), np.arange(len(gpus))
    columns = {name: column(gpus) for name, column in _COLUMNS.items()}
    parts = []
    for index, places in _places(indices, counts[0]).items():
        last = gpus[every[places][-1]]
        parts.append(
            Part(
                gpu_index=index,
                gpu_name=last.gpu_name or f"GPU {index}",
                uuid=last.uuid or "",
                memory_total=_first(last, TOTAL),
                rows=rows[places],
                columns={name: np.ascontiguousarray(values[places]) for name, values in columns.items()},
            )
        )
    return Block(times=np.array([_time(moment.timestamp) for moment in moments]), parts=tuple(parts))


def _places(indices: list[int], width: int) -> dict[int, Any]:
    """Return where each GPU stands among all samples. width: how many GPUs the first moment has."""
    order = indices[:width]
    if len(set(order)) == width and indices == order * (len(indices) // width):
        return {index: slice(at, None, width) for at, index in enumerate(order)}
    each = np.array(indices)
    return {index: np.flatnonzero(each == index) for index in dict.fromkeys(indices)}


def _plain(name: str) -> Callable[[list[_Gpu]], Floats]:
    """Return how a field becomes a column. Raises TypeError where it is missing from an entry."""
    field = attrgetter(name)
    return lambda gpus: np.array(list(map(field, gpus)), dtype=float)


def _memory(gpus: list[_Gpu]) -> Floats:
    try:
        return _plain(MEMORY[0])(gpus)
    except TypeError:
        return np.array([_first(gpu, MEMORY) for gpu in gpus], dtype=float)


def _temperature(gpus: list[_Gpu]) -> Floats:
    """Return temperatures as read_stats finds them: the GPU's own, else the hottest of its places."""
    if _nowhere("temperature", gpus):
        try:
            return np.array(list(map(itemgetter("GPU"), map(attrgetter("temperatures"), gpus))), dtype=float)
        except (KeyError, TypeError):
            pass  # of another make, or of several
    return np.array([hottest(g.temperatures) if g.temperature is UNSET else g.temperature for g in gpus], dtype=float)


def _clock(gpus: list[_Gpu]) -> Floats:
    if _nowhere("sm_clock", gpus):
        try:
            return _plain("clocks.gpu")(gpus)
        except (AttributeError, TypeError):
            pass
    return np.array([_first(g.clocks, CLOCKS) if g.sm_clock is UNSET else g.sm_clock for g in gpus], dtype=float)


_COLUMNS = {
    "memory_used": _memory,
    "utilization": _plain("utilization"),
    "power": _plain("power"),
    "temperature": _temperature,
    "sm_clock": _clock,
    "energy_j": _plain("energy_j"),
}


def _nowhere(name: str, gpus: list[_Gpu]) -> bool:
    return list(map(attrgetter(name), gpus)).count(UNSET) == len(gpus)


def _first(record: Any, names: Sequence[str]) -> float | None:
    """Return the first of these fields that is there."""
    return next((value for name in names if (value := getattr(record, name, UNSET)) is not UNSET), None)


def _time(stamp: datetime | float) -> float:
    """Return Unix seconds. A time without an offset is local."""
    return stamp.timestamp() if isinstance(stamp, datetime) else stamp
