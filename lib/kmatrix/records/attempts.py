"""Who trains a run: attempts/N.json, made by one process, beside the lock of the run on each host.

The newest number has the run. Its maker alone replaces the file: with each pulse, and at its end. Whoever finds a newer
number than its own kills its ranks and writes nothing more. An attempt without an end, whose process is gone, was
killed. So the file is claim, fence, pulse and record at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kmatrix.clock import clock
from kmatrix.errors import KmatrixError
from kmatrix.records.decode import (
    Amount,
    Count,
    Int,
    Record,
    UnixTime,
    as_json,
    decode_bytes,
    decode_optional,
    replaced,
)
from kmatrix.records.files import create_json, names, write_json

PULSE_S = 10.0  # between two writes on network storage
STALE_S = 100.0  # an older file has no writer: some pulses, and caches of network storage of up to a minute
TRAIN, ARCHIVE = "train", "archive"
VOID, NODE_LOST, DATA = "void", "node lost", "data"  # kinds of ends, besides those of `kmatrix.status.fold`
# Variables of ranks: time (s) to save, at most; time (s) that earlier attempts of the run took.
GRACE, SPENT = "KMATRIX_GRACE_S", "KMATRIX_SPENT_S"


def boot_id() -> str:
    """Return the kernel's id of this boot of the machine, "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class TakenError(KmatrixError):
    """Another process has the run."""


class Exit(Record, frozen=True, kw_only=True):
    """The exit of a rank."""

    rank: Count
    code: Int  # negative after a signal
    host: str = ""


class End(Record, frozen=True, kw_only=True):
    """How an attempt ended."""

    kind: str  # finished, oom, nan, gpu lost, signal, stopped ...: the table of `kmatrix.status.fold`
    reason: str = ""
    step: Count = 0  # of the newest checkpoint
    seconds: Amount = 0.0  # of the attempt, by the monotonic clock
    at: UnixTime = 0.0
    exits: tuple[Exit, ...] = ()  # in their order: the first one is the cause
    lost: tuple[str, ...] = ()  # UUIDs of lost GPUs
    log_tail: tuple[str, ...] = ()  # last lines of output.log, of a failure


class Attempt(Record, frozen=True, kw_only=True):
    """attempts/N.json: a process that has, or had, the run."""

    number: Count = 0
    what: str = TRAIN  # or "archive": a rerun moves the files of the former attempts to archive/INTO
    into: Count = 0
    job: str = ""  # of a scheduler; empty on one machine
    host: str = ""
    boot: str = ""
    pid: Count = 0
    started: UnixTime = 0.0
    resume: str = "none"  # none, auto, latest, best, or a path
    micro_batch: Count | None = None  # sequences; None: that of run.json
    step: Count = 0  # of the newest checkpoint when it began
    gpus: tuple[str, ...] = ()  # UUIDs, of this node
    nodes: Count = 1
    address: str = ""  # of rank 0, for the ranks of all nodes
    port: Count = 0
    code: str = ""  # SHA-256 of the trainer's sources
    ordered: bool = False  # a person asked for it
    stop: str = ""  # why its ranks were asked to stop; written before they are
    pulse: Count = 0  # goes up while its process lives
    seconds: Amount = 0.0  # since its start, at the last pulse
    end: End | None = None


def folder(run: Path) -> Path:
    return run / "attempts"


def path_of(run: Path, number: int) -> Path:
    return folder(run) / f"{number}.json"


def numbers(run: Path) -> list[int]:
    """Return the numbers of all attempts, in order."""
    # Text, not paths, here and in `read`: their objects are a third of the time of a look at 10,000 runs.
    found = (name.removesuffix(".json") for name in names(f"{run}/attempts") if name.endswith(".json"))
    return sorted(int(name) for name in found if name.isdecimal())


def read_all(run: Path) -> tuple[Attempt, ...]:
    """Return all attempts, in order. Raises RecordError."""
    return tuple(one for number in numbers(run) if (one := read(run, number)) is not None)


