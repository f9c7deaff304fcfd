"""How a run fails: the kind and reason of a failure, and the watchdog that detects a stalled run."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import statistics
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from gpt2 import dist
from gpt2.log import RunLog
from kmatrix.errors import DataError, KmatrixError, is_full
from kmatrix.records.files import read_json, read_or_empty, write_json
from kmatrix.records.paths import RunDir

MEMORY_WORDS = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # in a plain RuntimeError


def kind_of(error: BaseException) -> str:
    """Return the kind of a failure, as result.json names it."""
    if isinstance(error, DataError):
        return "data"
    if is_full(error):
        return "disk"
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    memory = memory or (isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS))
    return "oom" if memory else "error"


def last_line(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, KmatrixError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def describe(error: BaseException, log: RunLog) -> str:
    """Return an error in one line, with the micro-batch size if memory ran out."""
    line = last_line(error)
    if kind_of(error) != "oom" or log.config is None:
        return line
    return f"out of memory with micro-batches of {log.config.batch_size}: {line}"


def record(log: RunLog, rank: int, kind: str, reason: str) -> None:
    """Write why this rank failed. Rank 0 names the rank that failed first, if that rank left an error file."""
    if rank != 0:
        write_json(
            log.dir.rank_error(rank),
            {"rank": rank, "attempt": log.attempt, "time": time.time(), "kind": kind, "reason": reason},
        )
        return
    if first := first_error(log):
        kind, reason = str(first["kind"]), f"rank {first['rank']}: {first['reason']}"
    with suppress(OSError):  # on a full disk there may still be space for the small result
        log.event(log.step, "failed", reason)
    log.end("failed", kind, reason)


def first_error(log: RunLog) -> dict[str, Any] | None:
    """Return the earliest error of another rank in this attempt. A rank writes it before its peers can notice."""
    errors = [read_json(path) for path in (log.dir.path / "ranks").glob("*/error.json")]
    return min((e for e in errors if e["attempt"] == log.attempt), key=lambda e: float(e["time"]), default=None)


def give_up(log: RunLog, rank: int, name: str) -> NoReturn:
    """Exit a rank that was asked to stop and does not respond: nothing can be saved any more."""
    if rank == 0 and not first_error(log):
        log.event(log.step, "stop", f"received {name}, but step {log.step} did not end")
        log.end("stopped", "signal", f"stopped by {name} at step {log.step}, which did not end: no checkpoint")
    else:
        record(log, rank, "error", f"received {name}, but step {log.step} did not end")
    dist.leave(dist.EXIT_FAILED if rank else dist.EXIT_STOPPED)


def stalled(log: RunLog, rank: int, reason: str) -> NoReturn:
    """End a stalled run. Rank 0 writes the result; another rank writes its error file if rank 0 does not respond."""
    if rank == 0:
        log.event(log.step, "stall", f"{reason}; the stacks of all ranks are in {log.dir.path / 'ranks'}")
        log.end("failed", "stall", reason)
    else:
        record(log, rank, "stall", reason)
    dist.leave(dist.EXIT_FAILED)


TICK_S = 1.0


SUSPENDED_S = 5.0  # if the thread wakes up later than this, the whole process was suspended


FIRST_S = 1800.0  # limit for the first of its kind: the set-up, or a first step that compiles


RECENT = 100  # newest durations of a kind of work; their median is the usual time


SETUP, STEP, END = "set-up", "step", "end"  # kinds of work, besides gpt2.stopping.PARTS


DATA, FORWARD, BACKWARD, UPDATE, NUMBERS = "data", "forward", "backward", "update", "numbers"  # places in a step


ORDER = ("", DATA, FORWARD, BACKWARD, UPDATE, NUMBERS)


SILENT_S = 10.0  # a state older than this means that the process does not run


WAIT_S = 3.0  # time for the other ranks to write their stacks


TURN_S = 15.0  # then another rank takes rank 0's role


STOPPED = "its process is stopped"


STACKS_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """Where a rank is in the training loop."""

    rank: int
    step: int
    kind: str  # of work
    place: str  # within a step
    stuck: str = ""  # why the process cannot run
    line: str = ""  # innermost Python frame

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, ORDER.index(self.place) if self.place in ORDER else 0

    def __str__(self) -> str:
        """Describe the position. A suspended process is described by its last report."""
        place = self.place if self.kind == STEP else self.kind
        text = f"{'last seen ' if self.stuck else ''}in {place or self.kind} of step {self.step}"
        return " ".join([text, *(f"({word})" for word in (self.stuck, self.line) if word)])


class Watchdog:
    """Detects a stalled rank. `work` and `at` are called by the loop; all other methods run in the watchdog's thread.

    stalled: ends the run; called with a description.
    """

    def __init__(self, log: RunLog, *, rank: int, size: int, stalled: Callable[[str], object]) -> None:
        self._dir, self._attempt, self._rank, self._size = log.dir, log.attempt, rank, size
        self._stalled = stalled
        self._factor, self._floor_s = 0.0, 0.0
        self._kind, self._place, self._step = SETUP, "", 0
        self._began = time.monotonic()
        self._took: dict[str, deque[float]] = {}
        self._over = threading.Event()
        self.spent: Callable[[], float] | None = None  # seconds of the run in all attempts, once known
        self.spent_before = spent_before(self._dir, self._attempt)
        self._dir.rank(rank).mkdir(parents=True, exist_ok=True)
        stacks = self._dir.rank_stacks(rank)
        if _size(stacks):
            stacks.replace(self._dir.rank_stacks(rank, self._attempt - 1))  # of an earlier attempt that stalled
        self._stacks = stacks.open("w", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, *, factor: float, floor_s: float) -> None:
        """Start to enforce limits. Until then only the rank's state is written.

        factor: multiple of the usual time of a kind of work after which it counts as stalled; 0: never.
        floor_s: minimum of every limit, in seconds.
        """
        self._floor_s, self._factor = floor_s, factor

    def work(self, kind: str, step: int) -> None:
        """Record that a piece of work starts, and that the previous one has ended."""
        now = time.monotonic()
        took = self._took.get(self._kind)
        if took is None:
            took = self._took[self._kind] = deque(maxlen=RECENT)
        took.append(now - self._began)
        self._kind, self._place, self._step, self._began = kind, "", step, now

    def at(self, place: str) -> None:
        """Record where in a step the loop is."""
        self._place = place

    def end(self) -> None:
        """Stop watching. An empty file of stacks is deleted."""
        self._over.set()
        faulthandler.unregister(STACKS_SIGNAL)
        self._stacks.close()
        path = self._dir.rank_stacks(self._rank)
        if not _size(path):
            path.unlink(missing_ok=True)

    def limit_s(self) -> float | None:
        """Return the time limit of the current piece of work in seconds; None: no limit."""
        if not self._factor:
            return None
        took = list(self._took.get(self._kind, ()))
        if not took:
            return max(FIRST_S, self._floor_s)
        usual = statistics.median(took[1:] or took)
        return max(self._floor_s, self._factor * usual)

    def _watch(self) -> None:
        last = time.monotonic()
        self._write_state(0.0)  # at once, so that a rank that freezes before its first tick can be continued
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            if now - last > TICK_S + SUSPENDED_S:
                self._began += now - last
            last = now
            limit, age = self.limit_s(), now - self._began
            self._write_state(age)
            if limit is not None and age > limit:
                self._end_run(age, limit)

    def _write_state(self, age: float) -> None:
        with suppress(OSError):
            write_json(
                self._dir.rank_state(self._rank),
                {
                    "rank": self._rank,
                    "attempt": self._attempt,
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "time": time.time(),
                    "step": self._step,
                    "work": self._kind,
                    "place": self._place,
                    "age_s": age,
                    "spent_s": self._spent_s() if self._rank == 0 else None,
                },
                durable=False,
            )

    def _spent_s(self) -> float:
        """Return the seconds that the run has taken; before this attempt knows, those of earlier attempts."""
        return self.spent() if self.spent else self.spent_before

    def _end_run(self, age: float, limit: float) -> None:
        """Write the stacks and end the run: rank 0 first, another rank if rank 0 does not."""
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        if self._over.wait(WAIT_S if self._rank == 0 else TURN_S + self._rank):
            return  # the loop continued and ended
        states = {rank: _state(self._dir, rank, self._attempt) for rank in range(self._size)}
        # before _request_stacks, which continues stopped processes
        stuck = {rank: _why_stuck(state) for rank, state in states.items()}
        without_stacks = [rank for rank, state in states.items() if state and not _size(self._dir.rank_stacks(rank))]
        for rank in without_stacks:
            _request_stacks(states[rank])
        until = time.monotonic() + TICK_S
        while time.monotonic() < until and not all(_size(self._dir.rank_stacks(rank)) for rank in without_stacks):
            time.sleep(0.02)
        ranks = [_position(self._dir, rank, state, stuck[rank]) for rank, state in states.items()]
        self._stalled(f"no progress for {age:.0f} s (limit {limit:.0f} s): {describe_ranks(ranks)}")


def describe_ranks(ranks: Sequence[RankPosition]) -> str:
    """Describe which ranks are late, and where every rank is. Ranks at the same place are listed together."""
    late = [one.rank for one in lagging(ranks)]
    places: dict[str, list[int]] = {}
    for one in sorted(ranks, key=lambda one: one.rank not in late):
        places.setdefault(str(one), []).append(one.rank)
    parts = []
    for place, numbers in places.items():
        several = len(numbers) > 1
        names = f"rank{'s' if several else ''} {', '.join(map(str, numbers))} {'are' if several else 'is'}"
        parts.append(f"{names} {'late, ' if numbers[0] in late else ''}{place}")
    return "; ".join(parts)


def lagging(ranks: Sequence[RankPosition]) -> list[RankPosition]:
    """Return the late ranks: those that cannot run, else those with the least progress.

    Return [] if all are at the same place.
    """
    least = min(one.progress for one in ranks)
    for behind in ([one for one in ranks if one.stuck], [one for one in ranks if one.progress == least]):
        if 0 < len(behind) < len(ranks):
            return behind
    return []


def innermost(stacks: str) -> str:
    """Return the innermost frame of the main thread in a faulthandler dump, as "file:line in function"."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    found = re.search(r'File "([^"]+)", line (\d+) in (\S+)', threads[-1])
    return f"{Path(found[1]).name}:{found[2]} in {found[3]}" if found else ""


def spent_before(run_dir: RunDir, attempt: int) -> float:
    """Return the seconds that earlier attempts took, from rank 0's state file; 0 if there is none."""
    state = read_or_empty(run_dir.rank_state(0))
    return float(state.get("spent_s") or 0.0) if int(state.get("attempt", attempt)) < attempt else 0.0


def _state(run_dir: RunDir, rank: int, attempt: int) -> dict[str, Any]:
    """Return the state that a rank wrote last in this attempt, or {}."""
    state = read_or_empty(run_dir.rank_state(rank))
    return state if state.get("attempt") == attempt else {}


def _position(run_dir: RunDir, rank: int, state: dict[str, Any], stuck: str) -> RankPosition:
    stacks = run_dir.rank_stacks(rank)
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.exists() else ""
    return RankPosition(
        rank=rank,
        step=int(state.get("step", 0)),
        kind=str(state.get("work", SETUP)),
        place=str(state.get("place", "")),
        stuck=stuck,
        line="" if stuck == STOPPED else innermost(text),  # a stopped process continues before it writes its stacks
    )


def _size(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _why_stuck(state: dict[str, Any]) -> str:
    if not state:
        return "it wrote no state"
    if state["host"] == socket.gethostname() and (letter := _process_letter(int(state["pid"]))) in ("T", "Z", ""):
        return "its process is gone" if letter != "T" else STOPPED
    return "its process does not run" if time.time() - float(state["time"]) > SILENT_S else ""


def _process_letter(pid: int) -> str:
    """Return the kernel's state letter of a process, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _request_stacks(state: dict[str, Any]) -> None:
    """Make a process on this machine write its stacks. A stopped process is continued, because it must run for that."""
    if state["host"] != socket.gethostname():
        return
    with suppress(OSError):
        stopped = _process_letter(int(state["pid"])) == "T"
        os.kill(int(state["pid"]), STACKS_SIGNAL)
        if stopped:
            os.kill(int(state["pid"]), signal.SIGCONT)
