"""The recordings of a run's attempts on one time: attempts on other devices have files of their own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import pairwise
from operator import sub

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import Recording, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.recorder.summary import GAP_S
from kmatrix.records.paths import RunDir

MAX_PIECES = 64  # of a recording; of more, only the longest gaps divide it


@dataclass(frozen=True, slots=True)
class RecordingPart:
    """One of the recordings of a run or node. begin: its start in s since the start of the first one."""

    recording: Recording
    clock: RecordingClock
    begin: float

    def pieces(self) -> list[tuple[int, int]]:
        """Return the ranges of samples (first, end) between the gaps of the recording."""
        times = self.clock.between(0, len(self.clock))
        steps = list(map(sub, times[1:], times))
        limit = gap_s(self.recording)
        gaps = [at for at, step in enumerate(steps, 1) if step > limit]
        if len(gaps) >= MAX_PIECES:
            gaps = sorted(sorted(gaps, key=lambda at: steps[at - 1])[-(MAX_PIECES - 1) :])
        return list(pairwise([0, *gaps, len(times)]))


def gap_s(recording: Recording) -> float:
    """Return the longest time in s between two samples of an attempt: a longer one is a gap."""
    return max(GAP_S, 2 / float(recording.header.get("hz") or 1.0))


def read_parts(folder: RunDir) -> list[RecordingPart]:
    """Return the recordings of a run or node, oldest first; none if the last one is missing, damaged or too new.

    Earlier ones that are damaged are left out.
    """
    found: list[RecordingPart] = []
    for path in (*folder.earlier_gpu_samples(), folder.gpu_samples):
        with contextlib.suppress(RecordError):
            recording = read_samples(path)
            if len(recording):
                begin = found[-1].begin + _seconds_between(found[-1], recording) if found else 0.0
                found.append(RecordingPart(recording, RecordingClock(recording), begin))
                continue
        if path == folder.gpu_samples:
            return []
    return found


def _seconds_between(before: RecordingPart, after: Recording) -> float:
    """Return the time between the starts of two recordings of a run, s: only the wall clock knows it."""
    return max(before.clock.length, after.times[0] - before.recording.times[0])
