"""A job of a cluster for tests of the runner inside it: no scheduler, and this machine as its only host."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from kmatrix.engines.allocation import StopCause
from kmatrix.engines.spread import Local, Spread


@dataclass(slots=True)
class FakeAllocation:
    """A job with these answers."""

    job: str = "12"
    restart: int = 0
    hosts: tuple[str, ...] = (socket.gethostname(),)
    kill_s: float | None = 10.0
    most_restarts: int | None = None
    stage_dir: str = ""
    replaces_nodes: bool = False
    why: StopCause = field(default_factory=lambda: StopCause(kind="signal", reason="asked to stop"))
    refusals: list[str] = field(default_factory=list)  # of requests to requeue, first to last
    lost: tuple[str, ...] = ()
    over: tuple[str, ...] = ()  # other jobs without processes
    seconds: float | None = None
    starts: Spread = field(default_factory=Local)
    cancelled: bool = False
    requeued: int = 0
    asked: list[bool] = field(default_factory=list)  # whether each stop was announced
    name: str = "Slurm"

    def spread(self) -> Spread:
        """Return what starts the runs."""
        return self.starts

    def left_s(self) -> float | None:
        """Return the time (s) until the limit."""
        return self.seconds

    def cause(self, *, noticed: bool) -> StopCause:
        """Return why the job was signalled."""
        self.asked.append(noticed)
        return self.why

    def is_cancelled(self) -> bool:
        """Return whether the user ends the job."""
        return self.cancelled

    def requeue(self) -> str:
        """Queue the job again."""
        if self.refusals:
            return self.refusals.pop(0)
        self.requeued += 1
        return ""

    def silent(self, hosts) -> list[str]:
        """Return the lost ones of these hosts."""
        return [host for host in hosts if host in self.lost]

    def is_over(self, job, hosts) -> bool:
        """Return whether another job has ended."""
        return job in self.over and bool(hosts)
