"""Upload a run to its trackers: one thread per tracker, one track.json, and a time limit after the end of the run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kmatrix.errors import LaunchError, RecordError
from kmatrix.gpu.processes import ProcessHandle
from kmatrix.records import attempts
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.records.tracking import SyncState, SyncStatus, read_track, write_track
from kmatrix.redaction.redactor import redact
from kmatrix.track.feed import FeedBatch, PointTail, RunFeed, TrackedAlert, status_of
from kmatrix.track.tensorboard import TensorBoardMirror
from kmatrix.track.tracker import MetricPoint, StoredRun, Tracker, TrackerAlert, TrackerIdentity, identity
from kmatrix.track.trackio import TrackioMirror
from kmatrix.track.wandb import WandbMirror

MIRRORS: dict[str, Callable[[], Tracker]] = {
    "wandb": WandbMirror,
    "trackio": TrackioMirror,
    "tensorboard": TensorBoardMirror,
}

POLL_S = 0.25  # between two checks of the parent and the workers
WRITE_S = 2.0  # between two updates of track.json
END_S = 5.0  # time for the program of the run to write how the attempt ended


def feed(
    run: RunDir,
    names: Sequence[str],
    *,
    project: str = "",
    parent: int | None = None,
    limit_s: float,
    make: Callable[[str], Callable[[], Tracker]] | None = None,
) -> int:
    """Upload a run to these trackers until the attempt has ended and everything is sent.

    `project`: as in `identity`.
    `parent`: the attempt ends when this process exits; None: it has already ended. `limit_s`: time for pending steps
    after the end. Return 0, or 1 if steps are still pending.
    Raises LaunchError for an unknown tracker, RecordError if the directory is not a run.
    """
    ended, end = threading.Event(), _AttemptEnd(parent)
    tracked = identity(run, project=project)
    before = {status.tracker: status for status in read_track(run)}
    make = make or mirror
    workers = [
        SyncWorker(
            tracked,
            make(name),
            name=name,
            ended=ended,
            final=lambda: run_end(run, END_S if parent else 0.0),
            before=before.get(name),
        )
        for name in names
    ]
    lock = _lock(run, end, limit_s)
    try:
        for worker in workers:
            worker.start()
        return _supervise(run, workers, ended, end, limit_s)
    finally:
        os.close(lock)


class _AttemptEnd:
    """The end of the attempt: SIGTERM from the program of the run, or the exit of the parent process."""

    def __init__(self, parent: int | None) -> None:
        self.earlier = parent is None  # the attempt ended before this process started
        self._signalled = self.earlier
        self._parent = ProcessHandle(parent) if parent is not None else None
        # A signal announces the end of the attempt; the pending steps are still uploaded.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # blocked by who started this process

    def reached(self) -> bool:
        return self._signalled or (self._parent is not None and not self._parent.is_alive())

    def _on_signal(self, *_: object) -> None:
        self._signalled = True


def mirror(name: str) -> Callable[[], Tracker]:
    """Return the class of a tracker. Its package is imported by `open`, in the worker's thread."""
    if name not in MIRRORS:
        raise LaunchError(f"unknown tracker {name!r}", why=f"the trackers are {', '.join(MIRRORS)}")
    return MIRRORS[name]


def _supervise(
    run: RunDir, workers: Sequence[SyncWorker], ended: threading.Event, end: _AttemptEnd, limit_s: float
) -> int:
    """Update track.json until all workers are finished; stop workers that exceed the time limit.

    At the end of an attempt, the limit counts from that end. In a later sync, it counts from the last progress.
    """
    counter, steps = PointTail(run.metrics), set[int]()
    written = since = 0.0
    while not all(worker.finished for worker in workers):
        now = time.monotonic()
        if end.reached():
            since = since or now
            ended.set()
            for worker in workers:
                # A matrix waits for the upload, so its limit is absolute; a sync may take as long as it progresses.
                if now - (max(since, worker.progressed) if end.earlier else since) > limit_s:
                    worker.give_up()
        if now - written >= WRITE_S:
            written = now
            _count(counter, steps, ended=ended.is_set())
            _write(run, workers, steps)
        time.sleep(POLL_S)
    _count(counter, steps, ended=True)
    _write(run, workers, steps)
    return 0 if all(worker.status(steps).state is SyncState.DONE for worker in workers) else 1


def _count(counter: PointTail, steps: set[int], *, ended: bool) -> None:
    """Add the new steps of the run to `steps`."""
    with contextlib.suppress(OSError):
        while points := counter.read(ended=ended):
            steps.update(point.step for point in points)


