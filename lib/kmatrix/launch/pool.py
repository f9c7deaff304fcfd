"""The GPUs that the runs of a matrix may get: which are left out and why, and which a run is given.

A GPU is left out for good when it was lost (quarantined: the driver, or a reboot, may bring it back, and the next
runner asks anew), and for as long as others hold memory of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kmatrix.gpu.nvml import Gpu
from kmatrix.packing import Distance, place

LOOK_S = 2.0  # between two questions to the driver about what others hold

Look = Callable[[Sequence[str]], Mapping[str, str]]


class Pool:
    """GPUs by UUID, in the driver's order. look: UUIDs of GPUs that no run has -> why others keep one from runs.

    distance: how far GPUs are from each other; None: as their order says.
    """

    def __init__(self, gpus: Sequence[Gpu], *, look: Look | None = None, distance: Distance | None = None) -> None:
        self._gpus = tuple(gpus)
        self._look, self._distance = look, distance
        self._quarantined: dict[str, str] = {}
        self._held: Mapping[str, str] = {}
        self._due = 0.0  # monotonic seconds

    @classmethod
    def of(cls, uuids: Sequence[str]) -> Pool:
        """Return a pool of GPUs of which nothing but the UUIDs is known."""
        return cls([Gpu(index=at, name="", uuid=uuid, memory_total=0) for at, uuid in enumerate(uuids)])

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self._gpus)

    @property
    def whole(self) -> tuple[str, ...]:
        """Those that are not quarantined: a run that needs more will never start."""
        return tuple(uuid for uuid in self.all if uuid not in self._quarantined)

    @property
    def out(self) -> dict[str, str]:
        """UUID -> why a GPU is left out now."""
        reasons = {uuid: f"in use by others: {why}" for uuid, why in self._held.items()}
        return reasons | {uuid: f"quarantined: {why}" for uuid, why in self._quarantined.items()}

    def name(self, uuid: str) -> str:
        """`GPU 2`."""
        return next((f"GPU {gpu.index}" for gpu in self._gpus if gpu.uuid == uuid), uuid)

    def quarantine(self, uuid: str, why: str) -> bool:
        """Leave a GPU out for good; return whether that is new."""
        if uuid not in self.all or uuid in self._quarantined:
            return False
        self._quarantined[uuid] = why
        return True

    def look(self, taken: Collection[str]) -> None:
        """Ask what others hold of the GPUs that no run has, every LOOK_S seconds at most."""
        now = time.monotonic()
        if self._look is None or now < self._due:
            return
        self._due = now + LOOK_S
        idle = [uuid for uuid in self.whole if uuid not in taken]
        self._held = self._look(idle) if idle else {}

    def usable(self, taken: Collection[str]) -> tuple[str, ...]:
        """Return the GPUs that runs have, and those that they could get now."""
        return tuple(uuid for uuid in self.whole if uuid in taken or uuid not in self._held)

    def place(self, width: int, taken: Collection[str]) -> tuple[str, ...]:
        """Return the GPUs that a run of so many gets."""
        free = [uuid for uuid in self.usable(taken) if uuid not in taken]
        return place(width, free, self.all, self._distance)

    def report(self) -> list[dict[str, Any]]:
        """Return every GPU for status.json. out: why it is left out, None where it is not."""
        out = self.out
        return [
            {"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid, "out": out.get(gpu.uuid)} for gpu in self._gpus
        ]
