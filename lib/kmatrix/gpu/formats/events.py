"""Throttling and XID errors over time, from the events in gpu_events.jsonl, read incrementally."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from kmatrix.records.events import EventLine
from kmatrix.records.files import LineTail

# nvmlClocksEventReasons: the bits that reduce the clocks below what was requested. The names are on disk.
# Source: NVML API reference, "NvmlClocksEventReasons".
THROTTLE = (
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x20, "heat (software)"),
    (0x40, "heat (hardware)"),
    (0x80, "power brake"),
)


REASONS = tuple(reason for _, reason in THROTTLE)
TimeOf = Callable[[float, float | None], float | None]  # Unix s, monotonic s or None -> time, None if unknown
KINDS = ("started", "lost", "found", "throttle", "xid")  # the events that change the state of a GPU


class GpuEvents:
    """The throttle reasons and XID errors of each GPU at any time of a recording."""

    def __init__(self, path: Path, gpus: tuple[int, ...], time_of: TimeOf = lambda wall, _: wall) -> None:
        """Read no event yet. `time_of`: converts the Unix and monotonic time of an event, by default to Unix s."""
        self._tail, self._gpus, self._time_of = LineTail(path, EventLine), gpus, time_of
        self._applied = 0  # number of lines applied to `_now`
        self._lines: list[tuple[float, EventLine]] = []
        self._now: dict[int, tuple[str, ...]] = {}
        self._xids: dict[int, dict[int, int]] = {}
        self._attempt: int | None = None  # of the run, None: unknown

    def throttle(self, at: float) -> Mapping[int, tuple[str, ...]]:
        """Return GPU index -> active reasons at a time, math.inf for now. Lost and unknown GPUs are absent."""
        self._move(at)
        return dict(self._now)

    def xids(self, at: float) -> Mapping[int, Mapping[int, int]]:
        """Return GPU index -> code -> number of XID errors of the attempt at a time, until then."""
        self._move(at)
        return {gpu: dict(counts) for gpu, counts in self._xids.items()}

    def _move(self, at: float) -> None:
        """Apply the events up to a time."""
        self._read()
        # A replay can seek backwards: events cannot be undone, so they are applied again from the start.
        if self._applied and self._lines[self._applied - 1][0] > at:
            self._applied, self._now, self._xids, self._attempt = 0, {}, {}, None
        while self._applied < len(self._lines) and self._lines[self._applied][0] <= at:
            self._apply(self._lines[self._applied][1])
            self._applied += 1

    def _apply(self, line: EventLine) -> None:
        gpu = line.gpu_index
        if line.event == "started":
            self._now = dict.fromkeys(self._gpus, ())
            if line.attempt is None or line.attempt != self._attempt:  # otherwise only the recorder was restarted
                self._xids = {}
            self._attempt = line.attempt
        elif gpu is None:
            return
        elif line.event == "lost":
            self._now.pop(gpu, None)
        elif line.event == "xid":
            if line.xid is not None:
                counts = self._xids.setdefault(gpu, {})
                counts[line.xid] = counts.get(line.xid, 0) + line.xid_count
        else:
            # The text is "throttled: A, B". No reason is part of another one, so a search is enough.
            self._now[gpu] = tuple(reason for reason in REASONS if reason in (line.text or ""))

    @property
    def known(self) -> bool:
        """True if there were events up to the last requested time; otherwise, an absent GPU is not necessarily lost."""
        return self._applied > 0

    def _read(self) -> None:
        """Append the events that were written since the last call."""
        # Without the file, or while it cannot be read, throttling is unknown; the screen shows the rest.
        with contextlib.suppress(OSError):
            while found := self._tail.read():
                for _, line in found:
                    if line.event in KINDS:
                        self._lines.append((self._time(line), line))

    def _time(self, line: EventLine) -> float:
        """Return the time of an event, at least that of the one before."""
        time = self._time_of(line.time, line.monotonic)
        # The order of the lines is right whatever the clock of the machine did.
        before = self._lines[-1][0] if self._lines else -math.inf
        return before if time is None else max(before, time)
