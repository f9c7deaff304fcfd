"""NVIDIA's GPUs as a source of samples: which there are, what they do, and what becomes of one that is lost."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kmatrix.gpu.formats import Snapshot
from kmatrix.gpu.nvml.bound import (
    GONE,
    NOT_FOUND_FUNCTION,
    NOT_SUPPORTED,
    SUCCESS,
    UNINITIALIZED,
    Batch,
    Call,
    bind,
)
from kmatrix.gpu.nvml.detect import MIB
from kmatrix.gpu.nvml.extra import Extras
from kmatrix.gpu.source import AT, UNKNOWN, WIDTH, Device, Extra, Process, Slow, snapshot

CAREFUL = 100  # times that GPUs are read call by call after a call that failed
PROCESS = struct.Struct("<I4xQII")  # nvmlProcessInfo_v2_t: pid, bytes, GPU instance, compute instance
NO_MEMORY_VALUE = 2**64 - 1  # the driver does not say how much
THROTTLE = (  # nvmlClocksEventReasons: those that hold the clocks below what is asked for
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x20, "heat (software)"),
    (0x40, "heat (hardware)"),
    (0x80, "power brake"),
)


class NvmlSource:
    """NVIDIA's GPUs. A GPU that is lost keeps its place, and nothing is known of it until it answers again."""

    device_type: ClassVar[str] = "nvidia"

    def __init__(self, pynvml: Any, devices: Sequence[Device], handles: Sequence[Any]) -> None:
        self._pynvml = pynvml
        self.devices = tuple(devices)
        self._handles = list(handles)
        self._calls: list[list[Call] | None] = [
            None if handle is None else bind(pynvml.nvmlLib, handle) for handle in handles
        ]
        self._batch, self._careful = Batch(self._calls), 0
        self._extras: dict[int, Extras] = {}
        self._values = [UNKNOWN] * (WIDTH * len(self.devices))
        self._nothing = [UNKNOWN] * WIDTH

    @property
    def energy_source(self) -> str | None:
        """counter: each GPU counts its joules.  power: they are summed up from its power."""
        columns = {name for calls in self._calls for call in calls or () for name in call.columns}
        return "counter" if "energy_j" in columns else "power" if "power" in columns else None

    def read(self, values: list[float]) -> None:
        if self._careful:
            self._careful -= 1
        elif self._batch.read(values):
            return
        else:
            self._careful = CAREFUL
        self._read_each(values)

    def _read_each(self, values: list[float]) -> None:
        """Read call by call: what one of them does not give is not known, and a GPU that is gone is lost."""
        for position, calls in enumerate(self._calls):
            base = position * WIDTH
            values[base : base + WIDTH] = self._nothing
            for call in calls or ():
                if call(values, base) in GONE:
                    values[base : base + WIDTH] = self._nothing
                    self._changed(position, None)
                    break

    def _changed(self, position: int, calls: list[Call] | None) -> None:
        """Take note of a GPU that was lost or found."""
        self._calls[position] = calls
        self._batch, self._careful = Batch(self._calls), 0

    def timed(self, device: int) -> Mapping[str, tuple[float, float]]:
        values = [UNKNOWN] * WIDTH
        taken: dict[str, tuple[float, float]] = {}
        for call in self._calls[device] or ():
            begin = time.perf_counter()
            call(values, 0)
            seconds = time.perf_counter() - begin
            taken.update({name: (values[AT[name]], seconds) for name in call.columns})
        return taken

    def slow(self, device: int) -> Slow:
        if self._calls[device] is None:
            return Slow()
        limit, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        handle = self._handles[device]
        known = self._call("nvmlDeviceGetEnforcedPowerLimit", handle, ctypes.byref(limit)) == SUCCESS
        code = self._call("nvmlDeviceGetCurrentClocksEventReasons", handle, ctypes.byref(reasons))
        if code in (NOT_SUPPORTED, NOT_FOUND_FUNCTION):  # drivers before 535 know the older name
            code = self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
        bits = reasons.value if code == SUCCESS else 0
        return Slow(
            power_limit=limit.value / 1000.0 if known else None,
            throttled=frozenset(reason for bit, reason in THROTTLE if bits & bit),
        )

    def extra(self, device: int) -> Extra:
        if self._calls[device] is None:
            return Extra()
        handle, extras = self._handles[device], self._extras.get(device)
        if extras is None or extras.handle is not handle:  # it was lost, and found again under another handle
            extras = self._extras[device] = Extras(self._pynvml, handle)
        return extras.read()

    def processes(self, device: int) -> tuple[Process, ...]:
        """Return the processes that compute on a GPU. Expensive: milliseconds on some drivers."""
        if self._calls[device] is None:
            return ()
        count = ctypes.c_uint(256)
        buffer = ctypes.create_string_buffer(PROCESS.size * count.value)
        code = self._call(
            "nvmlDeviceGetComputeRunningProcesses_v3", self._handles[device], ctypes.byref(count), ctypes.byref(buffer)
        )
        if code != SUCCESS:
            return ()
        entries = [PROCESS.unpack_from(buffer, at * PROCESS.size) for at in range(count.value)]
        return tuple(
            Process(pid=pid, memory_mib=None if size == NO_MEMORY_VALUE else size / MIB) for pid, size, _, _ in entries
        )

    def is_lost(self, device: int) -> bool:
        return self._calls[device] is None

    def recover(self, device: int) -> bool:
        """Ask for a lost GPU again, by UUID where it is known: indices may have moved."""
        known = self.devices[device]
        try:
            if known.uuid:
                handle = self._pynvml.nvmlDeviceGetHandleByUUID(known.uuid)
            else:
                handle = self._pynvml.nvmlDeviceGetHandleByIndex(known.gpu_index)
            self._pynvml.nvmlDeviceGetMemoryInfo(handle)
        except self._pynvml.NVMLError as error:
            if error.value == UNINITIALIZED:  # the driver was reloaded: the next look finds it
                with contextlib.suppress(self._pynvml.NVMLError):
                    self._pynvml.nvmlInit()
            return False
        self._handles[device] = handle
        self._changed(device, bind(self._pynvml.nvmlLib, handle))
        return True

    def host_joules(self) -> float | None:
        return None  # each GPU has its own

    def snapshot(self) -> Snapshot:
        """Read everything once, for a screen."""
        self.read(self._values)
        slow = [self.slow(position) for position in range(len(self.devices))]
        return snapshot(self.devices, self._values, slow, time.time())

    def close(self) -> None:
        for extras in self._extras.values():
            extras.close()
        with contextlib.suppress(self._pynvml.NVMLError):  # the driver can go away meanwhile
            self._pynvml.nvmlShutdown()

    def _call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._pynvml.nvmlLib, name, None)
        return NOT_FOUND_FUNCTION if function is None else int(function(*arguments))


