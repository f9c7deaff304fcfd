"""How near GPUs are to each other: behind one NVLink, below one PCIe switch, on one NUMA node. Asked of the driver."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

BRIDGED = 0  # NVLink, directly or through a switch of NVLinks
UNKNOWN = 6  # beyond every level
LINKS = 36  # that a GPU can have
GPU, SWITCH = 0, 2  # nvmlIntNvLinkDeviceType_t

Pair = frozenset[str]


def distances(uuids: Sequence[str]) -> dict[Pair, int]:
    """Return for each pair of GPUs how far they are from each other; {} where the driver says nothing of it.

    0: NVLink; 1: one board; 2: one PCIe switch; 3: several switches; 4: one host bridge; 5: one NUMA node;
    6: the link between processors, or not known. Levels: nvmlGpuTopologyLevel_t.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
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
        return BRIDGED
    try:
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[one], handles[other])
    except pynvml.NVMLError:
        return UNKNOWN
    return min(UNKNOWN, 1 + int(level) // 10)


def _peers(pynvml: Any, handle: Any, buses: Mapping[str, str]) -> frozenset[str]:
    """Return the GPUs behind the NVLinks of one; "" stands for a switch, behind which all others are that have it."""
    found = set()
    for link in range(LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            if kind == SWITCH:
                found.add("")
            elif kind == GPU:
                found.add(buses.get(_bus(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)), "elsewhere"))
        except pynvml.NVMLError:
            continue  # no such link
    return frozenset(found)


def _bus(info: Any) -> str:
    text = info.busId
    return (text.decode() if isinstance(text, bytes) else str(text)).lower()
