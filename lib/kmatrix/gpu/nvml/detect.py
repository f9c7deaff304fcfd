"""Detect GPUs through NVML: which exist, which may be used, which are busy, and how they are connected."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.errors import LaunchError
from kmatrix.text import first_names, memory_size

MIB = 2**20
PROC = Path("/proc")
MAX_NAMES = 3  # processes listed in a message
NVLINK_DISTANCE = 0  # NVLink, directly or through an NVSwitch
UNKNOWN_DISTANCE = 6  # larger than every known distance
MAX_LINKS = 36  # NVLinks of a GPU
GPU, SWITCH = 0, 2  # nvmlIntNvLinkDeviceType_t
Pair = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int  # NVML's index, not CUDA's
    name: str
    uuid: str
    memory_total: int  # MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """The result of the detection."""

    gpus: tuple[Gpu, ...] = ()  # usable GPUs in NVML's order
    notes: tuple[str, ...] = ()  # one message per GPU that cannot be used, or about the driver


def detect() -> Detected:
    """Detect the GPUs of this machine. Without a driver or a GPU the result is empty."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # A machine without NVIDIA GPUs is not worth a note; a driver that is installed and fails is.
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Detected(notes=() if error.value in absent else (f"the NVIDIA driver does not respond: {error}",))
    try:
        count = pynvml.nvmlDeviceGetCount()
        found = [_describe(pynvml, index) for index in range(count)]
    except pynvml.NVMLError as error:
        return Detected(notes=(f"the NVIDIA driver does not respond: {error}",))
    finally:
        pynvml.nvmlShutdown()
    return Detected(
        gpus=tuple(gpu for gpu in found if isinstance(gpu, Gpu)),
        notes=tuple(note for note in found if isinstance(note, str)),
    )


def driver_problem() -> str:
    """Return why the driver cannot be used, also if that is normal on a machine without GPUs; empty if it can."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"the NVIDIA driver does not respond: {error}"
    pynvml.nvmlShutdown()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    """Versions of the driver, and free GPU memory. None: unknown."""

    version: str | None  # of the driver
    cuda: str | None  # the newest CUDA version that the driver supports, for example "12.4"
    free_mib: Mapping[str, int]  # UUID -> MiB


def driver_state(gpus: Sequence[Gpu]) -> DriverState:
    """Query the driver for its versions and the free memory of GPUs. Unknown values are omitted."""
    import pynvml

    free: dict[str, int] = {}
    version = cuda = None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return DriverState(version=None, cuda=None, free_mib={})
    try:
        version = str(pynvml.nvmlSystemGetDriverVersion())
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040: CUDA 12.4
        cuda = f"{number // 1000}.{number % 1000 // 10}"
        for gpu in gpus:
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            free[gpu.uuid] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) // MIB
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()
    return DriverState(version=version, cuda=cuda, free_mib=free)


def usable(detected: Detected, *, visible: str | None, asked: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs selected by both lists, in the order of the last one.

    `visible`: CUDA_VISIBLE_DEVICES (None: not set, "": no GPU, -1 ends the list). `asked`: GPUS= of the command line.
    Both identify GPUs by NVML's index or by a prefix of the UUID. Raises LaunchError for an unknown GPU.
    """
    gpus = detected.gpus
    if visible is not None and gpus:  # without GPUs, the variable must not stop a run on the CPU
        gpus = _named("CUDA_VISIBLE_DEVICES", visible, gpus)
    if asked is not None and asked.strip():
        gpus = _named("GPUS", asked, gpus)
    return gpus


def _describe(pynvml: Any, index: int) -> Gpu | str:
    """Return one GPU, or a message why it cannot be used."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu = Gpu(
            index=index,
            name=decoded(pynvml.nvmlDeviceGetName(handle)),
            uuid=decoded(pynvml.nvmlDeviceGetUUID(handle)),
            memory_total=pynvml.nvmlDeviceGetMemoryInfo(handle).total // MIB,
        )
    except pynvml.NVMLError as error:
        return f"GPU {index} is ignored: {error}"
    if _is_split(pynvml, handle):
        return f"GPU {index} ({gpu.name}) is ignored: MIG mode is not supported"
    return gpu


def _is_split(pynvml: Any, handle: Any) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:
        return False  # "not supported": a GPU without MIG
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _named(where: str, text: str, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Resolve a comma list against these GPUs."""
    chosen: list[Gpu] = []
    for item in (part.strip() for part in text.split(",")):
        # CUDA ignores everything after the first invalid index, and -1 is the usual way to hide all GPUs.
        if item == "-1" or not text.strip():
            break
        gpu = _find(where, item, gpus)
        if gpu in chosen:
            raise LaunchError(
                f"{where}={text} names GPU {gpu.index} twice",
                why="each rank needs its own GPU",
                hint=f"list each GPU once: {_list(gpus)}",
            )
        chosen.append(gpu)
    return tuple(chosen)


