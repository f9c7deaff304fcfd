"""A run and its trackers: a thread for each, one track.json, and an end within a limit."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from kmatrix.errors import LaunchError, RecordError
from kmatrix.gpu.processes import Watched
from kmatrix.records import RunDir, Status, read_json, read_run
from kmatrix.records.tracking import Sending, read_track, write_track
from kmatrix.track.feed import PointTail
from kmatrix.track.identity import identity
from kmatrix.track.sender import Sender
from kmatrix.track.values import Tracker

TRACKERS = ("wandb", "trackio", "tensorboard")
LOOK_S = 0.25  # between two looks at the parent
WRITE_S = 2.0  # between two writings of track.json
GOING_ON = (Status.RUNNING, Status.PLANNED)
STATUS_S = 5.0  # that the runner may take to write how the run ended


def feed(
    run: RunDir,
    names: Sequence[str],
    *,
    project: str = "",
    parent: int | None = None,
    limit_s: float,
    make: Callable[[str], Callable[[], Tracker]] | None = None,
) -> int:
    """Feed these trackers until the attempt has ended and all is sent; return 0, or 1 where something was not sent.

    parent: a process with whose end the attempt has ended; None: it has.  limit_s: how long after the end nothing
    may be taken, before the rest is left.
    Raises LaunchError for an unknown tracker, RecordError for a folder of no run.
    """
    ended, end = threading.Event(), _End(parent)
    who, before = identity(run, project=project), {sent.tracker: sent for sent in read_track(run)}
    make = make or mirror
    senders = [
        Sender(
            who,
            make(name),
            name=name,
            ended=ended,
            final=lambda: final_status(run, STATUS_S if parent else 0.0),
            before=before.get(name),
        )
        for name in names
    ]
    lock = _claim(run, end, limit_s)
    try:
        for sender in senders:
            sender.start()
        return _look_after(run, senders, ended, end, limit_s)
    finally:
        os.close(lock)


class _End:
    """Whether the attempt has ended: the runner said so by SIGTERM, or its processes are gone, or it never ran."""

    def __init__(self, parent: int | None) -> None:
        self.after = parent is None  # nothing is written any more since long ago
        self._told = self.after
        self._parent = Watched(parent) if parent is not None else None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    def has_come(self) -> bool:
        return self._told or (self._parent is not None and not self._parent.lives())

    def _tell(self, *_: object) -> None:
        self._told = True


def mirror(name: str) -> Callable[[], Tracker]:
    """Return what makes the tracker of this name; its package is imported when it is opened, in its own thread."""
    if name not in TRACKERS:
        raise LaunchError(f"no tracker {name!r}", why=f"there are {', '.join(TRACKERS)}")

    def make() -> Tracker:
        tracker: Tracker = importlib.import_module(f"kmatrix.track.{name}").Mirror()
        return tracker

    return make


def _look_after(run: RunDir, senders: Sequence[Sender], ended: threading.Event, end: _End, limit_s: float) -> int:
    """Watch the senders to their end, and keep track.json. After the end of an attempt the limit is one of time;
    for what is sent later, of time in which nothing was taken.
    """
    counter, steps = PointTail(run.metrics), set[int]()
    written = since = 0.0
    while not all(sender.over for sender in senders):
        now = time.monotonic()
        if end.has_come():
            since = since or now
            ended.set()
            for sender in senders:
                if now - (max(since, sender.progressed) if end.after else since) > limit_s:
                    sender.give_up()
        if now - written >= WRITE_S:
            written = now
            _count(counter, steps, ended=ended.is_set())
            _write(run, senders, steps)
        time.sleep(LOOK_S)
    _count(counter, steps, ended=True)
    _write(run, senders, steps)
    return 0 if all(sender.sent(steps).state is Sending.DONE for sender in senders) else 1


def _count(counter: PointTail, steps: set[int], *, ended: bool) -> None:
    """Take in the steps that are new."""
    with contextlib.suppress(OSError):
        while points := counter.read(ended=ended):
            steps.update(point.step for point in points)


def _write(run: RunDir, senders: Sequence[Sender], steps: set[int]) -> None:
    """Write track.json; a full disk is no reason to stop sending."""
    try:
        write_track(run, [sender.sent(steps) for sender in senders])
    except OSError as error:
        print(f"track.json cannot be written: {error.strerror}", flush=True)


def final_status(run: RunDir, seconds: float) -> Status:
    """Return how a run ended, as soon as its runner has written it; stopped where it writes nothing in this time."""
    deadline = time.monotonic() + seconds
    while not _is_written(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        status = read_run(run).status
    except (RecordError, ValueError):
        return Status.STOPPED
    return Status.STOPPED if status in GOING_ON else status


def _is_written(run: RunDir) -> bool:
    try:
        return read_json(run.status).get("status") not in GOING_ON
    except RecordError:
        return False


def _claim(run: RunDir, end: _End, limit_s: float) -> int:
    """Hold the run's tracker lock; wait for a process of an earlier attempt that still sends. Returns a descriptor."""
    file = os.open(run.track_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    waited = 0.0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited > limit_s:
                raise LaunchError(
                    f"{run.name} is being sent to its trackers by another process", fix="wait for its end"
                ) from None
            time.sleep(LOOK_S)
            waited += LOOK_S if end.has_come() else 0.0
        except OSError:
            return file  # a disk that cannot lock
        else:
            return file
