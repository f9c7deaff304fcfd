"""Whether the ranks of a run still move: each leaves word of where it is, and a run that stands still is ended.

The loop only says where it is, which is an assignment. A thread of each rank looks at that, leaves it in
ranks/<r>/state.json once a second, and when a rank has stood in one place for too long writes the stacks of all its
threads to ranks/<r>/stacks.txt. Rank 0 then names the rank that is behind, and ends the run.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gpt2.log import RunLog
from kmatrix.errors import RecordError
from kmatrix.records import RunDir, read_json, write_json

TICK_S = 1.0
SUSPENDED_S = 5.0  # a thread that woke later than this after its tick was stopped with its process, and so was the loop
FIRST_S = 1800.0  # for what has not happened before: the set-up, and a first step that compiles
RECENT = 100  # of a kind of work, whose median is the usual time
SETUP, STEP, END = "set-up", "step", "end"  # kinds of work, besides what gpt2/budget.py has between steps
DATA, FORWARD, BACKWARD, UPDATE, NUMBERS = "data", "forward", "backward", "update", "numbers"  # places in a step
ORDER = ("", DATA, FORWARD, BACKWARD, UPDATE, NUMBERS)
SILENT_S = 10.0  # a state this old was left by a process that does not run
WAIT_S = 3.0  # for the stacks of the other ranks
TURN_S = 15.0  # after which a rank does what rank 0 did not
STOPPED = "its process is stopped"
POKE = signal.SIGUSR2


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where a rank is. stuck: why its process cannot move, or "".  line: its innermost line of Python."""

    rank: int
    step: int
    kind: str
    place: str
    stuck: str = ""
    line: str = ""

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, ORDER.index(self.place) if self.place in ORDER else 0

    def __str__(self) -> str:
        """Say where it is; of a process that does not run only where it was when it last left word is known."""
        place = self.place if self.kind == STEP else self.kind
        text = f"{'last seen ' if self.stuck else ''}in {place or self.kind} of step {self.step}"
        return " ".join([text, *(f"({word})" for word in (self.stuck, self.line) if word)])


class Watchdog:
    """One rank's. `work` and `at` belong to the loop; everything else to the thread.

    stalled: ends the run; it is given what happened, in words.
    """

    def __init__(self, log: RunLog, *, rank: int, size: int, stalled: Callable[[str], object]) -> None:
        self._dir, self._attempt, self._rank, self._size = log.dir, log.attempt, rank, size
        self._stalled = stalled
        self._factor, self._floor_s = 0.0, 0.0
        self._kind, self._place, self._step = SETUP, "", 0
        self._began = time.monotonic()
        self._took: dict[str, deque[float]] = {}
        self._over = threading.Event()
        self.spent: Callable[[], float] | None = None  # the run's seconds in all attempts, where they are known
        self.spent_before = spent_before(self._dir, self._attempt)
        self._dir.rank(rank).mkdir(parents=True, exist_ok=True)
        stacks = self._dir.rank_stacks(rank)
        if _size(stacks):
            stacks.replace(self._dir.rank_stacks(rank, self._attempt - 1))  # an earlier attempt stood still
        self._stacks = stacks.open("w", encoding="utf-8")
        faulthandler.register(POKE, file=self._stacks, all_threads=True)
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, *, factor: float, floor_s: float) -> None:
        """Begin to judge; until then only the state is left.

        factor: times the usual time of a kind of work after which it hangs, 0 for never.  floor_s: seconds that
        it always has.
        """
        self._floor_s, self._factor = floor_s, factor

    def work(self, kind: str, step: int) -> None:
        """Say that a piece of work begins, and that the one before has ended."""
        now = time.monotonic()
        took = self._took.get(self._kind)
        if took is None:
            took = self._took[self._kind] = deque(maxlen=RECENT)
        took.append(now - self._began)
        self._kind, self._place, self._step, self._began = kind, "", step, now

    def at(self, place: str) -> None:
        """Say where in a step the loop is."""
        self._place = place

    def end(self) -> None:
        """Leave off watching. Stacks that nobody wrote leave no file."""
        self._over.set()
        faulthandler.unregister(POKE)
        self._stacks.close()
        path = self._dir.rank_stacks(self._rank)
        if not _size(path):
            path.unlink(missing_ok=True)

    def limit_s(self) -> float | None:
        """Return how long the present piece of work may take, in seconds; None for as long as it likes."""
        if not self._factor:
            return None
        took = list(self._took.get(self._kind, ()))
        if not took:
            return max(FIRST_S, self._floor_s)
        usual = statistics.median(took[1:] or took)
        return max(self._floor_s, self._factor * usual)

    def _watch(self) -> None:
        last = time.monotonic()
        self._leave_word(0.0)  # at once: a rank that freezes before its first tick can be made to go on, too
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            if now - last > TICK_S + SUSPENDED_S:
                self._began += now - last
            last = now
            limit, age = self.limit_s(), now - self._began
            self._leave_word(age)
            if limit is not None and age > limit:
                self._stand_still(age, limit)

    def _leave_word(self, age: float) -> None:
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
        """Return what the run has taken; until this attempt can say, what the earlier ones took."""
        return self.spent() if self.spent else self.spent_before

    def _stand_still(self, age: float, limit: float) -> None:
        """Write the stacks, and end the run: rank 0 first, another rank where rank 0 does not."""
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        if self._over.wait(WAIT_S if self._rank == 0 else TURN_S + self._rank):
            return  # it moved on, and ended
        states = {rank: _state(self._dir, rank, self._attempt) for rank in range(self._size)}
        stuck = {rank: _why_it_cannot_move(state) for rank, state in states.items()}  # as it was before the next line
        mute = [rank for rank, state in states.items() if state and not _size(self._dir.rank_stacks(rank))]
        for rank in mute:
            _poke(states[rank])
        until = time.monotonic() + TICK_S
        while time.monotonic() < until and not all(_size(self._dir.rank_stacks(rank)) for rank in mute):
            time.sleep(0.02)
        ranks = [_whereabouts(self._dir, rank, state, stuck[rank]) for rank, state in states.items()]
        self._stalled(f"no progress for {age:.0f} s, and {limit:.0f} s is the most: {in_words(ranks)}")


