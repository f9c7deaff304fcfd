"""NVIDIA GPUs as a device source: open them, sample them, and recover lost ones."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kmatrix.gpu.devices import (
    COLUMN_INDEX,
    UNKNOWN,
    WIDTH,
    Device,
    DeviceLimits,
    DeviceProcess,
    ExtraMetrics,
    ProcessShare,
    snapshot,
)
from kmatrix.gpu.formats.events import THROTTLE
from kmatrix.gpu.formats.samples import Snapshot
from kmatrix.gpu.nvml.calls import (
    DRIVER_NOT_LOADED,
    GONE,
    NOT_FOUND_FUNCTION,
    NOT_SUPPORTED,
    SUCCESS,
    UNINITIALIZED,
    Call,
    CallBatch,
    bind,
)
from kmatrix.gpu.nvml.detect import MIB, decoded
from kmatrix.gpu.nvml.extras import ExtraMetricsReader, XidReader
from kmatrix.gpu.nvml.processes import processes_on, shares_on

RETRY_READS = 100  # call by call after a failed batch: a call that fails for good must not cost two reads per tick


class NvmlSource:
    """NVIDIA GPUs. A lost GPU keeps its position; its values are unknown until it answers again."""

    device_type: ClassVar[str] = "nvidia"

    def __init__(self, pynvml: Any, devices: Sequence[Device], handles: Sequence[Any]) -> None:
        self._pynvml = pynvml
        self.devices = tuple(devices)
        self._handles = list(handles)
        self._calls: list[list[Call] | None] = [
            None if handle is None else bind(pynvml.nvmlLib, handle) for handle in handles
        ]
        self._batch, self._single_reads = CallBatch(self._calls), 0
        self._codes = [SUCCESS] * len(self.devices)  # last error of each GPU
        self._extras: dict[int, ExtraMetricsReader] = {}
        self._xids: XidReader | None = None
        self._values = [UNKNOWN] * (WIDTH * len(self.devices))
        self._unknown = [UNKNOWN] * WIDTH

    @property
    def energy_source(self) -> str | None:
        """The source of energy values: `counter` of each GPU, or `power`, which is integrated."""
        columns = {name for calls in self._calls for call in calls or () for name in call.columns}
        return "counter" if "energy_j" in columns else "power" if "power" in columns else None

    def read(self, values: list[float]) -> None:
        # The batch cannot say which call failed, so a failure is followed by reads call by call.
        if self._single_reads:
            self._single_reads -= 1
        elif self._batch.read(values):
            return
        else:
            self._single_reads = RETRY_READS
        self._read_each(values)

    def _read_each(self, values: list[float]) -> None:
        """Read call by call. A failed call leaves its values unknown; a code in GONE marks the GPU as lost."""
        for position, calls in enumerate(self._calls):
            base = position * WIDTH
            values[base : base + WIDTH] = self._unknown
            for call in calls or ():
                code = call(values, base)
                if code != SUCCESS:
                    self._codes[position] = code
                if code in GONE:
                    values[base : base + WIDTH] = self._unknown
                    self._set_calls(position, None)
                    break

    def _set_calls(self, position: int, calls: list[Call] | None) -> None:
        """Replace the calls of a GPU (None: lost), and rebuild the batch."""
        self._calls[position] = calls
        self._batch, self._single_reads = CallBatch(self._calls), 0

    def read_timed(self, device: int) -> Mapping[str, tuple[float, float]]:
        values = [UNKNOWN] * WIDTH
        taken: dict[str, tuple[float, float]] = {}
        for call in self._calls[device] or ():
            begin = time.perf_counter()
            call(values, 0)
            seconds = time.perf_counter() - begin
            taken.update({name: (values[COLUMN_INDEX[name]], seconds) for name in call.columns})
        return taken

    def limits(self, device: int) -> DeviceLimits:
        if self._calls[device] is None:
            return DeviceLimits()
        limit, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        handle = self._handles[device]
        known = self._call("nvmlDeviceGetEnforcedPowerLimit", handle, ctypes.byref(limit)) == SUCCESS
        code = self._call("nvmlDeviceGetCurrentClocksEventReasons", handle, ctypes.byref(reasons))
        if code in (NOT_SUPPORTED, NOT_FOUND_FUNCTION):  # drivers before 535 only have the older name
            code = self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
        bits = reasons.value if code == SUCCESS else 0
        return DeviceLimits(
            power_limit=limit.value / 1000.0 if known else None,
            throttled=frozenset(reason for bit, reason in THROTTLE if bits & bit),
        )

    def extra_metrics(self, device: int) -> ExtraMetrics:
        handle, extras = self._handles[device], self._extras.get(device)
        if self._xids is None:
            self._xids = XidReader(self._pynvml, self._handles)
        xids = self._xids.read(handle)
        if self._calls[device] is None:
            return xids  # they say why it was lost
        if extras is None or extras.handle is not handle:  # a recovered GPU has a new handle
            extras = self._extras[device] = ExtraMetricsReader(self._pynvml, handle)
        return extras.read(xids)

    def processes(self, device: int) -> tuple[DeviceProcess, ...]:
        """Return the processes of a GPU. Expensive: milliseconds on some drivers."""
        if self._calls[device] is None:
            return ()
        return processes_on(self._pynvml.nvmlLib, self._handles[device])

    def process_shares(self, device: int) -> Mapping[int, ProcessShare]:
        if self._calls[device] is None:
            return {}
        return shares_on(self._pynvml.nvmlLib, self._handles[device])

    def opened(self, device: int) -> tuple[Any, Any]:
        """Return the library and the handle of a GPU for further queries, None for a GPU that does not answer."""
        return self._pynvml, None if self._calls[device] is None else self._handles[device]

    def is_lost(self, device: int) -> bool:
        return self._calls[device] is None

    def failure(self, device: int) -> str:
        code = self._codes[device]
        return "" if code == SUCCESS else str(self._pynvml.NVMLError(code))

    def recover(self, device: int) -> bool:
        """Open a lost GPU again, by UUID if known, because indices can change, and read its facts."""
        known = self.devices[device]
        try:
            if known.uuid:
                handle = self._pynvml.nvmlDeviceGetHandleByUUID(known.uuid)
            else:
                handle = self._pynvml.nvmlDeviceGetHandleByIndex(known.gpu_index)
            self._pynvml.nvmlDeviceGetMemoryInfo(handle)  # a handle alone does not prove that the GPU answers
            device_now = _with_facts(self._pynvml, handle, known)
        except self._pynvml.NVMLError as error:
            self._codes[device] = error.value
            if error.value in (UNINITIALIZED, DRIVER_NOT_LOADED):  # the driver was reloaded: the next try can succeed
                with contextlib.suppress(self._pynvml.NVMLError):
                    self._pynvml.nvmlInit()
            return False
        self.devices = (*self.devices[:device], device_now, *self.devices[device + 1 :])
        self._handles[device] = handle
        if self._xids is not None:
            self._xids.watch(handle)
        self._set_calls(device, bind(self._pynvml.nvmlLib, handle))
        return True

    def snapshot(self) -> Snapshot:
        """Return one sample of all GPUs."""
        self.read(self._values)
        slow = [self.limits(position) for position in range(len(self.devices))]
        return snapshot(self.devices, self._values, slow, time.time())

    def close(self) -> None:
        for extras in self._extras.values():
            extras.close()
        if self._xids is not None:
            self._xids.close()
        with contextlib.suppress(self._pynvml.NVMLError):  # the driver may have been unloaded
            self._pynvml.nvmlShutdown()

    def _call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._pynvml.nvmlLib, name, None)
        return NOT_FOUND_FUNCTION if function is None else int(function(*arguments))


def open_source(uuids: Sequence[str] = ()) -> NvmlSource | None:
    """Return a source for these GPUs in the order of ranks, or for all GPUs without ranks.

    None: no driver or no GPU. A GPU that does not answer is included as lost.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return None
    found = [_open(pynvml, index) for index in range(count)]
    if uuids:
        by_uuid = {device.uuid: (device, handle) for device, handle in found if device.uuid}
        # A GPU that does not answer does not report its UUID either: a requested one is probably among these.
        silent = [device.gpu_index for device, handle in found if not device.uuid]
        chosen = [by_uuid.get(uuid) or (_missing(uuid, silent, count), None) for uuid in uuids]
        found = [(_ranked(device, rank), handle) for rank, (device, handle) in enumerate(chosen)]
    if not found:
        pynvml.nvmlShutdown()
        return None
    return NvmlSource(pynvml, [device for device, _ in found], [handle for _, handle in found])


def _open(pynvml: Any, index: int) -> tuple[Device, Any]:
    """Return a GPU and its handle, None if it does not answer."""
    device = Device(gpu_index=index, gpu_name=f"GPU {index}", uuid="")
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        device = _with_facts(pynvml, handle, device)
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        # It has facts if only its memory is unknown.
        return device, None if not device.uuid or error.value in GONE else handle
    return device, handle


def _with_facts(pynvml: Any, handle: Any, device: Device) -> Device:
    """Return a GPU with its name, UUID and memory. Raises NVMLError if it has no name or UUID."""
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    total = device.memory_total
    with contextlib.suppress(pynvml.NVMLError):
        total = pynvml.nvmlDeviceGetMemoryInfo(handle).total / MIB
    return replace(device, gpu_name=decoded(name), uuid=decoded(uuid), memory_total=total)


def _missing(uuid: str, silent: list[int], count: int) -> Device:
    """Return a requested GPU that does not answer, at the first index without an answer."""
    index = silent.pop(0) if silent else count  # count: an index that no GPU has
    return Device(gpu_index=index, gpu_name=f"GPU {index}", uuid=uuid)


def _ranked(device: Device, rank: int) -> Device:
    return replace(device, rank=rank)
