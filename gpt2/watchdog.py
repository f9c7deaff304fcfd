"""The watchdog of a rank: it ends a run that hangs, records where the rank is, and why it failed."""

from __future__ import annotations

import faulthandler
import socket
import statistics
import threading
import time
import traceback
from collections import defaultdict, deque
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from gpt2 import dist
from gpt2.checkpoint import out_of_memory
from gpt2.log import RunLog
from gpt2.stopping import NotFiniteError
from kmatrix.errors import DataError, KmatrixError, is_full
from kmatrix.records.files import write_json

SETUP, END = "set-up", "end"  # kinds of work, besides those of gpt2.stopping
FIRST_S = 1800.0  # limit for the first of its kind: the set-up, or a first step that compiles
FLOOR_S = 300.0  # of every limit: a slow disk can delay short steps
RECENT = 100  # newest durations of a kind of work; their median is the usual time
EVERY_S = 1.0  # between two states, and between two settings of the timer


class Watchdog:
    """Ends this rank with the stacks of its threads if a piece of work takes far longer than usual.

    The timer is faulthandler's: a thread in C, which also ends a process that holds the GIL. If one rank hangs, the
    others wait for it, and each ends by its own timer; the runner reads which of them has done least.
    """

    def __init__(self, log: RunLog, rank: int) -> None:
        self.took: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=RECENT))  # seconds, by kind
        self._log, self._rank = log, rank
        place = {"attempt": log.attempt, "rank": rank, "host": socket.gethostname()}
        self._state: dict[str, Any] = {**place, "step": 0, "work": SETUP, "place": "", "kind": None, "reason": None}
        self._factor = 0.0
        self._began = time.monotonic()
        self._limit, self._armed = 0.0, 0.0  # of the timer, s, and when it was set
        self._over = threading.Event()
        log.dir.rank(rank).mkdir(parents=True, exist_ok=True)
        self._path = log.dir.rank(rank) / f"stacks_{log.attempt}.txt"
        self._stacks = self._path.open("w", encoding="utf-8")
        self._write_state()

    def begin(self, factor: float) -> None:
        """Start the timer. factor: multiple of the usual time of a kind of work at which it ends; 0: never."""
        self._factor = factor
        if factor:
            self.progress()
            # A thread, because a loop that hangs must have its last place in the file, however short its steps are.
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def work(self, kind: str, step: int) -> None:
        """Record that a piece of work starts, and that the one before has ended."""
        now = time.monotonic()
        self.took[self._state["work"]].append(now - self._began)
        self._began = now
        self._state.update(work=kind, step=step, place="")
        self.progress()

    def at(self, place: str) -> None:
        """Record where in a step the loop is."""
        self._state["place"] = place

    def progress(self) -> None:
        """Start the time of the current work again, at most once per second."""
        if not self._factor:
            return
        now, took = time.monotonic(), list(self.took[self._state["work"]])
        usual = statistics.median(took[1:] or took or [0.0])  # without the first, which may have compiled
        limit = max(FLOOR_S, self._factor * usual) if took else FIRST_S
        if limit != self._limit or now - self._armed > EVERY_S:
            self._limit, self._armed = limit, now
            faulthandler.dump_traceback_later(limit, exit=True, file=self._stacks)

    def end(self) -> None:
        """Stop the timer."""
        if self._factor:
            faulthandler.cancel_dump_traceback_later()
        self._over.set()
        self._stacks.close()
        self._path.unlink(missing_ok=True)

    def fail(self, error: Exception) -> NoReturn:
        """Record why this rank failed and exit. Other ranks may be gone: it does not wait for them."""
        try:
            with suppress(OSError):
                self.end()
            self.record(kind_of(error), one_line(error))
        finally:  # on a full disk, nothing may be left to write a reason to
            dist.exit_now(dist.EXIT_FAILED)

    def record(self, kind: str, reason: str) -> None:
        """Write why this rank failed. Which one failed first is for `kmatrix run` to find out."""
        self._state.update(kind=kind, reason=reason)
        self._write_state()
        if self._rank:
            return
        with suppress(OSError):  # on a full disk there may still be space for the small result
            self._log.event(self._log.step, "failed", reason)
        self._log.end("failed", kind=kind, reason=reason)

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self._write_state()

    def _write_state(self) -> None:
        # A full disk ends no training for a state. Not durable: an fsync per second would slow checkpoints down.
        with suppress(OSError):
            value = {**self._state, "time": time.time()}
            write_json(self._log.dir.rank(self._rank) / "state.json", value, durable=False, parents=False)


def kind_of(error: BaseException) -> str:
    """Return the kind of a failure, as result.json names it."""
    if isinstance(error, DataError | NotFiniteError):
        return "data" if isinstance(error, DataError) else "nan"
    return "disk" if is_full(error) else "oom" if out_of_memory(error) else "error"


def one_line(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, KmatrixError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
