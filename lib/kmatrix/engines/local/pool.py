"""The pool of GPUs of a matrix: which are excluded and why, and which a run gets.

A lost GPU is quarantined for the rest of this execution: the driver, or a reboot, may recover it, and the next runner
checks again. A GPU is also excluded while other processes use its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.packing import Distance, place

POLL_S = 2.0  # between two queries to the driver about other processes

QueryUse = Callable[[Sequence[str]], Mapping[str, str]]


class Pool:
    """GPUs by UUID, in the driver's order."""

    def __init__(self, gpus: Sequence[Gpu], *, query: QueryUse | None = None, distance: Distance | None = None) -> None:
        """Create a pool.

        query: returns UUID -> reason for those of the given GPUs that other processes block.
        distance: of two GPUs; None places runs by the order of GPUs.
        """
        self._gpus = tuple(gpus)
        self._query, self._distance = query, distance
        self._quarantined: dict[str, str] = {}
        self._busy: Mapping[str, str] = {}
        self._due = 0.0  # monotonic seconds

    @classmethod
    def of(cls, uuids: Sequence[str]) -> Pool:
        """Return a pool of GPUs of which only the UUIDs are known."""
        return cls([Gpu(index=at, name="", uuid=uuid, memory_total=0) for at, uuid in enumerate(uuids)])

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self._gpus)

    @property
    def not_quarantined(self) -> tuple[str, ...]:
        """The GPUs that may become free: a run that needs more can never start."""
        return tuple(uuid for uuid in self.all if uuid not in self._quarantined)

    @property
    def excluded(self) -> dict[str, str]:
        """The GPUs that are excluded now: UUID -> reason."""
        reasons = {uuid: f"in use by others: {why}" for uuid, why in self._busy.items()}
        return reasons | {uuid: f"quarantined: {why}" for uuid, why in self._quarantined.items()}

    def name(self, uuid: str) -> str:
        """Return `GPU 2`."""
        return next((f"GPU {gpu.index}" for gpu in self._gpus if gpu.uuid == uuid), uuid)

    def quarantine(self, uuid: str, why: str) -> bool:
        """Exclude a GPU for the rest of this execution; return whether it was not quarantined before."""
        if uuid not in self.all or uuid in self._quarantined:
            return False
        self._quarantined[uuid] = why
        return True

    def poll(self, taken: Collection[str]) -> None:
        """Query the use of idle GPUs by other processes, at most every POLL_S seconds."""
        now = time.monotonic()
        if self._query is None or now < self._due:
            return
        self._due = now + POLL_S
        # GPUs of our own runs are left out: their memory would count as that of another process.
        idle = [uuid for uuid in self.not_quarantined if uuid not in taken]
        self._busy = self._query(idle) if idle else {}

    def usable(self, taken: Collection[str]) -> tuple[str, ...]:
        """Return the GPUs that runs use, and those that they could get now."""
        return tuple(uuid for uuid in self.not_quarantined if uuid in taken or uuid not in self._busy)

    def place(self, width: int, taken: Collection[str]) -> tuple[str, ...]:
        """Return the GPUs that a run of this width gets."""
        free = [uuid for uuid in self.usable(taken) if uuid not in taken]
        return place(width, free, self.all, self._distance)

    def report(self) -> list[dict[str, Any]]:
        """Return the entries of status.json. `out`: why a GPU is excluded, None if it is not."""
        excluded = self.excluded
        return [
            {"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid, "out": excluded.get(gpu.uuid)}
            for gpu in self._gpus
        ]