def _find(where: str, item: str, gpus: Sequence[Gpu]) -> Gpu:
    if item.startswith("MIG-"):
        raise LaunchError(
            f"{where} names {item}",
            why="MIG instances are not supported",
            hint=f"list whole GPUs: {_list(gpus)}",
        )
    # CUDA_VISIBLE_DEVICES allows any unique prefix of a UUID.
    by_uuid = [gpu for gpu in gpus if item.startswith("GPU-") and gpu.uuid.startswith(item)]
    by_index = [gpu for gpu in gpus if item.isdecimal() and gpu.index == int(item)]
    found = by_uuid or by_index
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise LaunchError(
            f"{where} names {item}",
            why=f"{len(found)} GPUs match this prefix",
            hint=f"use a longer prefix of the UUID: {', '.join(gpu.uuid for gpu in found)}",
        )
    raise LaunchError(
        f"{where} names {item or 'nothing'!s}, which is not a usable GPU",
        why=f"the usable GPUs are {_list(gpus)}" if gpus else "this machine has no usable GPU",
        hint=f"select GPUs by index or UUID: {where}={','.join(str(gpu.index) for gpu in gpus)}"
        if gpus
        else f"unset {where}, or run on the CPU: DEVICE=cpu",
    )


def _list(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in gpus)


def decoded(value: str | bytes) -> str:
    """Return a text of the driver: older versions of nvidia-ml-py return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def occupied(uuids: Sequence[str], most_mib: int) -> dict[str, str]:
    """Return UUID -> message for each GPU with more than `most_mib` MiB in use, or without a response.

    All memory in use counts, because in a container the driver does not list processes of other containers.
    Without a driver the result is empty.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        found = {uuid: _usage(pynvml, uuid, most_mib) for uuid in uuids}
    finally:
        pynvml.nvmlShutdown()
    return {uuid: why for uuid, why in found.items() if why}


def _usage(pynvml: Any, uuid: str, most_mib: int) -> str:
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        used = _used_mib(pynvml, handle)
        if used <= most_mib:
            return ""
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)  # only if needed: it is the slowest call
    except pynvml.NVMLError as error:
        return f"no response: {error}"
    names = (f"{_name(process.pid)} (pid {process.pid})" for process in processes)
    holders = first_names(names, MAX_NAMES) or "processes that are not visible here"
    return f"{memory_size(used * MIB)} used by {holders}"


def _used_mib(pynvml: Any, handle: Any) -> float:
    """Return the memory in use in MiB, without the driver's own reservation if the driver reports it."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return float(memory.used) / MIB


def _name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"


def distances(uuids: Sequence[str]) -> dict[Pair, int]:
    """Return the distance of each pair of GPUs, empty if the driver does not report the topology.

    0: NVLink; 1: same board; 2: one PCIe switch; 3: several switches; 4: same host bridge; 5: same NUMA node;
    6: different sockets, or unknown. Source: nvmlGpuTopologyLevel_t in the NVML API reference.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
        # NVLink names its peers by PCI bus, everything else by UUID.
        buses = {_bus(pynvml.nvmlDeviceGetPciInfo(handle)): uuid for uuid, handle in handles.items()}
        peers = {uuid: _peers(pynvml, handle, buses) for uuid, handle in handles.items()}
        return {frozenset(pair): _distance(pynvml, pair, handles, peers) for pair in itertools.combinations(uuids, 2)}
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def _distance(
    pynvml: Any, pair: tuple[str, str], handles: Mapping[str, Any], peers: Mapping[str, frozenset[str]]
) -> int:
    one, other = pair
    if other in peers[one] or one in peers[other] or {""} <= peers[one] & peers[other]:
        return NVLINK_DISTANCE
    try:
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[one], handles[other])
    except pynvml.NVMLError:  # not supported on this system
        return UNKNOWN_DISTANCE
    return min(UNKNOWN_DISTANCE, 1 + int(level) // 10)  # the driver's levels are 0, 10, 20, ... 50


def _peers(pynvml: Any, handle: Any, buses: Mapping[str, str]) -> frozenset[str]:
    """Return the UUIDs of the GPUs that one is linked to. "" stands for an NVSwitch, which links all GPUs at it."""
    found = set()
    for link in range(MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            if kind == SWITCH:
                found.add("")
            elif kind == GPU:
                found.add(buses.get(_bus(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)), "elsewhere"))
        except pynvml.NVMLError:
            continue  # this link does not exist
    return frozenset(found)


def _bus(info: Any) -> str:
    return decoded(info.busId).lower()
