"""How a run fails: the kind and reason of a failure, and the watchdog that detects a stalled run."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Self

from gpt2 import dist
from gpt2.checkpoint.contents import out_of_memory
from gpt2.log import RunLog
from kmatrix.errors import DataError, KmatrixError, is_full
from kmatrix.own_file import open_own
from kmatrix.records.decode import as_json, decode_optional
from kmatrix.records.files import write_json
from kmatrix.records.lock import Process, stat_fields, this_process
from kmatrix.records.paths import RunDir
from kmatrix.records.states import LOST_PEER, RankErrorFile, RankStateFile, first_rank_error, read_rank_errors

# The watchdog
TICK_S = 1.0  # between two looks at the loop
SUSPENDED_S = 5.0  # if the thread wakes up later than this, the whole process was suspended
FIRST_S = 1800.0  # limit for the first of its kind: the set-up, or a first step that compiles
RECENT = 100  # newest durations of a kind of work; their median is the usual time
SETUP, STEP, END = "set-up", "step", "end"  # kinds of work, besides gpt2.stopping.PARTS
DATA, FORWARD, BACKWARD, UPDATE, NUMBERS = "data", "forward", "backward", "update", "numbers"  # places in a step
ORDER = ("", DATA, FORWARD, BACKWARD, UPDATE, NUMBERS)  # of the places, to compare the progress of ranks
SILENT_S = 10.0  # a state that is not rewritten for this long means that the process does not run
WAIT_S = 3.0  # time for the other ranks to write their stacks
ANSWER_S = 10.0  # time for a rank whose Python does not run, after it was asked for its stacks
TURN_S = 25.0  # then another rank takes rank 0's role; longer than SILENT_S and ANSWER_S, which rank 0 may wait
STOPPED = "its process is stopped"
SIGNAL = "signal"  # the kind of a stop, in results and error files
STACKS_SIGNAL = signal.SIGUSR2  # SIGUSR1 asks for a checkpoint and a stop
_last = threading.Lock()  # held by the thread that ends this process


def kind_of(error: BaseException) -> str:
    """Return the kind of a failure, as result.json names it."""
    if isinstance(error, DataError):
        return "data"
    if is_full(error):
        return "disk"
    return "oom" if out_of_memory(error) else "error"


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
    """Write why this rank failed. Rank 0 names the rank that failed first, if that rank left an error file.

    kind: SIGNAL if the rank was asked to stop and could not. Then the run is stopped, not failed.
    """
    if rank != 0:  # one file per rank, because several fail at once: only rank 0 writes the result
        host = socket.gethostname()
        error = RankErrorFile(rank=rank, attempt=log.attempt, time=time.time(), kind=kind, reason=reason, host=host)
        write_json(log.dir.rank_error(rank), as_json(error))
        return
    # Rank 0 often fails only because its peer is gone ("connection closed by peer"): that is not the cause.
    if first := first_error(log):
        kind, reason = first.kind or "error", first.describe(socket.gethostname())
    is_stop = kind == SIGNAL  # the run can be continued from its last checkpoint
    with suppress(OSError):  # on a full disk there may still be space for the small result
        log.event(log.step, "stop" if is_stop else "failed", reason)
    log.end("stopped" if is_stop else "failed", kind, reason)


def first_error(log: RunLog) -> RankErrorFile | None:
    """Return the error of the rank that failed first in this attempt. It is written before the peers can notice."""
    # Earlier attempts left theirs.
    return first_rank_error([error for _, error in read_rank_errors(log.dir) if error.attempt == log.attempt])


@contextmanager
def ending(code: int) -> Iterator[None]:
    """Exit this process after the block, also if it fails: on a full disk, nothing may be left to write a reason to.

    The loop, the watchdog and the thread of the signals may all end this rank, at the same time: only the first does.
    """
    with _last:
        try:
            yield
        finally:
            dist.exit_now(code)


def fail(log: RunLog, rank: int, error: Exception) -> NoReturn:  # type: ignore[misc]  # `ending` does not return
    """Record why this rank failed and exit. Other ranks may be gone: it does not wait for them."""
    with ending(dist.EXIT_FAILED):
        record(log, rank, kind_of(error), describe(error, log))


def give_up(log: RunLog, rank: int, name: str) -> NoReturn:  # type: ignore[misc]
    """Exit a rank that was asked to stop and does not respond: nothing can be saved any more."""
    # Ranks notice it at the same time, each by its own clock: whichever is first, the reason is the stop.
    with ending(dist.EXIT_FAILED if rank else dist.EXIT_STOPPED):
        record(log, rank, SIGNAL, f"stopped by {name} at step {log.step}, which did not end: no checkpoint")


def stalled(log: RunLog, rank: int, reason: str) -> NoReturn:  # type: ignore[misc]
    """End a stalled run. Rank 0 writes the result; another rank writes its error file if rank 0 does not respond."""
    with ending(dist.EXIT_FAILED):
        first = first_error(log)
        if rank == 0:
            with suppress(OSError):
                log.event(log.step, "stall", f"{reason}; the stacks of all ranks are in {log.dir.path / 'ranks'}")
        # A rank that failed by itself is why the others wait for it. The stall tells more than a lost connection.
        if rank == 0 and (first is None or LOST_PEER.search(first.reason or "")):
            log.end("failed", "stall", reason)
        else:
            record(log, rank, "stall", reason)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state file that a rank wrote last."""

    process: Process
    time: float  # Unix seconds
    step: int
    kind: str  # of work
    place: str  # within a step
    counter: int | None = None  # grows with each write


