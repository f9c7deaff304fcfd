"""The sources of the screen: the driver, the files of a running recorder, or a recording."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import Recording, damage_note, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.formats.events import GpuEvents, TimeOf
from kmatrix.gpu.nvml.facts import DeviceFacts
from kmatrix.gputop.monitor import GPUMonitor
from kmatrix.gputop.progress import ProgressReader
from kmatrix.gputop.recorded import FollowedProcesses, RecordedExtras
from kmatrix.gputop.view import SPAN_S, DeviceRow, History, Metric, ScreenSample, balance
from kmatrix.records import attempts
from kmatrix.records.decode import Record, decode_optional
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.status.alerts import Alert, AlertTracker, GpuState, RunSnapshot, Severity, Thresholds, read_alerts
from kmatrix.text import duration, make_command, time_of_day

MAX_PER_MINUTE = 240  # samples to read for the history of one minute: 4 per bucket are enough for a mean
QUIET_S = 3.0  # time without a new sample before a notice is shown
WAIT_S = 2.0  # for the processes in a snapshot: the driver may hang
WINDOW = 10  # buckets (usually s) over which utilization is averaged
MACHINE_THRESHOLDS = Thresholds(gpu_utilization=0, balance=0)  # idle GPUs, and GPUs of other jobs, are normal


class SampleFeed(Protocol):
    """A source of samples for the screen."""

    title: str  # shown in the header
    noun: str  # what a row represents: "GPU" or "rank"
    bucket_s: float  # s, resolution of its history
    limits: Thresholds  # of its alerts
    grows: bool  # GPUs can appear later

    @property
    def mode(self) -> str:
        """The mode: live, attached, replay or paused."""

    @property
    def clock(self) -> str:
        """The time of the newest sample, as text."""

    def now(self) -> float:
        """Return the time that the screen shows in Unix s."""

    def poll(self, history: History) -> ScreenSample | None:
        """Add new samples to the history and return the newest one, None before the first."""

    def press(self, key: str, /) -> bool:
        """Handle a key. Return whether the feed uses it."""

    def alerts(self, rows: Sequence[DeviceRow]) -> tuple[Alert, ...]:
        """Return the active alerts at the time that the screen shows."""

    def notices(self) -> tuple[str, ...]:
        """Return messages to the user."""

    @property
    def no_processes(self) -> str:
        """The reason why the processes are unknown, empty if they are known or will be."""

    def close(self) -> None: ...


class AttachedFeed:
    """Follows the files of a running recorder, reading new samples only."""

    mode, grows = "attached", True

    def __init__(self, path: Path) -> None:
        self._run = run_dir(path)
        self.limits = thresholds_of(self._run)
        self.title = title_of(self._run)
        self._recording = read_samples(self._run.gpu_samples)
        self.bucket_s, self.noun = bucket_s(self._recording), noun_of(self._recording)
        self._started = self._recording.header.get("started")
        self._events = events_of(self._run, self._recording)
        self._extras, self._processes = RecordedExtras(self._run.gpu_stats_multi), _processes_of(self._recording)
        self._known = self._damaged = 0  # records
        self._newest: ScreenSample | None = None
        self._progress = ProgressReader(_node_of(self._run)[0].path)

    @property
    def clock(self) -> str:
        return time_of_day(self.now(), date=False)

    def now(self) -> float:
        return time.time()

    def poll(self, history: History) -> ScreenSample | None:
        recording = read_samples(self._run.gpu_samples, first=self._known)
        if recording.header.get("started") != self._started:  # the recorder started a new file, for other GPUs
            self._started, self._known, self._damaged = recording.header.get("started"), 0, 0
            recording = read_samples(self._run.gpu_samples)
            self._events = events_of(self._run, recording)
            self._processes.close()
            self._processes = _processes_of(recording)
            history.clear()
        self._known, self._damaged = self._known + recording.records, self._damaged + recording.damaged
        count = len(recording)
        if count:
            # After a pause, or at the start, only the last minute is on the screen.
            clock = RecordingClock(recording)
            add(recording, clock.index_from(clock.length - SPAN_S), count, history)
            newest = sample_of(recording, count - 1, self._events, math.inf)
            self._newest = replace(newest, snapshot=self._extras.added(newest.snapshot))
        if self._newest is None:
            return None
        if self._is_active:
            self._processes.start()
        rows = self._processes.rows if self._is_active else None
        return replace(self._newest, progress=(self._progress.read(),), processes=rows)

    @property
    def _is_active(self) -> bool:
        """True while the recorder writes samples."""
        return self._newest is not None and self.now() - self._newest.snapshot.time < QUIET_S

    @property
    def no_processes(self) -> str:
        if self.noun == "rank":
            return ""
        if not self._is_active:
            return "processes: only while the recording goes on"
        unknown = "processes: only from the NVIDIA driver on the machine of these GPUs"
        return unknown if self._processes.is_elsewhere else ""

    def poll_again(self) -> None:
        """Wait until the processes are known: for one snapshot."""
        self._processes.wait(WAIT_S)

    def press(self, _key: str, /) -> bool:
        return False

    def alerts(self, rows: Sequence[DeviceRow]) -> tuple[Alert, ...]:
        return _alerts(self._run, rows, self.limits, self.now())

    def notices(self) -> tuple[str, ...]:
        damage = damage_note(self._run.gpu_samples, self._damaged)
        if self._newest is None:
            return ("no sample yet", *damage)
        quiet = self.now() - self._newest.snapshot.time
        if quiet < QUIET_S:
            return (*other_nodes(self._run), *damage)
        if _has_ended(self._run):
            return (f"recording ended: {_command(REPLAY=self._run)} replays it", *damage)
        return (f"no new sample for {quiet:.0f} s: the recorder is slow or has exited", *damage)

    def close(self) -> None:
        self._processes.close()


class ReplayFeed:
    """Replays the recording of a run, with pause and seek.

    `at`: start in s from the first sample, negative from the last one. None: the first, or the last with `from_end`.
    """

    grows, no_processes = False, "processes: not in a recording"

    def __init__(self, path: Path, *, at: float | None = None, from_end: bool = False) -> None:
        self._run = run_dir(path)
        self.limits = thresholds_of(self._run)
        self.title = title_of(self._run)
        self._recording = read_samples(self._run.gpu_samples)
        if not len(self._recording):
            why = "".join(damage_note(self._run.gpu_samples, self._recording.damaged))
            raise RecordError(
                f"{self._run.gpu_samples} contains no sample",
                why=why,
                hint="record again" if why else "attach with --run",
            )
        self.bucket_s, self.noun = bucket_s(self._recording), noun_of(self._recording)
        self._time = RecordingClock(self._recording)
        self._extras = RecordedExtras(self._run.gpu_stats_multi)
        self._events = events_of(self._run, self._recording, self._time.at)
        self.length = self._time.length
        self.offset = 0.0
        if at is None:
            at = self.length if from_end else 0.0
        self.seek(at if at >= 0 else self.length + at)
        self._paused = False
        self._last = time.monotonic()
        self._shown: int | None = None  # number of records in the history

    @property
    def mode(self) -> str:
        return "paused" if self._paused or self.offset >= self.length else "replay"

    @property
    def clock(self) -> str:
        return f"{time_of_day(self.now(), date=False)} {duration(self.offset)}/{duration(self.length)}"

    def now(self) -> float:
        index = self._count() - 1
        return self._recording.times[index] + self.offset - self._time.of(index)

    def seek(self, offset: float) -> None:
        """Move to an offset in s from the first sample."""
        self.offset = min(self.length, max(0.0, offset))
        self._shown = None

    def poll(self, history: History) -> ScreenSample | None:
        self._advance()
        count = self._count()
        if self._shown is None or count < self._shown:
            self._shown = self._time.index_from(self.offset - SPAN_S)  # moved back: rebuild the history
        add(self._recording, self._shown, count, history)
        self._shown = count
        sample = sample_of(self._recording, count - 1, self._events, self._time.of(count - 1))
        return replace(sample, snapshot=self._extras.added(sample.snapshot))

    def press(self, key: str, /) -> bool:
        self._advance()  # a jump starts from the current time, not from that of the last poll
        jumps = {"left": -10.0, "right": 10.0, "[": -60.0, "]": 60.0, "0": -self.length, "e": self.length}
        if key == "space":
            self._paused = not self._paused
        elif key in jumps:
            self.seek(self.offset + jumps[key])
        return key == "space" or key in jumps

    def alerts(self, rows: Sequence[DeviceRow]) -> tuple[Alert, ...]:
        return _alerts(self._run, rows, self.limits, self.now())

    def notices(self) -> tuple[str, ...]:
        return damage_note(self._run.gpu_samples, self._recording.damaged)

    def close(self) -> None:
        return

    def _count(self) -> int:
        """Return the number of records up to the shown time, at least one."""
        return max(1, self._time.index_after(self.offset))

    def _advance(self) -> None:
        now = time.monotonic()
        if not self._paused:
            self.offset = min(self.length, self.offset + now - self._last)
        self._last = now


def _alerts(run: RunDir, rows: Sequence[DeviceRow], limits: Thresholds, now: float) -> tuple[Alert, ...]:
    """Return the alerts that the program of the run recorded; without one, apply the rules to the rows."""
    recorded = alerts_at(run, now)
    return alerts_of_rows(rows, limits, now) if recorded is None else recorded


def run_dir(path: Path) -> RunDir:
    """Return the directory of a recorded run. Raises RecordError, which lists the recorded runs of a matrix."""
    if RunDir(path).gpu_samples.is_file():
        return RunDir(path)
    recorded = sorted(found.parent for found in path.glob(f"*/{RunDir(path).gpu_samples.name}"))
    hint = "pass a run directory"
    if recorded:
        why, hint = "it is a matrix", f"pass one of its runs: {', '.join(map(str, recorded[:5]))}"
    elif path.is_dir():
        why = "it was not recorded"
    elif path.exists():
        why = "it is a file"
        if path.name == RunDir(path).gpu_samples.name:
            hint = f"pass its run directory: {path.parent}"
    else:
        why = "it does not exist"
    raise RecordError(f"{path} contains no {RunDir(path).gpu_samples.name}", why=why, hint=hint)


def title_of(run: RunDir) -> str:
    """Return the name of a run; of one of several nodes also the number and the host of the node."""
    whole, node = _node_of(run)
    return run.name if node is None else f"{whole.name} node {node} ({attempts.host_of(whole.path, node)})"


def other_nodes(run: RunDir) -> tuple[str, ...]:
    """Return how to see the other nodes of a run, nothing if it has one."""
    whole, node = _node_of(run)
    if node is None:
        return ()
    last, folder = [*whole.later_nodes().items()][-1]
    return (f"node {node} of 0 to {last}: {_command(RUN=folder)} shows node {last}",)


def _command(**runs: RunDir) -> str:
    """Return a command to paste that shows a run: also for a user of scripts/gputop.py, and in any folder."""
    return make_command("gputop", **{name: str(run.path.absolute()) for name, run in runs.items()})


def _node_of(run: RunDir) -> tuple[RunDir, int | None]:
    """Return the run and the node that a folder has the recording of; no node for a run on one."""
    if run.path.parent.name == "nodes" and run.name.isdecimal():
        return RunDir(run.path.parent.parent), int(run.name)
    return run, 0 if run.later_nodes() else None


def add(recording: Recording, first: int, end: int, history: History) -> None:
    """Add the records first..end to a history, thinned to MAX_PER_MINUTE. The last one is always included."""
    stride = max(1, (end - first) // MAX_PER_MINUTE)
    # Counted from the end, so that thinning never drops the newest sample.
    for index in reversed(range(end - 1, first - 1, -stride)):
        history.add(recording.snapshot(index))


def sample_of(recording: Recording, index: int, events: GpuEvents, at: float) -> ScreenSample:
    """Return one record with the ranks from the header. `at`: its time for the events."""
    gpus = recording.header["gpus"]
    return ScreenSample(
        snapshot=recording.snapshot(index),
        throttle=events.throttle(at),
        xids=events.xids(at),
        ranks={gpu["gpu_index"]: rank for gpu in gpus if (rank := gpu.get("rank")) is not None},
    )


def events_of(run: RunDir, recording: Recording, time_of: TimeOf = lambda wall, _: wall) -> GpuEvents:
    """Return the events of the GPUs of a recording. time_of: as in GpuEvents."""
    return GpuEvents(run.gpu_events, tuple(int(gpu["gpu_index"]) for gpu in recording.header["gpus"]), time_of)


def _processes_of(recording: Recording) -> FollowedProcesses:
    """Return the processes on the GPUs of a recording."""
    gpus = {str(gpu["uuid"]): int(gpu["gpu_index"]) for gpu in recording.header["gpus"] if gpu.get("uuid")}
    return FollowedProcesses({} if recording.header.get("device_type") == "cpu" else gpus)


def noun_of(recording: Recording) -> str:
    """Return what a row represents: a rank for a run on the CPU, else a GPU."""
    return "rank" if recording.header.get("device_type") == "cpu" else "GPU"


def bucket_s(recording: Recording) -> float:
    """Return the length of a bucket of history in s: 1 s, longer if the sampling rate is below 2 Hz."""
    hz = float(recording.header.get("hz") or 1.0)
    return 1.0 if hz >= 2 else 2.0 / hz


def _has_ended(run: RunDir) -> bool:
    summary = decode_optional(run.gpu_summary, _Summary)
    return summary is not None and summary.final


class _Summary(Record, frozen=True, kw_only=True):
    """The state of a recording in gpu_summary.json."""

    final: bool = False


class LiveFeed:
    """Queries the driver at every poll."""

    mode, title, noun, bucket_s, grows, no_processes = "live", "", "GPU", 1.0, False, ""
    limits = MACHINE_THRESHOLDS

    def __init__(self, *, interval: float = 1.0) -> None:
        """Open the driver. interval: s between two reads of the expensive metrics."""
        self._monitor = GPUMonitor(details=True, interval=interval)
        self._monitor.initialize()
        self._progress: dict[Path, ProgressReader] = {}

    @property
    def clock(self) -> str:
        return time_of_day(self.now(), date=False)

    def now(self) -> float:
        return time.time()

    def poll(self, history: History) -> ScreenSample | None:
        if not self._monitor.gpu_count:
            return None
        sample = self._monitor.read()
        history.add(sample.snapshot)
        paths = dict.fromkeys(row.run_path for row in sample.processes or () if row.run_path)
        self._progress = {path: self._progress.get(path) or ProgressReader(path) for path in paths}
        return replace(sample, progress=tuple(progress.read() for progress in self._progress.values()))

    def facts(self) -> dict[int, DeviceFacts]:
        """Return the settings of each GPU by its index."""
        return self._monitor.facts()

    def poll_again(self) -> None:
        """Wait until values that are means over some time are known: for one snapshot."""
        self._monitor.poll_again()

    def press(self, _key: str, /) -> bool:
        return False

    def alerts(self, rows: Sequence[DeviceRow]) -> tuple[Alert, ...]:
        return alerts_of_rows(rows, self.limits, self.now())

    def notices(self) -> tuple[str, ...]:
        return tuple(f"no GPU: {note}" for note in self._monitor.notes) if not self._monitor.gpu_count else ()

    def close(self) -> None:
        self._monitor.close()


def alerts_at(run: RunDir, now: float) -> tuple[Alert, ...] | None:
    """Return the alerts of a run that were active at a Unix time, or None if no program has looked for any."""
    if not attempts.numbers(run.path):
        return None
    known = read_alerts(run.path)
    active = [alert for alert in known if alert.since <= now and (alert.until is None or now < alert.until)]
    return tuple(sorted(active, key=lambda alert: (alert.severity is Severity.WARNING, alert.since)))


def thresholds_of(run: RunDir) -> Thresholds:
    """Return the alert thresholds of a run, the defaults if its run.json has none."""
    try:
        return Thresholds.of(read_run_file_or_empty(run).symbols)
    except ValueError:
        return Thresholds()


def alerts_of_rows(rows: Sequence[DeviceRow], limits: Thresholds, now: float) -> tuple[Alert, ...]:
    """Return the active alerts of these GPUs."""
    memory = balance((row.sample for row in rows if row.sample.is_known), Metric.MEMORY)
    state = RunSnapshot(
        time=now,
        gpus=tuple(_state(row) for row in rows),
        memory_cv=memory.cv if memory else None,
    )
    # A new tracker per call has no memory of earlier samples, so a condition must not have to hold for some time.
    tracker = AlertTracker(replace(limits, hold_s=0))
    tracker.update(state)
    return tracker.active


def _state(row: DeviceRow) -> GpuState:
    recent = row.history.get(Metric.UTILIZATION, ())[-WINDOW:]
    known = [value for value in recent if value is not None]
    return GpuState(
        name=f"GPU {row.sample.gpu_index}",
        utilization=sum(known) / WINDOW if len(known) == WINDOW else None,  # a shorter mean would raise false alerts
        memory_percent=row.sample.memory_percent,
        temperature=row.sample.temperature,
        throttled=row.throttle or (),
        lost=row.missing == "lost",
        xids=row.xids,
    )
