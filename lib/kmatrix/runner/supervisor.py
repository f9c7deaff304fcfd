"""Train one run: `kmatrix run RUN_DIR`, the same program on a laptop, in a Slurm task and in a pod.

It takes the run, starts its ranks, shows that it lives, writes how each attempt ended, and tries again where that
helps. Each `yield` is a short wait: the program sleeps there, a test does whatever else happens meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kmatrix import locks
from kmatrix.clock import clock
from kmatrix.engines.ports import Place, Ranks
from kmatrix.errors import RecordError
from kmatrix.records import attempts
from kmatrix.records.attempts import ARCHIVE, NODE_LOST, VOID, Attempt, End, TakenError
from kmatrix.records.control import Requests, requests_of, stop_of
from kmatrix.records.decode import replaced
from kmatrix.records.matrix import Plan, PlannedRun, make_files, read_plan
from kmatrix.records.runs import Status
from kmatrix.runner.ends import Evidence, end_of
from kmatrix.runner.rerun import archive
from kmatrix.status.fold import (
    FINISHED,
    GPU_LOST,
    STOPPED,
    TIME_LIMIT,
    TIMEOUT,
    Files,
    next_attempt,
    rule_of,
    state_of,
)
from kmatrix.status.look import read_run, saved_step

# Exit statuses. Not 1: that is also the status of a Python that could not begin, which may be tried again.
DONE, REFUSED, FAILED, ASKED_TO_STOP, AGAIN = 0, 2, 3, 130, 143
CODES = {Status.FINISHED: DONE, Status.SKIPPED: DONE, Status.FAILED: FAILED}
ELSEWHERE = frozenset({GPU_LOST, NODE_LOST, TIME_LIMIT})
WAIT_S = 40.0  # for the processes of a former attempt on this host: they save, or are killed


@dataclass(kw_only=True)
class Supervisor:
    """The process that has a run."""

    run: Path
    place: Place
    start: Callable[[Attempt, int], Ranks]  # the attempt, and the lock that the ranks inherit
    gather: Callable[[], Iterator[object]] = lambda: iter(())  # waits for the other nodes of a run
    equip: Callable[[Attempt], Attempt] = lambda mine: mine  # adds the address of its rank 0
    say: Callable[[str], object] = lambda _: None
    signals: list[str] = field(default_factory=list)  # filled by handlers
    handle: int | None = None
    requests: Requests = field(default_factory=Requests)  # as read last

    def lead(self) -> Generator[None, None, int]:
        """Train the run to its end, or as far as this place goes; return the exit status.

        Raises TakenError if another process has the run, RecordError if the plan or the requests are damaged.
        """
        matrix, plan = self.run.parent, read_plan(self.run.parent)
        planned = next((one for one in plan.runs if one.name == self.run.name), None)
        if planned is None:
            raise RecordError(f"{matrix} has no run {self.run.name}", hint="check the name: `make status` lists them")
        attempts.folder(self.run).mkdir(parents=True, exist_ok=True)
        until = clock.monotonic() + WAIT_S
        while (handle := locks.try_lock(self.run / ".lock")) is None:
            if clock.monotonic() > until or self.signals:
                self.say("nothing to do: processes of an earlier attempt still run on this host")
                return DONE
            yield
        self.handle = handle
        make_files(matrix, self.run.name)  # before any attempt
        while True:
            found = yield from self._next(plan, planned)
            if isinstance(found, int):
                return found
            if found.what == ARCHIVE:
                archive(self.run, found)
                continue
            self.say(f"attempt {found.number} from {found.resume}")
            mine, end = yield from self._attempt(found, plan.checkpoints_of(matrix, planned), plan.common.timeout_s)
            attempts.finish(self.run, mine, end)
            self.say(f"attempt {mine.number}: {end.kind} {end.reason}".rstrip())
            is_replaced = end.kind == NODE_LOST and self.place.replaces_nodes
            if self.signals or not (rule_of(end.kind).in_place or is_replaced):
                return self._status_of(end)

    def _next(self, plan: Plan, planned: PlannedRun) -> Generator[None, None, Attempt | int]:
        """Take the next attempt and return it, or the exit status if there is none."""
        gone, has_all = 0, False  # the last attempt without an end whose process is known to be gone; all other nodes
        while True:
            files = self._files(plan, planned)
            state = state_of(files, spare=planned.selected)
            if self._why_stop():
                return AGAIN if self.signals and stop_of(self.run.parent) is None else ASKED_TO_STOP
            if not state.may_start:  # a second job of a failed run trains nothing
                return CODES.get(state.status, ASKED_TO_STOP)
            former = files.attempts[-1] if files.attempts else None
            following = next_attempt(files, state)
            # After each wait everything is read again: the run may have finished, and left a result.
            if former is not None and gone != former.number:
                yield from attempts.wait_for_former(self.run, former, self._me())
                gone = former.number
            elif following.what != ARCHIVE and not has_all:  # a wait for other nodes is no attempt
                has_all = yield from self._gather()
            else:
                mine = yield from self._take(former, following)
                # The number says that nobody else took it, not that what was decided still holds.
                now = self._files(plan, planned)
                now = replace(now, attempts=now.attempts[: len(files.attempts)])
                if mine.what == ARCHIVE or state_of(now, spare=planned.selected).may_start:
                    return mine
                reason = "the attempt before it had ended meanwhile"
                attempts.finish(self.run, mine, End(kind=VOID, reason=reason, at=clock.now()))

    def _gather(self) -> Generator[None, None, bool]:
        """Wait for the other nodes of the run, or for a reason to stop; return whether all are there."""
        for _ in self.gather():
            if self._why_stop():
                return False
            yield
        return True

    def _files(self, plan: Plan, planned: PlannedRun) -> Files:
        return read_run(self.run.parent, plan, planned, requests_of(self.run.parent), has_lock=True)

    def _me(self) -> Attempt:
        return attempts.this_process(self.place.host, self.place.boot)

    def _take(self, former: Attempt | None, following: Attempt) -> Generator[None, None, Attempt]:
        """Take the next attempt, at once: what was decided holds only as long as nobody has a newer number."""
        me = self._me()
        mine = replaced(following, host=me.host, boot=me.boot, pid=me.pid, started=me.started, job=self.place.job)
        mine = self.equip(replaced(mine, gpus=self.place.gpus))
        attempts.take(self.run, mine)
        if former is not None and former.end is None and not attempts.is_here(former, mine):
            until = clock.monotonic() + 2 * attempts.PULSE_S  # a process that nobody sees has met the fence by then
            while clock.monotonic() < until:
                yield
            if attempts.beat(self.run, mine, 0.0) is None:  # this process may have been suspended, and given up
                raise TakenError("another process has the run now")
        return mine

    def _attempt(
        self, mine: Attempt, checkpoints: Path, timeout_s: float
    ) -> Generator[None, None, tuple[Attempt, End]]:
        """Train one attempt, and return how it ended. timeout_s: RUN_TIMEOUT, 0 for none."""
        assert self.handle is not None
        log = self.run / "output.log"
        log_start = log.stat().st_size if log.exists() else 0
        began = clock.monotonic()
        ranks, due = self.start(mine, self.handle), began + self.place.pulse_s
        why = ""
        while not ranks.poll():
            is_due = clock.monotonic() >= due
            if is_due:
                due = clock.monotonic() + self.place.pulse_s
                now = attempts.beat(self.run, mine, clock.monotonic() - began)
                if now is None:
                    ranks.kill()
                    raise TakenError("another process has the run now, or it was moved", why="nothing more is written")
                mine = now
            if not why and 0 < timeout_s < clock.monotonic() - began:
                why = f"{TIMEOUT}: it took longer than {timeout_s:g} s (RUN_TIMEOUT)"
            elif not why and (is_due or self.signals):
                why = self._why_stop()
            if why and not mine.stop:
                self.say(f"{why}: the ranks are asked to save and stop")
                mine = replaced(mine, stop=why)
                with suppress(OSError):  # before they are: a kill within the grace period must not hide who asked
                    attempts.write(self.run, mine)
                ranks.stop(self.place.grace_of(self.signals[0] if self.signals else ""))
            yield
        if self.signals and not mine.stop:  # a scheduler signals the ranks, too: they may have ended first
            mine = replaced(mine, stop=self._why_stop())
        seen = Evidence(run=self.run, attempt=mine, exits=ranks.exits, log_start=log_start, trouble=ranks.trouble)
        end = end_of(replace(seen, saved=saved_step(checkpoints)))
        seconds = clock.monotonic() - began
        return mine, replaced(end, seconds=seconds, at=clock.now())

    def _why_stop(self) -> str:
        """Return why this run is to end, as `stop` of the attempt has it; "" if it goes on."""
        if (why := stop_of(self.run.parent)) is not None:  # before the signal that the runner sends because of it
            return f"{STOPPED}: {why}"
        if self.signals:
            return f"{self.place.kind_of(self.signals[0])}: {self.signals[0]}"
        with suppress(RecordError):  # an editor is at work: what was read last applies
            self.requests = requests_of(self.run.parent)
        return f"{STOPPED}: held by user" if self.run.name in self.requests.runs else ""

    def _status_of(self, end: End) -> int:
        if end.kind == FINISHED:
            return DONE
        if end.kind == STOPPED:
            return ASKED_TO_STOP
        return AGAIN if self.signals or end.kind in ELSEWHERE else FAILED
