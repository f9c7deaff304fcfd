"""One moment of a matrix and of its runs, as values: what `make status` and `make estimate` print."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kmatrix.estimate import Source
from kmatrix.records import Status
from kmatrix.records.tracking import Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one device held at most, in MiB. total: what it has."""

    device: str
    most: float
    total: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """One GPU of the box now, as the newest recording of a run on it says. Unknown is None.

    run: the one that has it, "" for none.  utilization: percent.  memory_used, memory_total: MiB.  power: watts.
    temperature: degrees Celsius.  at: Unix seconds of these values.  out: why no run gets it, "" where one may.
    """

    index: int | None
    name: str
    uuid: str
    run: str = ""
    utilization: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    power: float | None = None
    temperature: float | None = None
    at: float | None = None
    out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run now. Unknown is None.

    step: the newest that is known.  loss: nats a token, of training; val_loss: the last that was measured.
    mfu: 0 to 1.  memory_mib: the most that one of its devices held; memory_total_mib: what that device has.
    memory: of each device.  gpus: UUIDs that its last attempt was given.
    elapsed_s: of all its attempts.  attempt_s: of the one that runs.
    left_s: of it, whenever it goes on.  left_from: what that is taken from.
    starts_s, ends_s: seconds from now, as the runs are packed.  epochs, all_epochs: of the data, read and to be read.
    dollars, all_dollars: spent, and in the end.
    ended_by: what ended a finished run early.  alerts: what holds now.
    trackers: what each holds of the run.
    """

    name: str
    status: Status
    kind: str | None = None
    reason: str = ""
    attempt: int = 0
    micro_batch: int | None = None
    step: int | None = None
    max_iters: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    ranks: int | None = None
    device: str = ""
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    memory: tuple[Memory, ...] = ()
    gpus: tuple[str, ...] = ()
    elapsed_s: float | None = None
    attempt_s: float | None = None
    left_s: float | None = None
    left_from: Source | None = None
    starts_s: float | None = None
    ends_s: float | None = None
    epochs: float | None = None
    all_epochs: float | None = None
    dollars: float | None = None
    all_dollars: float | None = None
    ended_by: str | None = None
    alerts: tuple[str, ...] = ()
    reused_from: str = ""
    trackers: tuple[Sent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView:
    """A matrix now. running: a runner has it.

    left_s: until its end, or what would be left if it went on now; None while that is not known of every run.
    ends: Unix seconds of its end, if it went on now.  gpus: of the box, in the driver's order.
    dollars, all_dollars: of all runs, None where there is no price or a time is not known.
    """

    name: str
    status: Status
    running: bool
    started: float | None
    ended: float | None
    left_s: float | None
    dollars: float | None
    all_dollars: float | None
    runs: tuple[RunView, ...]
    ends: float | None = None
    gpus: tuple[GpuView, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(run.status for run in self.runs)
        return {status.value: found[status] for status in Status if found[status]}
