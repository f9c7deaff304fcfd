"""Where the screen's values come from: the driver, the files of a running recorder, or those of a run that ended."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from kmatrix.alerts import Alert, Thresholds
from kmatrix.errors import RecordError
from kmatrix.gpu.formats import Recording, read_samples
from kmatrix.gpu.top import alarms
from kmatrix.gpu.top.events import Events
from kmatrix.gpu.top.values import SPAN_S, History, Moment, Row
from kmatrix.records import MatrixDir, RunDir, read_json

MOST_A_MINUTE = 240  # snapshots of a recording that are read for its last minute
QUIET_S = 3.0  # without a new sample for so long, a recording is said to be silent


class Feed(Protocol):
    """A source of moments. title: what the header of the screen says.  bucket_s: how fine its history can be.

    grows: whether a feed without a GPU can get one.  noun: what a row stands for, "GPU" or "rank".
    """

    title: str
    noun: str
    bucket_s: float
    grows: bool

    @property
    def mode(self) -> str: ...

    @property
    def clock(self) -> str:
        """What stands for the time on the screen."""

    def now(self) -> float:
        """Return the Unix time that the screen shows."""

    def poll(self, history: History) -> Moment | None:
        """Put what is new into the history and return the newest moment; None while there is none."""

    def press(self, key: str, /) -> bool:
        """Take a key; whether it meant something."""

    def alerts(self, rows: Sequence[Row]) -> tuple[Alert, ...]:
        """Return what is wrong at the moment that the screen shows."""

    def notices(self) -> tuple[str, ...]:
        """Return sentences that the user should read."""

    def close(self) -> None: ...


class AttachedFeed:
    """Follows the samples that a recorder writes. Reads only what is new."""

    mode, grows = "attached", True

    def __init__(self, path: Path) -> None:
        self._run = run_dir(path)
        self._limits = alarms.limits_of(self._run)
        self.title = self._run.name
        self._recording = read_samples(self._run.gpu_samples)
        self.bucket_s, self.noun = bucket_s(self._recording), noun_of(self._recording)
        self._started = self._recording.header.get("started")
        self._events = events_of(self._run, self._recording)
        self._known = 0
        self._moment: Moment | None = None

    @property
    def clock(self) -> str:
        return clock(self.now())

    def now(self) -> float:
        return time.time()

    def poll(self, history: History) -> Moment | None:
        recording = read_samples(self._run.gpu_samples, first=self._known)
        if recording.header.get("started") != self._started:  # other GPUs: the recorder began a new file
            self._started, self._known = recording.header.get("started"), 0
            recording = read_samples(self._run.gpu_samples)
            self._events = events_of(self._run, recording)
            history.clear()
        count = len(recording)
        if count:
            self._known += count
            add(recording, _since(recording, recording.times[count - 1] - SPAN_S), count, history)
            self._moment = moment_of(recording, count - 1, self._events)
        return self._moment

    def press(self, _key: str, /) -> bool:
        return False

    def alerts(self, rows: Sequence[Row]) -> tuple[Alert, ...]:
        return _alerts(self._run, rows, self._limits, self.now())

    def notices(self) -> tuple[str, ...]:
        if self._moment is None:
            return ("the recorder has written no sample yet",)
        quiet = self.now() - self._moment.snapshot.time
        if quiet < QUIET_S:
            return ()
        if _has_ended(self._run):
            return (f"the recording has ended: --replay {self._run.path} shows it",)
        return (f"no new sample for {quiet:.0f} s: the recorder is late, or gone",)

    def close(self) -> None:
        return


class ReplayFeed:
    """Plays the samples of a run, with pause and seek.

    at: seconds from the first sample, negative from the last; None: the first, with from_end the last.
    """

    grows = False

    def __init__(self, path: Path, *, at: float | None = None, from_end: bool = False) -> None:
        self._run = run_dir(path)
        self._limits = alarms.limits_of(self._run)
        self.title = self._run.name
        self._recording = read_samples(self._run.gpu_samples)
        if not len(self._recording):
            raise RecordError(f"{self._run.gpu_samples} holds no sample", fix="attach to it while it runs: --run")
        self.bucket_s, self.noun = bucket_s(self._recording), noun_of(self._recording)
        self._events = events_of(self._run, self._recording)
        self._begin = self._recording.times[0]
        self.length = max(0.0, self._recording.times[len(self._recording) - 1] - self._begin)
        self.offset = 0.0
        if at is None:
            at = self.length if from_end else 0.0
        self.seek(at if at >= 0 else self.length + at)
        self._paused = False
        self._last = time.monotonic()
        self._shown: int | None = None  # how many records are in the history

    @property
    def mode(self) -> str:
        return "paused" if self._paused or self.offset >= self.length else "replay"

    @property
    def clock(self) -> str:
        return f"{clock(self.now())} {minutes(self.offset)}/{minutes(self.length)}"

    def now(self) -> float:
        return self._begin + self.offset

    def seek(self, offset: float) -> None:
        """Go to a place, in seconds from the first sample."""
        self.offset = min(self.length, max(0.0, offset))
        self._shown = None

    def poll(self, history: History) -> Moment | None:
        self._advance()
        count = max(1, _since(self._recording, self.now(), after=True))
        if self._shown is None or count < self._shown:
            self._shown = _since(self._recording, self.now() - SPAN_S)  # earlier than the last: history begins anew
        add(self._recording, self._shown, count, history)
        self._shown = count
        return moment_of(self._recording, count - 1, self._events)

    def press(self, key: str, /) -> bool:
        self._advance()
        jumps = {"left": -10.0, "right": 10.0, "[": -60.0, "]": 60.0, "0": -self.length, "e": self.length}
        if key == "space":
            self._paused = not self._paused
        elif key in jumps:
            self.seek(self.offset + jumps[key])
        return key == "space" or key in jumps

    def alerts(self, rows: Sequence[Row]) -> tuple[Alert, ...]:
        return _alerts(self._run, rows, self._limits, self.now())

    def notices(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        return

    def _advance(self) -> None:
        now = time.monotonic()
        if not self._paused:
            self.offset = min(self.length, self.offset + now - self._last)
        self._last = now


def _alerts(run: RunDir, rows: Sequence[Row], limits: Thresholds, now: float) -> tuple[Alert, ...]:
    """Return what the runner told; of a recording without a runner, what the rules say."""
    told = alarms.of_run(run, now)
    return alarms.of_rows(rows, limits, now) if told is None else told


def run_dir(path: Path) -> RunDir:
    """Return the folder of a recorded run. Raises RecordError that names the recorded runs near it."""
    if RunDir(path).gpu_samples.is_file():
        return RunDir(path)
    recorded = [run.path for run in MatrixDir(path).runs() if run.gpu_samples.is_file()] if path.is_dir() else []
    raise RecordError(
        f"{path} holds no {RunDir(path).gpu_samples.name}",
        why="it is a matrix" if recorded else "no recorder has written there",
        fix=f"name one of its runs: {', '.join(map(str, recorded[:5]))}" if recorded else "name the folder of a run",
    )


def add(recording: Recording, first: int, end: int, history: History) -> None:
    """Put the records first..end into a history: all, or as many as a minute needs, the last always."""
    stride = max(1, (end - first) // MOST_A_MINUTE)
    for index in reversed(range(end - 1, first - 1, -stride)):
        history.add(recording.snapshot(index))


def moment_of(recording: Recording, index: int, events: Events) -> Moment:
    """Return one record with the ranks that the header names, and the throttling of its time."""
    gpus = recording.header["gpus"]
    return Moment(
        snapshot=recording.snapshot(index),
        throttle=events.throttle(recording.times[index]),
        ranks={int(gpu["gpu_index"]): int(gpu["rank"]) for gpu in gpus if gpu.get("rank") is not None},
    )


def events_of(run: RunDir, recording: Recording) -> Events:
    """Return the events of the GPUs of a recording."""
    return Events(run.gpu_events, tuple(int(gpu["gpu_index"]) for gpu in recording.header["gpus"]))


def noun_of(recording: Recording) -> str:
    """Return what a row stands for: a run on the CPU is recorded by rank."""
    return "rank" if recording.header.get("device_type") == "cpu" else "GPU"


def bucket_s(recording: Recording) -> float:
    """Return how long a bucket of history must be for each to hold a sample: a second, longer for slow recordings."""
    hz = float(recording.header.get("hz") or 1.0)
    return 1.0 if hz >= 2 else 2.0 / hz


def clock(unix: float) -> str:
    """The local time of day."""
    return datetime.fromtimestamp(unix).strftime("%H:%M:%S")


def minutes(seconds: float) -> str:
    """1:05, 1:00:00."""
    whole, rest = divmod(int(seconds), 60)
    hours, whole = divmod(whole, 60)
    return f"{hours}:{whole:02}:{rest:02}" if hours else f"{whole}:{rest:02}"


def _since(recording: Recording, unix: float, *, after: bool = False) -> int:
    """Return the number of the first record at or after (after: behind) a time."""
    return bisect_right(recording.times, unix if after else unix - 1e-6)


def _has_ended(run: RunDir) -> bool:
    try:
        return bool(read_json(run.gpu_summary).get("final"))
    except RecordError:
        return False
