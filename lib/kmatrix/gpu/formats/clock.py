"""The time base of a recording: seconds that never go back, whatever happens to the clock of the machine."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import sub

from kmatrix.gpu.formats.binary import Recording

SLACK_S = 5.0  # two readings of both clocks belong to the same boot if their difference changed by less than this


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive samples by one clock, which did not go back."""

    first: int  # index of the first sample
    last: int  # index of the last sample
    begin: float  # reading of the clock at the first sample, s
    shift: float  # recording time - reading of the clock, s


class RecordingClock:
    """The recording time of each sample: seconds since the first one, ascending.

    It follows the monotonic time of the samples, which restarts when the machine boots, and is another one when a job
    starts again on another host. Where it restarts, goes back or is replaced, the time in between is that of the wall
    clock, and nothing if the wall clock went back too.
    """

    def __init__(self, recording: Recording) -> None:
        self._times, self._monotonic = recording.times, recording.monotonic
        raw = self._monotonic
        self._pieces = list(_pieces(raw, self._times))
        if len(self._pieces) == 1:
            self._raw, self._zero = raw, raw[0]  # nothing is copied: a recording may have millions of samples
        else:
            shifted = (raw[at] + piece.shift for piece in self._pieces for at in range(piece.first, piece.last + 1))
            self._raw, self._zero = array("d", shifted), 0.0

    @cached_property
    def _wall_pieces(self) -> list[_Piece]:
        """The ranges of samples in which the wall clock ascends: a pass over all of them."""
        return list(_pieces(self._times, self._times))

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def length(self) -> float:
        """The time of the last sample in s; 0 without samples."""
        return self.of(len(self) - 1) if len(self) else 0.0

    def of(self, index: int) -> float:
        """Return the recording time of a sample in s."""
        return self._raw[index] - self._zero

    def between(self, begin: int, end: int) -> list[float]:
        """Return the recording times of the samples begin to end - 1 in s."""
        zero = self._zero
        return [value - zero for value in self._raw[begin:end]]

    def index_from(self, seconds: float) -> int:
        """Return the index of the first sample at or after a recording time; the number of samples if there is none."""
        return bisect_left(self._raw, seconds + self._zero)

    def index_after(self, seconds: float) -> int:
        """Return the index of the first sample after a recording time; the number of samples if there is none."""
        return bisect_right(self._raw, seconds + self._zero)

    def at(self, wall: float, monotonic: float | None = None) -> float | None:
        """Return the recording time at which both clocks had these readings; None if that is unknown.

        `wall`: Unix s. `monotonic`: s, None if it was not recorded. The result may be before or after all samples.
        """
        if not self._pieces:
            return None
        if monotonic is None:
            return self._at_wall(wall)
        if len(self._pieces) == 1:  # a single boot: there is no choice to make
            return monotonic + self._pieces[0].shift
        # The difference of both clocks identifies the boot: the monotonic time starts near 0 at each.
        offset = wall - monotonic
        piece = min(self._pieces, key=lambda one: abs(self._offset(one) - offset))
        # After a change of the wall clock no piece may fit.
        if abs(self._offset(piece) - offset) > SLACK_S:
            return None
        return monotonic + piece.shift

    def _offset(self, piece: _Piece) -> float:
        return self._times[piece.first] - self._monotonic[piece.first]

    def _at_wall(self, wall: float) -> float | None:
        """Return the recording time of the nearest sample that the wall clock passed, the latest if several did."""
        runs = self._wall_pieces
        for run in reversed(runs):
            if run.begin <= wall and (run is runs[-1] or wall <= self._times[run.last]):
                index = bisect_right(self._times, wall, lo=run.first, hi=run.last + 1) - 1
                return self.of(index) + wall - self._times[index]
        # Before the first sample, or in a gap. A time before everything is one of the launch.
        return self.of(0) + wall - self._times[0] if len(runs) == 1 else None


def _pieces(raw: Sequence[float], times: Sequence[float]) -> Iterator[_Piece]:
    """Yield the ranges of samples in which `raw` ascends, and is one clock. times: Unix s."""
    if not len(raw):
        return
    breaks = [0]
    # In C, and copied first: a recording of a day has two million samples, and views are slow to read.
    values = list(raw)
    steps = list(map(sub, islice(values, 1, None), values)) or [0.0]
    # The sum is NaN if a value is: the minimum and the maximum may not be.
    if math.isnan(sum(steps)) or min(steps) < 0 or max(steps) > SLACK_S:
        breaks += [at for at in range(1, len(raw)) if raw[at] < raw[at - 1] or _is_replaced(raw, times, at)]
    time = 0.0
    for first, end in zip(breaks, [*breaks[1:], len(raw)], strict=True):
        if first:
            gap = times[first] - times[first - 1]
            time += max(0.0, gap) if math.isfinite(gap) else 0.0
        yield _Piece(first=first, last=end - 1, begin=raw[first], shift=time - raw[first])
        time += raw[end - 1] - raw[first]


def _is_replaced(raw: Sequence[float], times: Sequence[float], at: int) -> bool:
    """Return whether a sample after a pause has the clock of another host, which has been up for longer or shorter.

    Within a pause, a wall clock that is set on the same host looks the same, and counts, too.
    """
    gap = raw[at] - raw[at - 1]
    return gap > SLACK_S and not abs(times[at] - times[at - 1] - gap) <= SLACK_S
