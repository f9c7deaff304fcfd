"""Find the attempts of a run in its recording, and where the recorder died and was started again within one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kmatrix.curves.make import read_curves
from kmatrix.gpu.formats.binary import Recording
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.records.decode import decode_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult, read_result
from kmatrix.records.states import EventLine, PhaseLine, read_run_status
from kmatrix.text import plural

STARTED = "started"  # event of a recorder that begins to sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAttempt:
    """The samples of one attempt of a run."""

    first: int  # index of its first sample
    last: int  # index of its last sample
    restarts: tuple[int, ...] = ()  # indices of the first samples after the recorder was started again


def recorded_attempts(run_dir: RunDir, clock: RecordingClock) -> list[RecordedAttempt]:
    """Return the attempts in a recording, at least one, in order. The time between two of them is in none."""
    if not len(clock):
        return []
    starts: dict[int, _Start] = {}  # index of the first sample -> start of the recorder
    for event in decode_lines(run_dir.gpu_events, EventLine):
        time = clock.at(event.time, event.monotonic) if event.event == STARTED else None
        if time is not None and (first := clock.index_from(time)) < len(clock):
            starts[first] = _Start(time, event.attempt)
    found = [[0]]  # of each attempt: the first samples after the starts of its recorder
    before = starts.pop(0, None)
    signs = _Signs(run_dir, clock)
    for first, start in sorted(starts.items()):
        if before is not None and signs.is_restart(before, start):
            found[-1].append(first)
        else:
            found.append([first])
        before = start
    ends = [each[0] for each in found[1:]] + [len(clock)]
    return [
        RecordedAttempt(first=first, last=end - 1, restarts=tuple(rest))
        for (first, *rest), end in zip(found, ends, strict=True)
    ]


def restart_notes(run_dir: RunDir, recording: Recording, clock: RecordingClock) -> list[str]:
    """Return a note about the restarts of the recorder within attempts: how often, and the time that is missing."""
    restarts = [first for attempt in recorded_attempts(run_dir, clock) for first in attempt.restarts]
    if not restarts:
        return []
    gaps = {first: clock.of(first) - clock.of(first - 1) for first in restarts}
    text = (
        f"the recorder was restarted {plural(len(restarts), 'time')}: {math.fsum(gaps.values()):.1f} s have no sample"
    )
    missing = math.fsum(gap for first, gap in gaps.items() if _lacks_energy(recording, first))
    return [f"{text}, and {missing:.1f} s no energy" if missing else text]


def _lacks_energy(recording: Recording, first: int) -> bool:
    """Return whether a recording with energy has none of the time before a sample: a total did not increase."""
    # The energy of the host counts from the start of each recorder.
    columns = [values for each in recording.columns if (values := each.get("energy_j")) is not None]
    steps = [values[first] - values[first - 1] for values in columns]
    known = [step for step in steps if not math.isnan(step)]
    if known:
        return min(known) <= 0
    return recording.host_joules is not None and not math.isnan(recording.host_joules[first])


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of the recorder. time: recording time, s.  attempt: of the run; None in files of earlier versions."""

    time: float
    attempt: int | None


class _Signs:
    """Tells restarts of the recorder from attempts of the run. Its files are read when they are needed."""

    def __init__(self, run_dir: RunDir, clock: RecordingClock) -> None:
        self._run, self._clock = run_dir, clock
        self._begins: list[float] | None = None
        self._seen: Mapping[int, tuple[float, float]] | None = None

    def is_restart(self, before: _Start, start: _Start) -> bool:
        """Return whether two starts of the recorder, one after the other, are of the same attempt."""
        if before.attempt is not None and start.attempt is not None:
            return before.attempt == start.attempt
        # Recorders of earlier versions did not know their attempt: its start is in status.json.
        self._begins = self._attempt_begins() if self._begins is None else self._begins
        if self._begins:
            return not any(before.time < begin <= start.time for begin in self._begins)
        # A node after node 0 has no status.json, and old ones list no attempts: signs of one attempt on both sides.
        self._seen = self._attempt_signs() if self._seen is None else self._seen
        return any(earliest < start.time < latest for earliest, latest in self._seen.values())

    def _attempt_begins(self) -> list[float]:
        """Return the recording times (s) at which the attempts in status.json began."""
        status = read_run_status(self._run)
        begins = (
            self._clock.at(each.started, each.clock.monotonic if each.clock else None)
            for each in (status.attempts if status else None) or ()
            if each.started is not None
        )
        return [time for time in begins if time is not None]

    def _attempt_signs(self) -> Mapping[int, tuple[float, float]]:
        """Return by attempt the recording times (s) of the first and the last sign of its trainer."""
        times: dict[int, list[float | None]] = {}
        for line in decode_lines(self._run.phases, PhaseLine):
            span = (self._clock.at(line.begin, line.begin_monotonic), self._clock.at(line.end, line.end_monotonic))
            times.setdefault(line.attempt, []).extend(span)
        for attempt, wall in read_curves(self._run, None, keep=False).last_times.items():
            times.setdefault(attempt, []).append(self._clock.at(wall))
        result = read_result(self._run) or RunResult()
        if result.ended is not None:
            times.setdefault(result.attempt or 1, []).append(self._clock.at(result.ended))
        known = {attempt: [time for time in each if time is not None] for attempt, each in times.items()}
        return {attempt: (min(each), max(each)) for attempt, each in known.items() if each}
