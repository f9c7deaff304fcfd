"""What NVIDIA's GPUs do, read fast: the calls of each GPU are bound once, with the memory that they fill.

The client library's own functions make a new array type for each call of field values, which costs ten times
the call; here only its loader, its constants and its handles are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kmatrix.gpu.formats import Snapshot
from kmatrix.gpu.nvml.detect import MIB
from kmatrix.gpu.source import AT, UNKNOWN, WIDTH, Device, Process, Slow, snapshot

SUCCESS, UNINITIALIZED, NOT_SUPPORTED, NOT_FOUND_FUNCTION = 0, 1, 3, 13
GONE = frozenset(
    {UNINITIALIZED, 15, 16, 28}
)  # uninitialized, lost, needs a reset, not found: the GPU answers nothing any more
POWER_INSTANT, POWER_AVERAGE, ENERGY = 186, 185, 83  # NVML's field ids
SM_CLOCK = 1
FIELD = struct.Struct("<IIqqiiQ")  # nvmlFieldValue_t: id, scope, timestamp, latency, type, return, value
UNSIGNED_32 = 1  # nvmlValueType_t
MEMORY_V2 = struct.Struct("<I4xQQQQ")  # nvmlMemory_v2_t: version, total, reserved, free, used
PROCESS = struct.Struct("<I4xQII")  # nvmlProcessInfo_v2_t: pid, bytes, GPU instance, compute instance
NO_MEMORY_VALUE = 2**64 - 1  # the driver does not say how much
THROTTLE = (  # nvmlClocksEventReasons: those that hold the clocks below what is asked for
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x20, "heat (software)"),
    (0x40, "heat (hardware)"),
    (0x80, "power brake"),
)
Call = Callable[[list[float], int], int]  # fills in its columns from the given position on; returns NVML's code


class _Bound:
    """The calls of one GPU. Each entry of `calls`: the columns that it fills, and the call.

    Which calls there are is tried out once: what is not supported is not asked again.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        tried = [self._utilization(), self._memory(), self._temperature(), self._clock(), *self._power_and_energy()]
        self.calls: list[tuple[tuple[str, ...], Call]] = [call for call in tried if call is not None]

    def _works(self, call: Call) -> bool:
        return call([UNKNOWN] * WIDTH, 0) not in (NOT_SUPPORTED, NOT_FOUND_FUNCTION)

    def _function(self, name: str) -> Any:
        """Return a function of the driver's library, or one that answers that it is not there."""
        return getattr(self._library, name, lambda *_arguments: NOT_FOUND_FUNCTION)

    def _utilization(self) -> tuple[tuple[str, ...], Call] | None:
        function, handle = self._function("nvmlDeviceGetUtilizationRates"), self._handle
        rates = (ctypes.c_uint * 2)()
        where, at = ctypes.byref(rates), AT["utilization"]

        def call(values: list[float], base: int) -> int:
            code: int = function(handle, where)
            values[base + at] = rates[0] if code == SUCCESS else UNKNOWN
            return code

        return (("utilization",), call) if self._works(call) else None

    def _memory(self) -> tuple[tuple[str, ...], Call] | None:
        """Used memory as nvidia-smi shows it (without what the driver reserves), where the driver tells them apart."""
        handle, at = self._handle, AT["memory_used"]
        second = ctypes.create_string_buffer(MEMORY_V2.size)
        MEMORY_V2.pack_into(second, 0, MEMORY_V2.size | 2 << 24, 0, 0, 0, 0)
        for name, buffer, used in (
            ("nvmlDeviceGetMemoryInfo_v2", second, 32),
            ("nvmlDeviceGetMemoryInfo", ctypes.create_string_buffer(24), 16),
        ):
            call = _counter(self._function(name), (handle, ctypes.byref(buffer)), buffer, offset=used, at=at, scale=MIB)
            if call([UNKNOWN] * WIDTH, 0) not in (NOT_SUPPORTED, NOT_FOUND_FUNCTION, 25):  # 25: another version
                return ("memory_used",), call
        return None

    def _temperature(self) -> tuple[tuple[str, ...], Call] | None:
        call = self._single("nvmlDeviceGetTemperature", "temperature", 1.0, 0)
        if self._works(call):
            return ("temperature",), call
        function, handle, at = self._function("nvmlDeviceGetTemperatureV"), self._handle, AT["temperature"]
        record = (ctypes.c_int * 3)(12 | 1 << 24, 0, 0)  # nvmlTemperature_v1_t: version, sensor, degrees
        where = ctypes.byref(record)

        def versioned(values: list[float], base: int) -> int:
            code: int = function(handle, where)
            values[base + at] = record[2] if code == SUCCESS else UNKNOWN
            return code

        return (("temperature",), versioned) if self._works(versioned) else None

    def _clock(self) -> tuple[tuple[str, ...], Call] | None:
        call = self._single("nvmlDeviceGetClockInfo", "sm_clock", 1.0, SM_CLOCK)
        return (("sm_clock",), call) if self._works(call) else None

    def _power_and_energy(self) -> list[tuple[tuple[str, ...], Call]]:
        """Average and instant power and the energy counter in one call, each by its own call where that fails."""
        fields = {POWER_INSTANT: "power_instant", POWER_AVERAGE: "power", ENERGY: "energy_j"}
        supported = self._supported_fields(list(fields))
        calls: list[tuple[tuple[str, ...], Call]] = []
        if supported:
            calls.append((tuple(fields[field] for field in supported), self._fields(supported, fields)))
        if POWER_AVERAGE not in supported:
            call = self._single("nvmlDeviceGetPowerUsage", "power", 1000.0)
            calls += [(("power",), call)] if self._works(call) else []
        if ENERGY not in supported:
            buffer = ctypes.create_string_buffer(8)
            function = self._function("nvmlDeviceGetTotalEnergyConsumption")
            arguments = (self._handle, ctypes.byref(buffer))
            call = _counter(function, arguments, buffer, offset=0, at=AT["energy_j"], scale=1000.0)
            calls += [(("energy_j",), call)] if self._works(call) else []
        return calls

    def _single(self, name: str, column: str, scale: float, *arguments: int) -> Call:
        """Return the call of a function with one unsigned result."""
        function, handle, at = self._function(name), self._handle, AT[column]
        result = ctypes.c_uint()
        where = ctypes.byref(result)

        def call(values: list[float], base: int) -> int:
            code: int = function(handle, *arguments, where)
            values[base + at] = result.value / scale if code == SUCCESS else UNKNOWN
            return code

        return call

    def _supported_fields(self, fields: list[int]) -> list[int]:
        buffer = _field_buffer(fields)
        function = self._function("nvmlDeviceGetFieldValues")
        if function(self._handle, len(fields), ctypes.byref(buffer)) != SUCCESS:
            return []
        answers = [FIELD.unpack_from(buffer, at * FIELD.size) for at in range(len(fields))]
        return [field for field, answer in zip(fields, answers, strict=True) if answer[5] == SUCCESS]

    def _fields(self, fields: list[int], names: Mapping[int, str]) -> Call:
        function, handle, count = self._function("nvmlDeviceGetFieldValues"), self._handle, len(fields)
        buffer = _field_buffer(fields)
        where = ctypes.byref(buffer)
        places = tuple((at * FIELD.size, AT[names[field]]) for at, field in enumerate(fields))
        unpack = FIELD.unpack_from

        def call(values: list[float], base: int) -> int:
            code: int = function(handle, count, where)
            for offset, at in places:
                _, _, _, _, kind, own, raw = unpack(buffer, offset)
                if code == SUCCESS and own == SUCCESS:
                    values[base + at] = (raw & 0xFFFFFFFF if kind == UNSIGNED_32 else raw) / 1000.0
                else:
                    values[base + at] = UNKNOWN
                    code = own if own in GONE else code
            return code

        return call