def in_words(ranks: Sequence[Whereabouts]) -> str:
    """Say which ranks are behind, and where every rank is; ranks in one place are named together."""
    behind = [one.rank for one in behind_of(ranks)]
    places: dict[str, list[int]] = {}
    for one in sorted(ranks, key=lambda one: one.rank not in behind):
        places.setdefault(str(one), []).append(one.rank)
    parts = []
    for place, numbers in places.items():
        several = len(numbers) > 1
        names = f"rank{'s' if several else ''} {', '.join(map(str, numbers))} {'are' if several else 'is'}"
        parts.append(f"{names} {'behind, ' if numbers[0] in behind else ''}{place}")
    return "; ".join(parts)


def behind_of(ranks: Sequence[Whereabouts]) -> list[Whereabouts]:
    """Return the ranks that are behind: those that cannot move, else those with the least progress.

    Where all are in the same place, none is.
    """
    least = min(one.progress for one in ranks)
    for behind in ([one for one in ranks if one.stuck], [one for one in ranks if one.progress == least]):
        if 0 < len(behind) < len(ranks):
            return behind
    return []


def innermost(stacks: str) -> str:
    """Return the innermost line of the main thread in what faulthandler wrote last, as "file:line in function"."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    found = re.search(r'File "([^"]+)", line (\d+) in (\S+)', threads[-1])
    return f"{Path(found[1]).name}:{found[2]} in {found[3]}" if found else ""


def spent_before(run_dir: RunDir, attempt: int) -> float:
    """Return the seconds that earlier attempts took, as rank 0 left word of them; 0 where it left none."""
    try:
        state = read_json(run_dir.rank_state(0))
    except RecordError:
        return 0.0
    return float(state.get("spent_s") or 0.0) if int(state.get("attempt", attempt)) < attempt else 0.0


def _state(run_dir: RunDir, rank: int, attempt: int) -> dict[str, Any]:
    """Return what a rank left last, or nothing where it left no word in this attempt."""
    try:
        state = read_json(run_dir.rank_state(rank))
    except RecordError:
        return {}
    return state if state.get("attempt") == attempt else {}


def _whereabouts(run_dir: RunDir, rank: int, state: dict[str, Any], stuck: str) -> Whereabouts:
    stacks = run_dir.rank_stacks(rank)
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks.exists() else ""
    return Whereabouts(
        rank=rank,
        step=int(state.get("step", 0)),
        kind=str(state.get("work", SETUP)),
        place=str(state.get("place", "")),
        stuck=stuck,
        line=""
        if stuck == STOPPED
        else innermost(text),  # a process that was stopped goes on before it writes its stacks
    )


def _size(path: Path) -> int:
    """Return the bytes in a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _why_it_cannot_move(state: dict[str, Any]) -> str:
    if not state:
        return "it left no word"
    if state["host"] == socket.gethostname() and (letter := _process_letter(int(state["pid"]))) in ("T", "Z", ""):
        return "its process is gone" if letter != "T" else STOPPED
    return "its process does not run" if time.time() - float(state["time"]) > SILENT_S else ""


def _process_letter(pid: int) -> str:
    """Return the kernel's letter for the state of a process, "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _poke(state: dict[str, Any]) -> None:
    """Make a process of this machine write its stacks; one that was stopped must go on for that."""
    if state["host"] != socket.gethostname():
        return
    with suppress(OSError):
        stopped = _process_letter(int(state["pid"])) == "T"
        os.kill(int(state["pid"]), POKE)
        if stopped:
            os.kill(int(state["pid"]), signal.SIGCONT)
