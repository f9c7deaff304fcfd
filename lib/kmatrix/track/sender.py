"""One tracker of one run, fed in a thread of its own: what it does, and whatever it raises, stays there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kmatrix.records import Status
from kmatrix.records.tracking import Sending, Sent
from kmatrix.redaction import redact
from kmatrix.track.alerting import Told
from kmatrix.track.feed import Batch, Feed
from kmatrix.track.values import Alert, Identity, Point, Stored, Tracker

LOOK_S = 0.5  # between two looks at files in which nothing was new
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a tracker that failed is tried again; doubled each time
DIFFERS = 1e-3  # nats by which a repeated step's loss may differ, before a person is told
LOSS = "train/loss"
ALL = frozenset({""})  # the keys of a step that is held, and of which the tracker does not say what it holds


class Sender:
    """Feeds one tracker until the attempt has ended and everything is sent.

    make: gives a new tracker each time that it has to be opened.  before: what track.json said at the start.
    ended: set when nothing is written any more.  final: gives how the run stands then.
    """

    def __init__(
        self,
        run: Identity,
        make: Callable[[], Tracker],
        *,
        name: str,
        ended: threading.Event,
        final: Callable[[], Status],
        before: Sent | None = None,
    ) -> None:
        self.name, self._run, self._make, self._ended, self._final = name, run, make, ended, final
        self._before = before
        self._told = list(before.alerts if before else ())
        self._held: dict[int, tuple[frozenset[str], float | None]] = {}  # step -> keys, training loss
        self._last: int | None = None  # the newest step that is held
        self._at_opening: dict[int, tuple[frozenset[str], float | None]] = {}  # what was held then
        self._keys: dict[frozenset[str], frozenset[str]] = {}  # one object for all steps that have the same keys
        self._devices_time, self._late_alerts = 0.0, 0
        self._state, self._error = Sending.OPEN, before.error if before else ""
        self._link, self._how = (before.link, before.how) if before else (None, None)
        self._opened = False
        self.progressed = time.monotonic()  # when something was handed over last
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether nothing more will be sent."""
        return self._state is not Sending.OPEN

    def sent(self, steps: set[int]) -> Sent:
        """Return what the tracker holds now. steps: those that there are."""
        if self._opened or self._before is None:
            held, last = len(self._held), self._last
            waiting = sum(1 for step in steps if step not in self._held)
        else:
            held, last = self._before.points, self._before.sent_step
            waiting = max(0, len(steps) - held)
        return Sent(
            tracker=self.name,
            state=self._state,
            sent_step=last,
            points=held,
            waiting=waiting,
            error=self._error,
            link=self._link,
            how=self._how,
            alerts=tuple(self._told),
        )

    def give_up(self) -> None:
        """The time is over: what was not sent waits for `make track-replay`."""
        if self._state is Sending.OPEN:
            self._forget()
            self._state = Sending.BEHIND
            self._error = self._error or "it took no more within the limit"

    def _work(self) -> None:
        pause = PAUSE_S
        while True:
            last = self._ended.is_set()
            try:
                self._session()
            except ImportError as error:
                self._fail(error)
                return
            except Exception as error:  # of other people's packages: anything
                self._say(error)
                self._forget()
                if last:
                    self._fail(error)
                    return
            else:
                self._state, self._error = Sending.DONE, ""
                return
            self._ended.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _session(self) -> None:
        """Open the tracker, hand over what it lacks, and close it at the end."""
        tracker, feed = self._make(), Feed(self._run.dir)
        self._take_stored(tracker.open(self._run))
        while True:
            ended = self._ended.is_set()
            if batch := feed.read(ended=ended):
                self._hand_over(tracker, batch)
            elif ended:
                break
            else:
                self._ended.wait(LOOK_S)
        status = self._final()
        self._hand_over(tracker, feed.read(ended=True))  # what the runner told of the end
        tracker.close(status)

    def _forget(self) -> None:
        """Count as held only what the tracker had when it was opened: what it took since then may be lost."""
        self._held = dict(self._at_opening)
        self._last = max(self._held, default=None)

    def _take_stored(self, stored: Stored) -> None:
        self._held, self._last = {}, None
        for step, values in stored.steps.items():
            self._hold(step, values or dict.fromkeys(ALL))
        self._at_opening = dict(self._held)
        self._devices_time, self._late_alerts = stored.devices_time, stored.alerts
        if not stored.alerts:
            self._told = []  # the tracker lost them, or never had one
        elif self._told:
            self._late_alerts = 0  # known by name
        self._link, self._how = stored.link, stored.how
        self._opened, self._error = True, ""
        self.progressed = time.monotonic()

    def _hand_over(self, tracker: Tracker, batch: Batch) -> None:
        if devices := [one for one in batch.devices if one.time > self._devices_time]:
            tracker.devices(devices)
            self._devices_time = devices[-1].time
        if points := [new for point in batch.points if (new := self._new(point))]:
            tracker.points(points)
            for point in points:
                self._hold(point.step, point.values)
        differing = [told for point in batch.points if (told := self._differs(point))]
        for told in [*batch.alerts, *differing]:
            self._tell(tracker, told)
        if batch:
            self.progressed = time.monotonic()

    def _new(self, point: Point) -> Point | None:
        """Return what the tracker lacks of a point; None where it has all, or nothing but what each line has."""
        keys, _ = self._held.get(point.step, (frozenset(), None))
        if keys == ALL:
            return None
        lacking = {key: value for key, value in point.values.items() if key not in keys}
        return Point(step=point.step, time=point.time, values=lacking) if lacking else None

    def _hold(self, step: int, values: Mapping[str, float | None]) -> None:
        keys, loss = self._held.get(step, (frozenset(), None))
        merged = keys.union(values)
        self._held[step] = (self._keys.setdefault(merged, merged), values.get(LOSS, loss))
        self._last = step if self._last is None else max(self._last, step)

    def _differs(self, point: Point) -> Told | None:
        """Return what is to be told of a step that a resumed attempt repeats otherwise than it was sent."""
        _, sent = self._held[point.step]
        now = point.values.get(LOSS)
        if sent is None or now is None or abs(now - sent) <= DIFFERS:
            return None
        text = f"step {point.step}: {LOSS} was sent as {sent:.4f} and is {now:.4f} since the run was resumed"
        alert = Alert(time=point.time, title=f"{self._run.name}: a repeated step differs", text=text)
        return Told(key=f"repeat|{point.values.get('attempt')}", alert=alert)

    def _tell(self, tracker: Tracker, told: Told) -> None:
        if told.key in self._told:
            return
        self._told.append(told.key)
        if self._late_alerts:  # held since a time of which nothing else is known
            self._late_alerts -= 1
            return
        self._say(f"alert: {told.alert.title}: {told.alert.text}")
        tracker.alert(told.alert)

    def _fail(self, error: Exception) -> None:
        self._state, self._error = Sending.FAILED, _words(error)

    def _say(self, what: Any) -> None:
        """Write a line to this process's log; an error is what was met last."""
        if isinstance(what, Exception):
            self._error = _words(what)
            what = f"failed: {self._error}"
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.name}: {what}", file=sys.stderr, flush=True)


def _words(error: Exception) -> str:
    """Return an error in one line of bounded length."""
    text = redact(" ".join(str(error).split())) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300] if type(error).__name__ not in text else text[:300]
