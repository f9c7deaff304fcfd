"""The expensive metrics of a GPU: means between two reads, and counters and states of its health.

Names, ids and layouts: NVML API reference, nvml.h.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kmatrix.gpu.devices import ExtraMetrics
from kmatrix.gpu.nvml.calls import FIELD, FIELD_TYPE, FIELD_VALUE, NOT_FOUND_FUNCTION, SUCCESS

KIB = 1024.0  # KiB/s of the driver -> MiB/s
TX, RX = 0, 1  # nvmlPcieUtilCounter_t
UNCORRECTED, VOLATILE = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
ALL_LINKS = 0xFFFFFFFF  # scope of a field of NVLink: the sum over all links
FIELDS = MEMORY_TEMPERATURE, NVLINK_TX, NVLINK_RX = 82, 138, 139  # NVML_FI_DEV_*
INT, UNSIGNED_LONG, SIGNED_LONG = (1, 5), (2, 3), (4,)  # nvmlValueType_t, by the format that reads it
# nvmlGpmMetricId_t, Hopper and newer. The first three are percentages.
PERCENTAGES = {2: "sm_active", 5: "tensor_active", 10: "dram_active"}
GPM = {**PERCENTAGES, 20: "pcie_tx", 21: "pcie_rx", 60: "nvlink_rx", 61: "nvlink_tx"}  # the others: MiB/s
XID_EVENT = 8  # nvmlEventTypeXidCriticalError
MOST_EVENTS = 1000  # at a time: a driver that repeats one for ever must not block the reader


class ExtraMetricsReader:
    """Reads the expensive metrics of one GPU."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._library, self.handle = pynvml.nvmlLib, handle
        self._gpm = GpmReader.open(pynvml, handle)
        self._traffic: dict[int, tuple[float, int]] = {}  # field of NVLink -> monotonic s and KiB of the last read

    def read(self, xids: ExtraMetrics) -> ExtraMetrics:
        """Return the metrics, None for unknown ones. xids: those of XID errors."""
        means = self._gpm.read() if self._gpm else {}
        fields = self._fields()
        means |= {name: rate for name, rate in self._nvlink(fields).items() if name not in means}
        return ExtraMetrics(
            fan=_float(self._call("nvmlDeviceGetFanSpeed", ctypes.c_uint())),
            memory_temperature=_float(fields.get(MEMORY_TEMPERATURE)),
            ecc_uncorrected=self._call("nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong(), UNCORRECTED, VOLATILE),
            xid=xids.xid,
            xids=xids.xids,
            xid_counts=xids.xid_counts,
            **self._pcie(means),
            **{name: value for name, value in means.items() if not name.startswith("pcie")},
        )

    def close(self) -> None:
        if self._gpm:
            self._gpm.close()

    def _pcie(self, means: Mapping[str, float]) -> dict[str, float | None]:
        """Return the traffic over PCIe, in MiB/s."""
        if "pcie_tx" in means or (self._gpm and self._gpm.is_first):
            return {name: means.get(name) for name in ("pcie_tx", "pcie_rx")}
        # Before Hopper: the driver counts for 20 ms during each of these calls.
        sent, received = (self._call("nvmlDeviceGetPcieThroughput", ctypes.c_uint(), way) for way in (TX, RX))
        return {
            "pcie_tx": None if sent is None else sent / KIB,
            "pcie_rx": None if received is None else received / KIB,
        }

    def _nvlink(self, fields: Mapping[int, int]) -> dict[str, float]:
        """Return the traffic over all NVLinks since the previous read, in MiB/s, from counters of KiB."""
        found, now = {}, time.monotonic()
        for field, name in ((NVLINK_TX, "nvlink_tx"), (NVLINK_RX, "nvlink_rx")):
            if field not in fields:
                self._traffic.pop(field, None)
                continue
            before, self._traffic[field] = self._traffic.get(field), (now, fields[field])
            if before and now > before[0] and fields[field] >= before[1]:  # a lower value: the driver was reloaded
                found[name] = (fields[field] - before[1]) / KIB / (now - before[0])
        return found

    def _fields(self) -> dict[int, int]:
        """Return the known values of FIELDS."""
        function = getattr(self._library, "nvmlDeviceGetFieldValues", None)
        if function is None:
            return {}
        scope = dict.fromkeys((NVLINK_TX, NVLINK_RX), ALL_LINKS)
        template = b"".join(FIELD.pack(field, scope.get(field, 0), 0, 0, 0, 0, 0) for field in FIELDS)
        buffer = ctypes.create_string_buffer(template, len(template))
        if function(self.handle, len(FIELDS), ctypes.byref(buffer)) != SUCCESS:
            return {}
        found = {}
        for at, field in enumerate(FIELDS):
            kind, code = struct.unpack_from("<ii", buffer, at * FIELD.size + FIELD_TYPE)
            form = "<I" if kind in INT else "<q" if kind in SIGNED_LONG else "<Q" if kind in UNSIGNED_LONG else ""
            if code == SUCCESS and form:
                found[field] = int(struct.unpack_from(form, buffer, at * FIELD.size + FIELD_VALUE)[0])
        return found

    def _call(self, name: str, result: Any, *arguments: int) -> int | None:
        """Return the result of a function, or None if it fails or does not exist."""
        function = getattr(self._library, name, None)
        code = NOT_FOUND_FUNCTION if function is None else function(self.handle, *arguments, ctypes.byref(result))
        return int(result.value) if code == SUCCESS else None


class GpmReader:
    """GPU performance monitoring (GPM): means between two samples. Source: NVML API reference, GPM functions."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml, self._handle = pynvml, handle
        self._now, self._before = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._taken = 0  # number of samples

    @classmethod
    def open(cls, pynvml: Any, handle: Any) -> GpmReader | None:
        """Return a reader for a GPU with GPM (Hopper and newer), None for other GPUs or an older library."""
        try:
            if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return None
            return cls(pynvml, handle)
        except (pynvml.NVMLError, AttributeError):  # AttributeError: an old nvidia-ml-py
            return None

    @property
    def is_first(self) -> bool:
        """True if there is one sample, so that there is no mean yet."""
        return self._taken == 1

    def read(self) -> dict[str, float]:
        """Return means since the previous call, empty for the first call or if the GPU does not answer."""
        pynvml = self._pynvml
        self._now, self._before = self._before, self._now  # two buffers in turn: the oldest is overwritten
        try:
            pynvml.nvmlGpmSampleGet(self._handle, self._now)
            self._taken += 1
            if self._taken < 2:
                return {}
            request = pynvml.c_nvmlGpmMetricsGet_t()
            request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
            request.sample1, request.sample2 = self._before, self._now
            for at, metric in enumerate(GPM):
                request.metrics[at].metricId = metric
            pynvml.nvmlGpmMetricsGet(request)
        except pynvml.NVMLError:
            self._taken = 0  # the older sample may be from before the GPU was lost
            return {}
        found = {}
        for at, (metric, name) in enumerate(GPM.items()):
            answer = request.metrics[at]
            if answer.nvmlReturn == SUCCESS and 0 <= answer.value <= (100 if metric in PERCENTAGES else float("inf")):
                found[name] = float(answer.value)
        return found

    def close(self) -> None:
        """Free both samples."""
        for sample in (self._now, self._before):
            try:
                self._pynvml.nvmlGpmSampleFree(sample)
            except self._pynvml.NVMLError:
                return


class XidReader:
    """The XID errors of all GPUs since it was opened: what the driver writes into the log of the kernel."""

    def __init__(self, pynvml: Any, handles: Sequence[Any]) -> None:
        self._pynvml, self._events = pynvml, None
        self._found: dict[int, dict[int, int]] = {}  # address of a handle -> code -> errors, the newest code last
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except (pynvml.NVMLError, AttributeError):
            return
        for handle in handles:
            self.watch(handle)

    def watch(self, handle: Any) -> None:
        """Listen to a GPU, also to one that was opened again."""
        if handle is None or self._events is None:
            return
        try:
            self._pynvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._events)
        except self._pynvml.NVMLError:  # some virtual machines and older GPUs have no events
            return
        self._found.setdefault(_address(handle), {})

    def read(self, handle: Any) -> ExtraMetrics:
        """Return the XID errors of a GPU, also of a lost one; unknown if it has no events."""
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            try:
                event = self._pynvml.nvmlEventSetWait_v2(self._events, 0)
            except self._pynvml.NVMLError:  # no further event, or a lost GPU
                break
            if event.eventType == XID_EVENT:
                counts, code = self._found.setdefault(_address(event.device), {}), int(event.eventData)
                counts[code] = counts.pop(code, 0) + 1
        found = self._found.get(_address(handle))
        if found is None:
            return ExtraMetrics()
        return ExtraMetrics(xid=next(reversed(found), 0), xids=sum(found.values()), xid_counts=dict(found))

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            try:
                self._pynvml.nvmlEventSetFree(events)
            except self._pynvml.NVMLError:
                return


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
