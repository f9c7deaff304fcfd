"""Train a run from the start: its files move to archive/N/ by an attempt of their own, which nobody can overlap.

A kill leaves an attempt without an end: the next process that takes the run completes it before it trains.
"""

from __future__ import annotations

from pathlib import Path

from kmatrix import locks
from kmatrix.clock import clock
from kmatrix.records import attempts
from kmatrix.records.attempts import ARCHIVE, Attempt, End, TakenError
from kmatrix.records.decode import replaced
from kmatrix.records.files import move, names
from kmatrix.status.fold import ARCHIVED

STAYS = frozenset({"run.json", "attempts", "archive"})


def archive(run: Path, mine: Attempt) -> None:
    """Move the files of a run, whose archiving attempt this process has taken. The result first: it must not count."""
    into = run / "archive" / str(mine.into or mine.number)
    into.mkdir(parents=True, exist_ok=True)
    for name in sorted(set(names(run)) - STAYS, key=lambda name: (name != "result.json", name)):
        if not name.startswith("."):  # .config, .lock
            move(run / name, into / name)
    attempts.finish(run, mine, End(kind=ARCHIVED, at=clock.now()))


def rerun(run: Path) -> Path | None:
    """Archive the result of a run; return its folder, None if it has none. Raises TakenError if it is trained now."""
    known = attempts.read_all(run)
    if not known or (known[-1].what == ARCHIVE and known[-1].end is not None):
        return None
    handle = locks.lock(run / ".lock")
    if handle is None:
        raise TakenError(f"{run.name} is being trained", hint="run `make stop` first")
    try:
        last = known[-1]
        into = (last.into or last.number) if last.what == ARCHIVE else 0
        mine = replaced(attempts.this_process(), number=last.number + 1, what=ARCHIVE, into=into)
        attempts.take(run, mine)
        archive(run, mine)
    finally:
        locks.release(handle)
    return run / "archive" / str(mine.into or mine.number)
