"""What NVIDIA's GPUs say that costs more: fan, PCIe, memory errors, and how busy their units are (GPM)."""

from __future__ import annotations

import ctypes
from typing import Any

from kmatrix.gpu.nvml.bound import NOT_FOUND_FUNCTION, SUCCESS
from kmatrix.gpu.source import Extra

KIB = 1024.0  # KB/s of the driver -> MiB/s
TX, RX = 0, 1  # nvmlPcieUtilCounter_t
CORRECTED, UNCORRECTED, VOLATILE = 0, 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
GPM = {2: "sm_active", 3: "sm_occupancy", 5: "tensor_active", 10: "dram_active"}  # nvmlGpmMetricId_t


class Extras:
    """Asks one GPU. PCIe: the driver counts for 20 ms at each call, so this is never asked between two samples."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._library, self.handle = pynvml.nvmlLib, handle
        self._gpm = Gpm.open(pynvml, handle)

    def read(self) -> Extra:
        """Return what the GPU says; None for what it does not."""
        fan = self._ask("nvmlDeviceGetFanSpeed", ctypes.c_uint())
        sent, received = (self._ask("nvmlDeviceGetPcieThroughput", ctypes.c_uint(), way) for way in (TX, RX))
        corrected, uncorrected = (
            self._ask("nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong(), kind, VOLATILE)
            for kind in (CORRECTED, UNCORRECTED)
        )
        busy = self._gpm.read() if self._gpm else {}
        return Extra(
            fan=None if fan is None else float(fan),
            pcie_tx=None if sent is None else sent / KIB,
            pcie_rx=None if received is None else received / KIB,
            ecc_corrected=corrected,
            ecc_uncorrected=uncorrected,
            **busy,
        )

    def close(self) -> None:
        if self._gpm:
            self._gpm.close()

    def _ask(self, name: str, result: Any, *arguments: int) -> int | None:
        """Return what a function with one result says; None where it fails, or is not there."""
        function = getattr(self._library, name, None)
        code = NOT_FOUND_FUNCTION if function is None else function(self.handle, *arguments, ctypes.byref(result))
        return int(result.value) if code == SUCCESS else None


class Gpm:
    """The performance metrics of one GPU: means between two samples, here between two looks."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self._pynvml, self._handle = pynvml, handle
        self._now, self._before = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._taken = 0  # samples

    @classmethod
    def open(cls, pynvml: Any, handle: Any) -> Gpm | None:
        """Return the metrics of a GPU that has them (Hopper and newer); None for any other, or an older library."""
        try:
            if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return None
            return cls(pynvml, handle)
        except (pynvml.NVMLError, AttributeError):
            return None

    def read(self) -> dict[str, float]:
        """Return means in percent since the look before; nothing at the first one, or of a GPU that does not answer."""
        pynvml = self._pynvml
        self._now, self._before = self._before, self._now
        try:
            pynvml.nvmlGpmSampleGet(self._handle, self._now)
            self._taken += 1
            if self._taken < 2:
                return {}
            asked = pynvml.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
            asked.sample1, asked.sample2 = self._before, self._now
            for at, metric in enumerate(GPM):
                asked.metrics[at].metricId = metric
            pynvml.nvmlGpmMetricsGet(asked)
        except pynvml.NVMLError:
            self._taken = 0
            return {}
        answers = [asked.metrics[at] for at in range(len(GPM))]
        return {
            name: float(answer.value)
            for name, answer in zip(GPM.values(), answers, strict=True)
            if answer.nvmlReturn == SUCCESS and 0 <= answer.value <= 100
        }

    def close(self) -> None:
        """Give the samples back."""
        for sample in (self._now, self._before):
            try:
                self._pynvml.nvmlGpmSampleFree(sample)
            except self._pynvml.NVMLError:
                return
