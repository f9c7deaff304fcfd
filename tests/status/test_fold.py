"""Where a run stands, as a table, and what follows each end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kmatrix.records.attempts import ARCHIVE, Attempt, End
from kmatrix.records.control import Again, Request
from kmatrix.records.runs import Adjustment, RunResult, Status
from kmatrix.status.fold import Files, idle, next_attempt, overall, spent_s, state_of

PLAN = Files(run_id="id", train={"learning_rate": 1e-3, "batch_size": 12}, micro_batch=12)
P, R, S, F, D, K = (Status(name) for name in ("planned", "running", "stopped", "failed", "finished", "skipped"))
HELD, SKIP = Request(time=1.0), Request(skip="it needs 8 GPUs")


def result(status: str = "finished", run_id: str = "id", **more: Any) -> RunResult:
    return RunResult(run_id=run_id, attempt=1, status=status, step=9, **more)


def one(kind: str | None = None, number: int = 1, step: int = 0, **known: Any) -> Attempt:
    return Attempt(number=number, step=step, end=None if kind is None else End(kind=kind, reason=kind), **known)


def row(*kinds: str | None, steps: tuple[int, ...] = ()) -> tuple[Attempt, ...]:
    steps = (*steps, *[0] * len(kinds))
    return tuple(one(kind, number, step) for number, (kind, step) in enumerate(zip(kinds, steps, strict=False), 1))


def archived(*former: str, end: str | None = "archived") -> tuple[Attempt, ...]:
    return (*row(*former), one(end, len(former) + 1, what=ARCHIVE))


OTHER = result(used={"learning_rate": 2.0})
TOLD = result(used={"batch_size": 6}, adjusted=(Adjustment(name="batch_size", used=6),))
STATES: list[tuple[str, dict[str, Any], Status, str, int, int]] = [
    # what, files -> status, kind, a process may start, a controller starts it
    ("nothing", {}, P, "", 1, 1),
    ("trains", {"attempts": row(None), "is_live": True}, R, "", 0, 0),
    ("its process was killed", {"attempts": row(None)}, S, "lost", 1, 1),
    ("killed after its result", {"attempts": row(None), "result": result()}, D, "finished", 0, 0),
    ("killed after a bad result", {"attempts": row(None), "result": result("failed", kind="nan")}, F, "nan", 0, 0),
    ("killed after scancel", {"attempts": (one(stop="signal: SIGTERM"),)}, S, "signal", 1, 0),
    ("killed after its notice", {"attempts": (one(stop="time limit: SIGUSR1"),)}, S, "time limit", 1, 1),
    ("finished", {"attempts": row("finished"), "result": result()}, D, "finished", 0, 0),
    ("finished, and recorded as stopped", {"attempts": row("stopped"), "result": result()}, D, "finished", 0, 0),
    ("finished without its result", {"attempts": row("finished")}, F, "mismatch", 0, 0),
    ("result of another run", {"attempts": row("finished"), "result": result(run_id="x")}, F, "mismatch", 0, 0),
    ("trained something else", {"attempts": row("finished"), "result": OTHER}, F, "mismatch", 0, 0),
    ("trained something else, and told so", {"attempts": row("finished"), "result": TOLD}, D, "finished", 0, 0),
    ("damaged", {"damage": "run.json: train.lr: expected float"}, F, "damaged", 0, 0),
    ("stopped by its user", {"attempts": row("stopped")}, S, "stopped", 1, 0),
    ("SIGTERM", {"attempts": row("signal")}, S, "signal", 1, 0),
    ("stopped five times at once", {"attempts": row(*["stopped"] * 5)}, S, "stopped", 1, 0),
    ("preempted", {"attempts": row("preempted")}, S, "preempted", 1, 1),
    ("time limit, twice, nothing saved", {"attempts": row("time limit", "time limit")}, F, "no progress", 0, 0),
    (
        "time limit, twice, saved",
        {"attempts": row("time limit", "time limit", steps=(0, 100)), "saved": 200},
        S, "time limit", 1, 1,
    ),
    (
        "time limit, saved each time but the last",
        {"attempts": row(*["time limit"] * 3, steps=(0, 100, 200)), "saved": 200},
        S, "time limit", 1, 1,
    ),
    ("killed twice, nothing saved", {"attempts": row(None, None)}, F, "no progress", 0, 0),
    ("the same, ordered", {"attempts": (one(), one(number=2, ordered=True))}, S, "lost", 1, 1),
    ("gpu lost", {"attempts": row("gpu lost")}, F, "gpu lost", 1, 1),
    ("gpu lost, then nccl, nothing saved", {"attempts": row("gpu lost", "nccl")}, F, "no progress", 0, 0),
    ("oom", {"attempts": row("oom")}, F, "oom", 1, 1),
    ("oom with one sequence", {"attempts": (one("oom", micro_batch=1),)}, F, "oom", 0, 0),
    ("nan", {"attempts": row("nan")}, F, "nan", 0, 0),
    ("a rank was killed", {"attempts": row("killed")}, F, "killed", 0, 0),
    ("nan, asked again", {"attempts": row("nan"), "again": Again(after=1)}, F, "nan", 1, 1),
    ("nan, asked again, nan", {"attempts": row("nan", "nan"), "again": Again(after=1)}, F, "nan", 0, 0),
    ("stopped, asked again", {"attempts": row("stopped"), "again": Again(after=1)}, S, "stopped", 1, 1),
    ("cannot run here", {"request": SKIP}, K, "", 0, 0),
    ("held before it began", {"request": HELD}, P, "", 0, 0),
    ("held", {"attempts": row("stopped"), "request": HELD}, S, "stopped", 0, 0),
    ("held while it trains", {"attempts": row(None), "is_live": True, "request": HELD}, R, "", 0, 0),
    ("held after it finished", {"attempts": row(None), "result": result(), "request": HELD}, D, "finished", 0, 0),
    ("held after it failed", {"attempts": row("nan"), "request": HELD}, F, "nan", 0, 0),
    ("archived", {"attempts": archived("finished")}, P, "", 1, 1),
    ("a killed rerun", {"attempts": archived("finished", end=None), "result": result()}, P, "", 1, 1),
    (
        "a rerun moves its files",
        {"attempts": archived("finished", end=None), "result": result(), "is_live": True},
        P, "", 1, 0,
    ),
    ("trained again after a rerun", {"attempts": (*archived("nan"), one("stopped", 3))}, S, "stopped", 1, 0),
    ("an attempt that was not needed", {"attempts": row("stopped", "void")}, S, "stopped", 1, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "status", "kind", "starts", "due"), [s[1:] for s in STATES], ids=[s[0] for s in STATES]
)
def test_where_a_run_stands_and_whether_it_goes_on(
    files: dict[str, Any], status: Status, kind: str, starts: int, due: int
) -> None:
    state = state_of(replace(PLAN, **files))
    assert (state.status, state.kind, state.may_start, state.is_due) == (status, kind, bool(starts), bool(due))


def test_the_first_failure_of_an_adaptive_seed_is_retried_once() -> None:
    def is_due(*kinds: str) -> bool:
        return state_of(replace(PLAN, attempts=row(*kinds)), spare=True).is_due

    assert [is_due("died"), is_due("died", "died"), is_due("nan")] == [True, False, False]


def follows(**files: Any) -> Attempt:
    known = replace(PLAN, **files)
    return next_attempt(known, state_of(known))


def test_what_the_next_attempt_begins_with() -> None:
    assert follows() == Attempt(number=1)
    assert follows(attempts=row("stopped"), saved=7) == Attempt(number=2, resume="auto", step=7)
    sizes = [follows(attempts=(one("oom", micro_batch=size),)).micro_batch for size in (None, 12, 6, 3, 9)]
    assert sizes == [6, 6, 3, 1, 3]  # the largest divisor that is at most half: the global batch does not change
    asked = Again(after=1, resume="best", micro_batch=2)
    expected = Attempt(number=2, resume="best", micro_batch=2, ordered=True)
    assert follows(attempts=row("nan"), again=asked) == expected
    assert follows(attempts=(one("nan", micro_batch=4), one("nan", 2, micro_batch=4)), again=asked).micro_batch == 4
    killed_rerun = follows(attempts=archived("finished", end=None), result=result())
    assert killed_rerun == Attempt(number=3, what=ARCHIVE, into=2)
    assert follows(attempts=archived("nan")) == Attempt(number=3)


def test_attempts_without_progress_count_back_to_the_last_step_that_was_saved() -> None:
    assert idle(row("lost", "lost", "lost", steps=(0, 5, 5)), 5) == 2
    assert idle(row("lost", "lost", steps=(0, 5)), 6) == 0
    assert idle(row("lost", "nan", "lost"), 0) == 1
    both = state_of(replace(PLAN, attempts=row("gpu lost", "nccl"))).reason
    assert "(gpu lost: gpu lost; nccl: nccl)" in both


def test_a_matrix_counts_the_seconds_of_all_attempts_and_its_open_runs_first() -> None:
    attempts = (Attempt(number=1, end=End(kind="lost", seconds=5.0)), Attempt(number=2, seconds=2.5))
    assert spent_s(state_of(replace(PLAN, attempts=attempts))) == 7.5
    states = {status: replace(state_of(PLAN), status=status) for status in Status}
    mixtures = {(F, P, D): S, (D, K): F, (D,): D, (D, R): R}
    assert {mixture: overall([states[status] for status in mixture]) for mixture in mixtures} == mixtures