class NvmlSource:
    """NVIDIA's GPUs. A GPU that is lost keeps its place, and nothing is known of it until it answers again."""

    device_type: ClassVar[str] = "nvidia"

    def __init__(self, pynvml: Any, devices: Sequence[Device], handles: Sequence[Any]) -> None:
        self._pynvml = pynvml
        self.devices = tuple(devices)
        self._handles = list(handles)
        self._bound: list[_Bound | None] = [None if handle is None else self._bind(handle) for handle in handles]
        self._values = [UNKNOWN] * (WIDTH * len(self.devices))
        self._nothing = [UNKNOWN] * WIDTH

    @property
    def energy_source(self) -> str | None:
        """counter: each GPU counts its joules.  power: they are summed up from its power."""
        columns = {name for bound in self._bound if bound for names, _ in bound.calls for name in names}
        return "counter" if "energy_j" in columns else "power" if "power" in columns else None

    def read(self, values: list[float]) -> None:
        for position, bound in enumerate(self._bound):
            base = position * WIDTH
            values[base : base + WIDTH] = self._nothing
            if bound is None:
                continue
            for _, call in bound.calls:
                if call(values, base) in GONE:
                    values[base : base + WIDTH] = self._nothing
                    self._bound[position] = None
                    break

    def timed(self, device: int) -> Mapping[str, tuple[float, float]]:
        bound, values = self._bound[device], [UNKNOWN] * WIDTH
        taken: dict[str, tuple[float, float]] = {}
        for names, call in bound.calls if bound else ():
            begin = time.perf_counter()
            call(values, 0)
            seconds = time.perf_counter() - begin
            taken.update({name: (values[AT[name]], seconds) for name in names})
        return taken

    def slow(self, device: int) -> Slow:
        if self._bound[device] is None:
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

    def processes(self, device: int) -> tuple[Process, ...]:
        """Return the processes that compute on a GPU. Expensive: milliseconds on some drivers."""
        if self._bound[device] is None:
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
        return self._bound[device] is None

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
        self._handles[device], self._bound[device] = handle, self._bind(handle)
        return True

    def host_joules(self) -> float | None:
        return None  # each GPU has its own

    def snapshot(self) -> Snapshot:
        """Read everything once, for a screen."""
        self.read(self._values)
        slow = [self.slow(position) for position in range(len(self.devices))]
        return snapshot(self.devices, self._values, slow, time.time())

    def close(self) -> None:
        with contextlib.suppress(self._pynvml.NVMLError):  # the driver can go away meanwhile
            self._pynvml.nvmlShutdown()

    def _bind(self, handle: Any) -> _Bound:
        return _Bound(self._pynvml.nvmlLib, handle)

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


def _field_buffer(fields: Sequence[int]) -> ctypes.Array[ctypes.c_char]:
    buffer = ctypes.create_string_buffer(FIELD.size * len(fields))
    for at, field in enumerate(fields):
        FIELD.pack_into(buffer, at * FIELD.size, field, 0, 0, 0, 0, 0, 0)
    return buffer


def _counter(function: Any, arguments: tuple[Any, ...], buffer: Any, *, offset: int, at: int, scale: float) -> Call:
    """Return the call of a function that fills a record; the result is 8 bytes at `offset` of it."""
    unpack = struct.Struct("<Q").unpack_from

    def call(values: list[float], base: int) -> int:
        code: int = function(*arguments)
        values[base + at] = unpack(buffer, offset)[0] / scale if code == SUCCESS else UNKNOWN
        return code

    return call


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