def _write(run: RunDir, workers: Sequence[SyncWorker], steps: set[int]) -> None:
    """Write track.json. On a full disk, log the error and continue the upload."""
    try:
        write_track(run, [worker.status(steps) for worker in workers])
    except OSError as error:
        print(f"cannot write track.json: {error.strerror}", flush=True)


def run_end(run: RunDir, seconds: float) -> Status:
    """Return how the last attempt ended, when that is written; `stopped` after `seconds` without it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            last = attempts.read(run.path, max(attempts.numbers(run.path), default=0))
        except RecordError:
            return Status.STOPPED
        if (last and last.end) or time.monotonic() >= deadline:
            return status_of(last) if last else Status.STOPPED
        time.sleep(0.1)


def _lock(run: RunDir, end: _AttemptEnd, limit_s: float) -> int:
    """Acquire the tracker lock of a run and return its file descriptor.

    Wait for the tracker process of an earlier attempt, up to `limit_s` after the end of this attempt.
    """
    file = os.open(run.track_lock, os.O_RDWR | os.O_CREAT, 0o644)
    waited = 0.0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited > limit_s:
                raise LaunchError(
                    f"another process is uploading {run.name} to its trackers", hint="wait until it exits"
                ) from None
            time.sleep(POLL_S)
            waited += POLL_S if end.reached() else 0.0
        except OSError:
            return file  # this file system has no locks
        else:
            return file


READ_S = 0.5  # between two reads without new data
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a retry after an error, doubled each time
TOLERANCE = 1e-3  # nats/token: a larger difference of a repeated step's loss is an alert
LOSS = "train/loss"
ALL_KEYS = frozenset({""})  # stands for the keys of a step that the tracker has but cannot read back


class SyncWorker:
    """Uploads a run to one tracker, in a thread, until the attempt has ended and everything is sent.

    `make`: returns a new tracker for each try. `before`: the entry of track.json at the start. `ended`: set when the
    attempt has ended. `final`: returns how the run ended.
    """

    def __init__(
        self,
        run: TrackerIdentity,
        make: Callable[[], Tracker],
        *,
        name: str,
        ended: threading.Event,
        final: Callable[[], Status],
        before: SyncStatus | None = None,
    ) -> None:
        self.name, self._run, self._make, self._ended, self._final = name, run, make, ended, final
        self._before = before
        self._alerts = list(before.alerts if before else ())  # keys of the alerts sent
        self._sent: dict[int, tuple[frozenset[str], float | None]] = {}  # step -> keys, training loss (nats/token)
        self._last: int | None = None  # the newest step sent
        self._at_opening: dict[int, tuple[frozenset[str], float | None]] = {}  # `_sent` when the tracker was opened
        self._keys: dict[frozenset[str], frozenset[str]] = {}  # interned: most steps share one set of keys
        self._devices_time, self._late_alerts = 0.0, 0
        self._state, self._error = SyncState.OPEN, before.error if before else ""
        self._link, self._how = (before.link, before.how) if before else (None, None)
        self._opened = False
        self.progressed = time.monotonic()  # s, when data was last accepted
        # A daemon: a package that hangs must not keep the process alive after the time limit.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def finished(self) -> bool:
        """True if nothing more will be sent."""
        return self._state is not SyncState.OPEN

    def status(self, steps: set[int]) -> SyncStatus:
        """Return the current entry for track.json. `steps`: all steps of the run."""
        if self._opened or self._before is None:
            count, last = len(self._sent), self._last
            waiting = sum(1 for step in steps if step not in self._sent)
        else:
            count, last = self._before.points, self._before.sent_step
            waiting = max(0, len(steps) - count)
        return SyncStatus(
            tracker=self.name,
            state=self._state,
            sent_step=last,
            points=count,
            waiting=waiting,
            error=self._error,
            link=self._link,
            how=self._how,
            alerts=tuple(self._alerts),
        )

    def give_up(self) -> None:
        """Stop after the time limit. Steps that were not sent stay pending for `make track-sync`."""
        if self._state is SyncState.OPEN:
            self._rewind()
            self._state = SyncState.BEHIND
            self._error = self._error or "the tracker accepted nothing within the time limit"

    def _work(self) -> None:
        pause = PAUSE_S
        while True:
            # Read before the session: one that began before the end of the attempt gets another try after it.
            last = self._ended.is_set()
            try:
                self._session()
            # A missing package stays missing: no retry.
            except ImportError as error:
                self._fail(error)
                return
            except Exception as error:  # a tracker's package can raise anything
                self._log(error)
                self._rewind()
                if last:
                    self._fail(error)
                    return
            else:
                self._state, self._error = SyncState.DONE, ""
                return
            self._ended.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _session(self) -> None:
        """Open the tracker, send the pending data, and close it at the end of the attempt."""
        tracker, feed = self._make(), RunFeed(self._run.dir)
        self._restore(tracker.open(self._run))
        while True:
            ended = self._ended.is_set()
            if batch := feed.read(ended=ended):
                self._send(tracker, batch)
            elif ended:
                break
            else:
                self._ended.wait(READ_S)
        end = self._final()
        self._send(tracker, feed.read(ended=True))  # the last alerts
        tracker.close(end)

    def _rewind(self) -> None:
        """Restore the state at opening, because data that was accepted since then may be lost."""
        self._sent = dict(self._at_opening)
        self._last = max(self._sent, default=None)

    def _restore(self, stored: StoredRun) -> None:
        """Start from the steps, samples and alerts that the tracker already has."""
        self._sent, self._last = {}, None
        for step, values in stored.steps.items():
            self._mark_sent(step, values or dict.fromkeys(ALL_KEYS))
        self._at_opening = dict(self._sent)
        self._devices_time, self._late_alerts = stored.devices_time, stored.alerts
        # Of the alerts at a tracker, only the number is known.
        if not stored.alerts:
            self._alerts = []  # the tracker lost them, or never had any
        elif self._alerts:
            self._late_alerts = 0  # track.json has their keys
        self._link, self._how = stored.link, stored.how
        self._opened, self._error = True, ""
        self.progressed = time.monotonic()

    def _send(self, tracker: Tracker, batch: FeedBatch) -> None:
        if batch.config:
            tracker.configure(batch.config)
        if devices := [one for one in batch.devices if one.time > self._devices_time]:
            tracker.devices(devices)
            self._devices_time = devices[-1].time
        if points := [new for point in batch.points if (new := self._pending_part(point))]:
            tracker.points(points)
            for point in points:
                self._mark_sent(point.step, point.values)
        differing = [alert for point in batch.points if (alert := self._repeat_alert(point))]
        for tracked in [*batch.alerts, *differing]:
            self._send_alert(tracker, tracked)
        if batch:
            self.progressed = time.monotonic()

    def _pending_part(self, point: MetricPoint) -> MetricPoint | None:
        """Return the metrics of a point that were not sent yet, or None."""
        keys, _ = self._sent.get(point.step, (frozenset(), None))
        if keys == ALL_KEYS:
            return None
        pending = {key: value for key, value in point.values.items() if key not in keys}
        return MetricPoint(step=point.step, time=point.time, values=pending) if pending else None

    def _mark_sent(self, step: int, values: Mapping[str, float | None]) -> None:
        keys, loss = self._sent.get(step, (frozenset(), None))
        merged = keys.union(values)
        self._sent[step] = (self._keys.setdefault(merged, merged), values.get(LOSS, loss))
        self._last = step if self._last is None else max(self._last, step)

    def _repeat_alert(self, point: MetricPoint) -> TrackedAlert | None:
        """Return an alert if a resumed attempt repeats a step with a different loss than the one that was sent."""
        _, sent = self._sent[point.step]
        now = point.values.get(LOSS)
        if sent is None or now is None or abs(now - sent) <= TOLERANCE:
            return None
        text = f"step {point.step}: {LOSS} was sent as {sent:.4f}, and is {now:.4f} after the resume"
        alert = TrackerAlert(time=point.time, title=f"{self._run.name}: a repeated step differs", text=text)
        return TrackedAlert(key=f"repeat|{point.values.get('attempt')}", alert=alert)

    def _send_alert(self, tracker: Tracker, tracked: TrackedAlert) -> None:
        if tracked.key in self._alerts:
            return
        self._alerts.append(tracked.key)
        if self._late_alerts:  # the tracker has this one, but track.json lost its key
            self._late_alerts -= 1
            return
        self._log(f"alert: {tracked.alert.title}: {tracked.alert.text}")
        tracker.alert(tracked.alert)

    def _fail(self, error: Exception) -> None:
        self._state, self._error = SyncState.FAILED, _one_line(error)

    def _log(self, message: str | Exception) -> None:
        """Write a line to stderr, which is track.log. An exception becomes the last error of the tracker."""
        if isinstance(message, Exception):
            self._error = _one_line(message)
            message = f"failed: {self._error}"
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.name}: {message}", file=sys.stderr, flush=True)


def _one_line(error: Exception) -> str:
    """Return an error as one line of at most 300 characters, without secrets."""
    text = redact(" ".join(str(error).split())) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300] if type(error).__name__ not in text else text[:300]
