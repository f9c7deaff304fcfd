"""Find the attempts of a run in its recording, and where the recorder died and was started again within one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kmatrix.gpu.formats.binary import Recording
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.records.decode import decode_lines
from kmatrix.records.events import EventLine
from kmatrix.records.paths import RunDir
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
    starts: dict[int, int | None] = {}  # index of the first sample -> attempt of the run, by each start of the recorder
    for event in decode_lines(run_dir.gpu_events, EventLine):
        time = clock.at(event.time, event.monotonic) if event.event == STARTED else None
        if time is not None and (first := clock.index_from(time)) < len(clock):
            starts[first] = event.attempt
    found = [[0]]  # of each attempt: the first samples after the starts of its recorder
    before = starts.pop(0, None)
    for first, attempt in sorted(starts.items()):
        if attempt is not None and attempt == before:
            found[-1].append(first)
        else:
            found.append([first])
        before = attempt
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
    columns = [values for each in recording.columns if (values := each.get("energy_j")) is not None]
    steps = [values[first] - values[first - 1] for values in columns]
    known = [step for step in steps if not math.isnan(step)]
    return bool(known) and min(known) <= 0