class Watchdog:
    """Detects a stalled rank. `work` and `at` are called by the loop; all other methods run in the watchdog's thread.

    stalled: ends the run; called with a description.
    """

    def __init__(self, log: RunLog, *, rank: int, size: int, stalled: Callable[[str], object]) -> None:
        self._dir, self._attempt, self._rank, self._size = log.dir, log.attempt, rank, size
        self._stalled = stalled
        self._factor, self._floor_s = 0.0, 0.0
        # The loop writes these, and the thread reads them without a lock: each assignment is atomic, and the loop must
        # not pay for the watchdog several times per step.
        self._kind, self._place, self._step = SETUP, "", 0
        self._began = time.monotonic()
        self._took: dict[str, deque[float]] = {}
        self._process = this_process()
        self._counter = 0  # of states that were written
        self._over = threading.Event()
        self._stacks_lock = threading.Lock()  # the loop may end while the thread writes stacks
        self.spent: Callable[[], float] | None = None  # seconds of the run in all attempts, once known
        self.spent_before = spent_before(self._dir, self._attempt)
        self._dir.rank(rank).mkdir(parents=True, exist_ok=True)
        stacks = self._dir.rank_stacks(rank)
        if _size(stacks):
            stacks.replace(self._dir.rank_stacks(rank, self._attempt - 1))  # of an earlier attempt that stalled
        # Opened now: the handler is C code that only writes to a descriptor. It works while another thread holds the
        # GIL, so it also shows a rank whose Python does not run.
        self._stacks = os.fdopen(open_own(stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        # A daemon, because the process must be able to end while the thread waits.
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
        # The start first: a long evaluation's start with a step's limit would look like a stalled step to the thread.
        self._began = now
        self._kind, self._place, self._step = kind, "", step

    def progress(self) -> None:
        """Record that a piece of work of many parts goes on: its limit counts from now."""
        self._began = time.monotonic()

    def at(self, place: str) -> None:
        """Record where in a step the loop is."""
        self._place = place

    def end(self) -> None:
        """Stop watching. An empty file of stacks is deleted."""
        self._over.set()
        with self._stacks_lock:
            faulthandler.unregister(STACKS_SIGNAL)  # before the file is closed: its descriptor may be reused
            self._stacks.close()
        path = self._dir.rank_stacks(self._rank)
        if not _size(path):
            path.unlink(missing_ok=True)

    def limit_s(self) -> float | None:
        """Return the time limit of the current piece of work in seconds; None: no limit."""
        if not self._factor:
            return None
        took = list(self._took.get(self._kind, ()))  # a copy, because the loop appends meanwhile
        if not took:
            return max(FIRST_S, self._floor_s)
        usual = statistics.median(took[1:] or took)  # without the first, which may have compiled
        return max(self._floor_s, self._factor * usual)

    def _watch(self) -> None:
        last = time.monotonic()
        self._write_state(0.0)  # at once, so that a rank that freezes before its first tick can be continued
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            # The thread slept longer than it asked for, so the process was stopped, or the machine: nothing has hung.
            if now - last > TICK_S + SUSPENDED_S:
                self._began += now - last
            last = now
            began = self._began  # before the limit, as `work` writes them
            limit, age = self.limit_s(), now - began
            self._write_state(age)
            if limit is not None and age > limit:
                self._end_run(began, age, limit)
                last = time.monotonic()  # it waited for other ranks: the process was not suspended

    def _write_state(self, age: float) -> None:
        # On a full disk the state is outdated for a while; the training must not end for it. Not durable, because an
        # fsync per second would slow down checkpoints, and no reader needs the state after a crash of the machine.
        self._counter += 1
        record = {
            "rank": self._rank,
            "attempt": self._attempt,
            **asdict(self._process),
            "time": time.time(),
            "counter": self._counter,
            "step": self._step,
            "work": self._kind,
            "place": self._place,
            "age_s": age,
            "spent_s": self._spent_s() if self._rank == 0 else None,
        }
        with suppress(OSError):
            write_json(self._dir.rank_state(self._rank), record, durable=False, parents=False)

    def _spent_s(self) -> float:
        """Return the seconds that the run has taken; before this attempt knows, those of earlier attempts."""
        return self.spent() if self.spent else self.spent_before

    def _end_run(self, began: float, age: float, limit: float) -> None:
        """Write the stacks and end the run: rank 0 first, another rank if rank 0 does not.

        began: start of the piece of work that takes too long. If it ends meanwhile, the run goes on.
        """
        with self._stacks_lock:
            if self._over.is_set() or self._began != began:
                return
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        # Ranks notice a hang at about the same time. Rank 0 waits for their stacks, the others for rank 0, one by one:
        # the first that is able to ends the run, and the result is written once.
        before, since = self._states(), time.monotonic()
        if self._continues(began, WAIT_S if self._rank == 0 else TURN_S + self._rank):
            return
        states = self._states()
        # A rank on another host runs if its state goes on. Its storage may show that late.
        while time.monotonic() - since < SILENT_S and any(_is_silent(before[rank], states[rank]) for rank in states):
            if self._continues(began, TICK_S):
                return
            states = self._states()
        # before _request_stacks, which continues stopped processes
        stuck = {rank: _why_stuck(state, before[rank]) for rank, state in states.items()}

        # Ranks whose Python does not run have written nothing: ask their signal handlers
        without_stacks = {
            rank: state for rank, state in states.items() if state and not _size(self._dir.rank_stacks(rank))
        }
        for state in without_stacks.values():
            _request_stacks(state.process)
        answers = (rank for rank, state in states.items() if state and not state.process.died_here())
        _wait_until_written([self._dir.rank_stacks(rank) for rank in answers], ANSWER_S)
        ranks = [_position(self._dir, rank, state, stuck[rank]) for rank, state in states.items()]
        with self._stacks_lock:  # from here on, the loop does not end: its result would replace this one, or be lost
            if not self._over.is_set():
                self._stalled(f"no progress for {age:.0f} s (limit {limit:.0f} s): {describe_ranks(ranks)}")

    def _continues(self, began: float, seconds: float) -> bool:
        """Wait, and return whether the loop ended, or the piece of work that began then: this rank does not hang."""
        if self._over.wait(seconds):
            return True
        if self._began == began:
            return False
        with self._stacks_lock:  # a later hang has its own stacks
            if not self._over.is_set():
                os.ftruncate(self._stacks.fileno(), 0)
                os.lseek(self._stacks.fileno(), 0, os.SEEK_SET)
        return True

    def _states(self) -> dict[int, RankState | None]:
        """Return the newest state of each rank."""
        return {rank: _state(self._dir, rank, self._attempt) for rank in range(self._size)}


def describe_ranks(ranks: Sequence[RankPosition]) -> str:
    """Describe which ranks are late, and where every rank is. Ranks at the same place are listed together."""
    late = [position.rank for position in lagging(ranks)]
    places: dict[str, list[int]] = {}
    for position in sorted(ranks, key=lambda position: position.rank not in late):
        places.setdefault(str(position), []).append(position.rank)
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
    # A suspended rank explains why all others wait, even if they have less progress by a place.
    least = min(position.progress for position in ranks)
    stuck = [position for position in ranks if position.stuck]
    slowest = [position for position in ranks if position.progress == least]
    return next((late for late in (stuck, slowest) if 0 < len(late) < len(ranks)), [])


def innermost(stacks: str) -> str:
    """Return the innermost frame of the main thread in a faulthandler dump, as "file:line in function"."""
    # faulthandler writes the newest thread first, so the main thread is the last one.
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    found = re.search(r'File "([^"]+)", line (\d+) in (\S+)', threads[-1])
    return f"{Path(found[1]).name}:{found[2]} in {found[3]}" if found else ""


def spent_before(run_dir: RunDir, attempt: int) -> float:
    """Return the seconds that earlier attempts took, from rank 0's state file; 0 if there is none."""
    state = decode_optional(run_dir.rank_state(0), RankStateFile)
    return state.spent_s or 0.0 if state is not None and state.attempt < attempt else 0.0


def _state(run_dir: RunDir, rank: int, attempt: int) -> RankState | None:
    """Return the state that a rank wrote last in this attempt, or None."""
    with suppress(OSError):
        os.listdir(run_dir.rank(rank))  # noqa: PTH208  (network storage then knows new names and new files)
    value = decode_optional(run_dir.rank_state(rank), RankStateFile)
    if value is None or value.attempt != attempt:
        return None
    return RankState(
        process=Process(pid=value.pid, host=value.host, pid_started=value.pid_started, boot_id=value.boot_id),
        time=value.time,
        step=value.step,
        kind=value.work,
        place=value.place,
        counter=value.counter,
    )


def _position(run_dir: RunDir, rank: int, state: RankState | None, stuck: str) -> RankPosition:
    # A stopped process continues before it writes its stacks.
    line = "" if stuck == STOPPED else innermost(_text(run_dir.rank_stacks(rank)))
    return RankPosition(
        rank=rank,
        step=state.step if state else 0,
        kind=state.kind if state else SETUP,
        place=state.place if state else "",
        stuck=stuck,
        line=line,
    )


def _wait_until_written(paths: Sequence[Path], seconds: float) -> None:
    """Wait until each file has the stacks of all threads, at most for some seconds."""
    end = time.monotonic() + seconds
    outermost = _outermost()
    # The main thread is the last in a dump, and the rank is killed soon: half a dump would not show where it is.
    while time.monotonic() < end and not all(has_all_stacks(_text(path), outermost) for path in paths):
        time.sleep(0.02)


def has_all_stacks(text: str, outermost: str) -> bool:
    """Return whether a faulthandler dump is complete: it ends with the outermost frame of the main thread.

    outermost: that frame's function, which all ranks share, because they are started in the same way.
    """
    # faulthandler ends a stack of more than 100 frames with dots.
    return text.endswith((f" in {outermost}\n", "  ...\n"))


def _outermost() -> str:
    """Return the name of the outermost function of this process's main thread."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back:
        frame = frame.f_back
    return frame.f_code.co_name


def _text(path: Path) -> str:
    """Return the stacks in a file; "" if there is none, or if a rank has just deleted it because its loop ended."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _size(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _why_stuck(state: RankState | None, before: RankState | None = None) -> str:
    """Return why a rank's process cannot run, "" if it runs. before: its state some seconds ago.

    On another host, whose clock may differ, only a state that goes on tells.
    """
    if state is None:
        return "it wrote no state"
    if state.process.host != socket.gethostname():
        return "its process does not run" if _is_silent(before, state) else ""
    if (letter := _process_letter(state.process)) in ("T", "Z", ""):
        return "its process is gone" if letter != "T" else STOPPED
    return "its process does not run" if time.time() - state.time > SILENT_S else ""


def _is_silent(before: RankState | None, state: RankState | None) -> bool:
    """Return whether a rank on another host has written no state between two looks."""
    if before is None or state is None or state.process.host == socket.gethostname():
        return False
    return before.process == state.process and before.counter == state.counter


def _process_letter(process: Process) -> str:
    """Return the state letter (proc_pid_stat(5)) of a process on this machine, "" if it is gone."""
    if process.pid is None or not process.lives_here():
        return ""
    fields = stat_fields(process.pid)
    return fields[0] if fields else ""


def _request_stacks(process: Process) -> None:
    """Make a process on this machine write its stacks. A stopped process is continued, because it must run for that."""
    # The signal ends a process that does not expect it: a reused pid must not get it.
    if process.pid is None or not process.lives_here():
        return
    with suppress(OSError):  # it has just ended, which the message already says or the next state will
        stopped = _process_letter(process) == "T"
        os.kill(process.pid, STACKS_SIGNAL)  # first: the signal is delivered as soon as the process continues
        if stopped:
            os.kill(process.pid, signal.SIGCONT)
