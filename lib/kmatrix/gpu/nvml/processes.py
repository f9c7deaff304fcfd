"""The processes on a GPU, and their share of it, as the driver reports them.

Names and layouts: NVML API reference, nvml.h.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from kmatrix.gpu.devices import DeviceProcess, ProcessShare
from kmatrix.gpu.nvml.calls import MIB, NOT_FOUND_FUNCTION, NOT_SUPPORTED, SUCCESS

TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE
FIRST_ROOM = 64  # processes for which there is room at the first try
TRIES = 4  # processes may start between two tries
SPARE = 16  # room for those
NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE: in containers and on Windows
INFO = struct.Struct("<I4xQII")  # nvmlProcessInfo_v2_t: pid, bytes, GPU instance, compute instance
OLD_INFO = struct.Struct("<I4xQ")  # nvmlProcessInfo_v1_t
SHARE = struct.Struct("<I4xQIIII")  # nvmlProcessUtilizationSample_t: pid, time, SM, memory, encoder, decoder
# Newest first. Version 2 of the function has the layout of version 3.
VERSIONS = (("_v3", INFO), ("_v2", INFO), ("", OLD_INFO))
KINDS = (("Compute", "C"), ("Graphics", "G"))


def processes_on(library: Any, handle: Any) -> tuple[DeviceProcess, ...]:
    """Return the processes that use a GPU, in the order of the driver; empty if it does not tell."""
    found: dict[int, DeviceProcess] = {}
    for name, kind in KINDS:
        for pid, size in _listed(library, handle, name):
            both = pid in found and found[pid].kind != kind
            found[pid] = DeviceProcess(
                pid=pid,
                memory_mib=None if size == NOT_AVAILABLE else size / MIB,
                kind="X" if both else kind,
            )
    return tuple(found.values())


def shares_on(library: Any, handle: Any) -> Mapping[int, ProcessShare]:
    """Return pid -> use of a GPU, of the newest sample of each process; empty on an idle GPU."""
    function = getattr(library, "nvmlDeviceGetProcessUtilization", None)
    if function is None:
        return {}
    newest: dict[int, tuple[int, ProcessShare]] = {}
    # Samples since 0: all that the driver keeps, a few seconds.
    data = _filled(lambda out, count: function(handle, out, ctypes.byref(count), ctypes.c_ulonglong(0)), SHARE.size)[1]
    for pid, time, sm, memory, _, _ in SHARE.iter_unpack(data):
        if pid and time >= newest.get(pid, (0,))[0]:
            newest[pid] = time, ProcessShare(sm=float(min(sm, 100)), memory=float(min(memory, 100)))
    return {pid: share for pid, (_, share) in newest.items()}


def _listed(library: Any, handle: Any, name: str) -> Iterator[tuple[int, int]]:
    """Yield pid and bytes of each process of a kind, from the newest function that the driver has."""
    for version, layout in VERSIONS:
        function = getattr(library, f"nvmlDeviceGet{name}RunningProcesses{version}", None)
        if function is None:
            continue
        code, data = _filled(lambda out, count, call=function: call(handle, ctypes.byref(count), out), layout.size)
        if code in (NOT_SUPPORTED, NOT_FOUND_FUNCTION):
            continue
        for pid, size, *_ in layout.iter_unpack(data):
            yield pid, size
        return


def _filled(call: Any, size: int) -> tuple[int, bytes]:
    """Return the code of a call that fills a list, and the entries of `size` bytes that it wrote, none if it failed.

    call: takes a buffer and a count, which it replaces by the number of entries, also if the buffer is too small.
    """
    room, code = FIRST_ROOM, TOO_SMALL
    for _ in range(TRIES):
        buffer, count = ctypes.create_string_buffer(size * room), ctypes.c_uint(room)
        code = int(call(ctypes.byref(buffer), count))
        if code == SUCCESS:
            return code, buffer.raw[: size * min(count.value, room)]
        if code != TOO_SMALL:
            break
        room = max(2 * room, count.value + SPARE)
    return code, b""