def read(run: Path, number: int) -> Attempt | None:
    """Return an attempt, None without its file. Raises RecordError if it is damaged.

    One without content (storage without hard links, and a kill before it was written) has its number.
    """
    name = f"{run}/attempts/{number}.json"
    try:
        data = Path(name).read_bytes()
    except FileNotFoundError:
        return None
    return decode_bytes(data, Attempt, name) if data else Attempt(number=number)


def host_of(run: Path, node: int) -> str:
    """Return the host of a node of a run, `node 1` if it is unknown. Raises RecordError if an attempt is damaged."""
    if node:  # of what `kmatrix.engines.nodes` writes, the host alone
        about = decode_optional(run / "nodes" / f"{node}.json", dict[str, Any]) or {}
        return str(about.get("host") or f"node {node}")
    return getattr(read(run, max(numbers(run), default=0)), "host", "") or "node 0"


def write(run: Path, mine: Attempt, *, durable: bool = False) -> None:
    """Replace the file of an attempt; only its maker does. Raises OSError."""
    write_json(path_of(run, mine.number), as_json(mine), durable=durable, parents=False)


def this_process(host: str = "", boot: str = "") -> Attempt:
    """Return an attempt of this process, without a number."""
    return Attempt(host=host or socket.gethostname(), boot=boot or boot_id(), pid=os.getpid(), started=clock.now())


def is_here(one: Attempt, other: Attempt) -> bool:
    """Return whether one lock excludes both. Containers of one kernel may have mounts, and so locks, of their own."""
    return (one.boot, one.host) == (other.boot, other.host)


def beats(run: Path, one: Attempt) -> bool:
    """Return whether an attempt of another host was rewritten lately, for display: `wait_for_former` knows for sure.

    By the clock of this host, because readers write nothing; it may differ by less than STALE_S.
    """
    if is_here(one, this_process()):
        return False
    try:
        return abs(clock.now() - path_of(run, one.number).stat().st_mtime) < STALE_S
    except OSError:
        return False


def wait_for_former(run: Path, former: Attempt, mine: Attempt) -> Iterator[None]:
    """Wait until the process of an attempt without an end is known to be gone. Each `yield` is a short wait.

    On this host there is nothing to wait for: the caller has the lock. Raises TakenError if it lives.
    """
    if former.end is not None or is_here(former, mine):
        return
    while clock.age_s(path_of(run, former.number)) < STALE_S:
        yield
        now = read(run, former.number)
        if now is not None and (now.pulse != former.pulse or now.end is not None):
            raise TakenError(f"job {now.job} on {now.host} trains it" if now.end is None else "it has just ended")


def take(run: Path, mine: Attempt) -> None:
    """Make the file of an attempt, whose number is one more than the newest: a compare-and-swap.

    Raises TakenError if another process was faster.
    """
    try:
        create_json(path_of(run, mine.number), as_json(mine))
    except FileExistsError:
        raise TakenError("another process has just taken it") from None


def beat(run: Path, mine: Attempt, seconds: float) -> Attempt | None:
    """Show that this process lives; None: it must leave at once, and write nothing more.

    seconds: since the start of the attempt.
    """
    found = numbers(run)
    if not found or found[-1] != mine.number:  # a newer one has the run, or the folder was moved
        return None
    mine = replaced(mine, pulse=mine.pulse + 1, seconds=seconds)
    with suppress(OSError):  # a full disk: the next pulse tries again
        write(run, mine)
    return mine


def finish(run: Path, mine: Attempt, end: End) -> None:
    """Record how an attempt ended. Raises TakenError if a newer one has the run: then nothing more is written."""
    if numbers(run)[-1:] != [mine.number]:
        raise TakenError("another process has the run now, or it was moved: nothing more is written")
    write(run, replaced(mine, end=end, seconds=end.seconds), durable=True)
