"""Many requests, one model: a thread that writes all their texts together, a token of each a turn."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpt2.generate import Text, Writer
from gpt2.model import GPT

# What a text says more, the last time with its `finish` set; or why it is not written to its end.
Tell = Callable[[Text, "str | Exception"], None]


class BusyError(Exception):
    """As many texts wait as may."""


@dataclass(frozen=True, slots=True)
class Job:
    text: Text
    tell: Tell


class Batcher:
    """Writes up to `rows` texts at once; up to `waiting` more wait for their turn, the first come first.

    A text may begin at any turn, so a short one never waits for a long one to end. `tell` is called in the thread
    that writes, and must not block.
    """

    def __init__(self, model: GPT, *, rows: int, waiting: int) -> None:
        self.model, self.rows, self.most_waiting = model, rows, waiting
        self._writer = Writer(model, rows)
        self._waiting: deque[Job] = deque()
        self._jobs: dict[Text, Job] = {}  # of the texts that are being written
        self._cancelled: set[Text] = set()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="texts", daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """How many texts are being written, and how many wait."""
        with self._changed:
            return len(self._jobs), len(self._waiting)

    def submit(self, texts: Sequence[Text], tell: Tell) -> None:
        """Have texts written: all of them, or none where there is no room, which is a BusyError."""
        with self._changed:
            room = self.most_waiting + self.rows - len(self._jobs) - len(self._waiting)
            if len(texts) > room or self._closing:
                raise BusyError
            self._waiting.extend(Job(text, tell) for text in texts)
            self._changed.notify()

    def cancel(self, texts: Sequence[Text]) -> None:
        """Leave off texts that nobody waits for any more; those that have ended already are no matter."""
        with self._changed:
            gone = set(texts)
            self._waiting = deque(job for job in self._waiting if job.text not in gone)
            self._cancelled |= gone & self._jobs.keys()

    def close(self) -> None:
        """Take nothing more, and end the thread after the turn that goes on."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._jobs or self._closing)
                if self._closing:
                    return
                fresh = self._turnover()
            for job in fresh:
                self._guarded([job], lambda job=job: self._writer.begin(job.text))  # type: ignore[misc]  # bound early
            if self._writer.texts:
                self._guarded(list(self._jobs.values()), self._turn)

    def _turnover(self) -> list[Job]:
        """Drop what was cancelled, and return what may begin."""
        for text in self._cancelled:
            self._writer.drop(text)
            self._jobs.pop(text, None)
        self._cancelled.clear()
        fresh = [self._waiting.popleft() for _ in range(min(self._writer.free, len(self._waiting)))]
        self._jobs.update((job.text, job) for job in fresh)
        return fresh

    def _turn(self) -> None:
        for text, said in self._writer.turn():
            job = self._jobs[text]
            if text.finish:
                with self._changed:
                    del self._jobs[text]
            if said or text.finish:
                job.tell(text, said)

    def _guarded(self, jobs: Sequence[Job], action: Callable[[], object]) -> None:
        """Do something for some texts; where it fails (memory, most of all), they alone end, and the others go on."""
        try:
            action()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            with self._changed:
                failed = [job for job in jobs if self._jobs.pop(job.text, None)]
            for job in failed:
                self._writer.drop(job.text)
                job.tell(job.text, error)