def open_source(uuids: Sequence[str] = ()) -> NvmlSource | None:
    """Return these GPUs in this order, the rank of each its place; without any, all GPUs, of no rank.

    None: no driver or no GPU. A GPU that does not answer is there, lost.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return None
    found = [_look(pynvml, index) for index in range(count)]
    if uuids:
        by_uuid = {device.uuid: (device, handle) for device, handle in found if device.uuid}
        silent = [device.gpu_index for device, handle in found if not device.uuid]
        chosen = [by_uuid.get(uuid) or (_missing(uuid, silent, count), None) for uuid in uuids]
        found = [(_ranked(device, rank), handle) for rank, (device, handle) in enumerate(chosen)]
    if not found:
        pynvml.nvmlShutdown()
        return None
    return NvmlSource(pynvml, [device for device, _ in found], [handle for _, handle in found])


def _look(pynvml: Any, index: int) -> tuple[Device, Any]:
    """Return a GPU and its handle; without a handle when it does not answer."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return Device(gpu_index=index, gpu_name=f"GPU {index}", uuid=""), None
    try:
        total: float | None = pynvml.nvmlDeviceGetMemoryInfo(handle).total / MIB
    except pynvml.NVMLError as error:
        total = None
        handle = None if error.value in GONE else handle
    return Device(gpu_index=index, gpu_name=_text(name), uuid=_text(uuid), memory_total=total), handle


def _missing(uuid: str, silent: list[int], count: int) -> Device:
    """Return a GPU that was asked for and does not answer: at the first index that is silent, if there is one."""
    index = silent.pop(0) if silent else count
    return Device(gpu_index=index, gpu_name=f"GPU {index}", uuid=uuid)


def _ranked(device: Device, rank: int) -> Device:
    return replace(device, rank=rank)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
