"""An NVML driver whose GPUs are scripted."""

from __future__ import annotations

from types import SimpleNamespace


class FakeNvml:
    """The part of pynvml that detection uses. A GPU given as an error code raises it on every call.

    init: the error code that nvmlInit raises.  mig: indices in MIG mode.
    """

    def __init__(self, gpus: list[tuple[str, str, int] | int], *, init: int | None = None, mig: tuple[int, ...] = ()):
        import pynvml

        self._gpus, self._init, self._mig, self.is_open = gpus, init, mig, False
        for name in (
            "NVMLError",
            "NVML_ERROR_LIBRARY_NOT_FOUND",
            "NVML_ERROR_DRIVER_NOT_LOADED",
            "NVML_DEVICE_MIG_ENABLE",
        ):
            setattr(self, name, getattr(pynvml, name))
        self._not_supported = pynvml.NVML_ERROR_NOT_SUPPORTED

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's names)
        if self._init is not None:
            raise self.NVMLError(self._init)  # type: ignore[attr-defined]
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.is_open
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if isinstance(self._gpus[index], int):
            raise self.NVMLError(self._gpus[index])  # type: ignore[attr-defined]
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return self._gpus[handle][0].encode()  # type: ignore[index]

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return self._gpus[handle][1]  # type: ignore[index]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self._gpus[handle][2] * 2**20)  # type: ignore[index]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if not self._mig:
            raise self.NVMLError(self._not_supported)  # type: ignore[attr-defined]
        return [int(handle in self._mig), 0]
