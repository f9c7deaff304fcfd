"""Which GPUs there are, asked of the driver (NVML), and which of them may be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kmatrix.errors import LaunchError

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. index: NVML's, never CUDA's.  memory_total: MiB."""

    index: int
    name: str
    uuid: str
    memory_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """The GPUs that can be used, in NVML's order, and a sentence for each that cannot."""

    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()


def detect() -> Detected:
    """Ask the driver. No driver or no GPU is an empty answer, never an error."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Detected(notes=() if error.value in absent else (f"the NVIDIA driver does not answer: {error}",))
    try:
        count = pynvml.nvmlDeviceGetCount()
        found = [_describe(pynvml, index) for index in range(count)]
    except pynvml.NVMLError as error:
        return Detected(notes=(f"the NVIDIA driver does not answer: {error}",))
    finally:
        pynvml.nvmlShutdown()
    return Detected(
        gpus=tuple(gpu for gpu in found if isinstance(gpu, Gpu)),
        notes=tuple(note for note in found if isinstance(note, str)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """version: of the driver, None where it does not say.  cuda: the newest CUDA that it can run, as "12.4".

    free_mib: UUID -> MiB of memory that nobody holds.
    """

    version: str | None
    cuda: str | None
    free_mib: Mapping[str, int]


def state(gpus: Sequence[Gpu]) -> State:
    """Ask the driver for its versions and for the free memory of GPUs; what it does not say is left out."""
    import pynvml

    free: dict[str, int] = {}
    version = cuda = None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return State(version=None, cuda=None, free_mib={})
    try:
        version = str(pynvml.nvmlSystemGetDriverVersion())
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040 is 12.4
        cuda = f"{number // 1000}.{number % 1000 // 10}"
        for gpu in gpus:
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            free[gpu.uuid] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) // MIB
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()
    return State(version=version, cuda=cuda, free_mib=free)


def usable(detected: Detected, *, visible: str | None, asked: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs within both bounds, in the order in which they were named.

    visible: CUDA_VISIBLE_DEVICES (None: not set, "": no GPU, -1 ends the list).  asked: GPUS= on the command line.
    Both name GPUs by NVML's index or by UUID, whole or its beginning. Raises LaunchError for one that is not known.
    """
    gpus = detected.gpus
    if visible is not None and gpus:  # without GPUs the variable bounds nothing: a run on the CPU goes on
        gpus = _named("CUDA_VISIBLE_DEVICES", visible, gpus)
    if asked is not None and asked.strip():
        gpus = _named("GPUS", asked, gpus)
    return gpus


def _describe(pynvml: Any, index: int) -> Gpu | str:
    """Return one GPU, or why it cannot be used."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu = Gpu(
            index=index,
            name=_text(pynvml.nvmlDeviceGetName(handle)),
            uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
            memory_total=pynvml.nvmlDeviceGetMemoryInfo(handle).total // MIB,
        )
    except pynvml.NVMLError as error:
        return f"GPU {index} is left out: {error}"
    if _is_split(pynvml, handle):
        return f"GPU {index} ({gpu.name}) is left out: it is in MIG mode, and slices of a GPU are not supported"
    return gpu


def _is_split(pynvml: Any, handle: Any) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return False  # a GPU without MIG answers "not supported"
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _named(where: str, text: str, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Resolve a comma list against these GPUs."""
    chosen: list[Gpu] = []
    for item in (part.strip() for part in text.split(",")):
        if item == "-1" or not text.strip():
            break
        gpu = _find(where, item, gpus)
        if gpu in chosen:
            raise LaunchError(
                f"{where}={text} names GPU {gpu.index} twice",
                why="a rank needs a GPU of its own",
                fix=f"name each once: {_list(gpus)}",
            )
        chosen.append(gpu)
    return tuple(chosen)


def _find(where: str, item: str, gpus: Sequence[Gpu]) -> Gpu:
    if item.startswith("MIG-"):
        raise LaunchError(
            f"{where} names {item}",
            why="slices of a GPU (MIG) are not supported",
            fix=f"name whole GPUs: {_list(gpus)}",
        )
    by_uuid = [gpu for gpu in gpus if item.startswith("GPU-") and gpu.uuid.startswith(item)]
    by_index = [gpu for gpu in gpus if item.isdecimal() and gpu.index == int(item)]
    found = by_uuid or by_index
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise LaunchError(
            f"{where} names {item}",
            why=f"{len(found)} GPUs begin so",
            fix=f"give more of the UUID: {', '.join(gpu.uuid for gpu in found)}",
        )
    raise LaunchError(
        f"{where} names {item or 'nothing'!s}, which is no GPU that can be used here",
        why=f"the GPUs are: {_list(gpus)}" if gpus else "there is no GPU that can be used",
        fix=f"name GPUs by index or UUID: {where}={','.join(str(gpu.index) for gpu in gpus)}"
        if gpus
        else f"leave {where} out, or run on the CPU: DEVICE=cpu",
    )


def _list(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in gpus)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
