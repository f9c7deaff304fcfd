"""The budget of a matrix whose runs train in many jobs."""

from __future__ import annotations

import pytest

from kmatrix.records.decode import as_json
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs.claim import Claim
from kmatrix.records.jobs.files import ShareOwner, read_share_end, read_share_owner
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.runner.share import budget as share_budget
from kmatrix.runner.share.budget import SharedBudget
from kmatrix.runner.share.folder import RunningShare
from kmatrix.status.state import Attempt, RunState
from kmatrix.status.status_file import write_state
from share_job import start, state_of

pytestmark = pytest.mark.process

HOUR = 3600.0


def trained(run, seconds):
    """Record an ended attempt of this time."""
    attempt = Attempt(number=1, status="stopped", started=1e9, ended=1e9 + seconds, seconds=seconds)
    write_state(run, RunState(status="stopped", attempts=(attempt,)))


def claimed(matrix, number, spent):
    """Write the claim of another share, with what it tells about its runs."""
    other = JobsDir(matrix).submission(number).share(0)
    write_json(other.owner, as_json(ShareOwner(job=f"{number}", spent=spent)))


def shared_budget(mine: RunningShare) -> SharedBudget:
    return SharedBudget(mine, Claim(mine, ShareOwner(job="12")))


def test_the_newest_time_of_each_run_counts_once(share, matrix):
    mine = share("a", others=("b", "c", "d"))
    trained(matrix.run("b"), 100.0)
    claimed(matrix, 2, {"b": 150.0, "c": 50.0})  # b trains there now; it was in its files before
    claimed(matrix, 3, {"c": 70.0, "gone": 1e9})  # c went on in a later share; `gone` is not a run of the matrix
    shared = shared_budget(mine)
    shared.begin()
    shared.end()
    assert shared.elsewhere().wall_s == 220.0
    claimed(matrix, 3, {"c": 80.0})
    assert shared.look() == 2
    assert shared.elsewhere().wall_s == 230.0


def test_a_price_makes_dollars_of_the_time_of_others(share, matrix):
    mine = share("a", others=("b",))
    record = read_json(matrix.run("b").run_json)
    priced = {"device": "cpu", "machine_hour_price": 2.0}
    write_json(matrix.run("b").run_json, record | {"train": record["train"] | priced})
    claimed(matrix, 2, {"b": HOUR})
    shared = shared_budget(mine)
    shared.begin()
    shared.end()
    assert shared.elsewhere().dollars == pytest.approx(2.0)


def test_a_job_tells_what_its_own_runs_have_taken(share, matrix):
    mine = share("a")
    trained(matrix.run("a"), 30.0)
    claim = Claim(mine, ShareOwner(job="12"))
    shared = SharedBudget(mine, claim)
    shared.elsewhere()
    assert claim.owner.spent == {"a": 30.0}
    claim.begin()
    claim.end()
    assert read_share_owner(mine).spent == {"a": 30.0}


def test_a_job_stops_when_the_runs_of_all_jobs_have_spent_the_budget(share, matrix, monkeypatch):
    monkeypatch.setattr("kmatrix.runner.execution.budget.CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(share_budget, "ASK_S", 0.05)
    mine = share("a", others=("b",))
    claimed(matrix, 2, {"b": 3 * HOUR})
    job, allocation = start(mine, "hang", arguments={"BUDGET_HOURS": "2"})
    assert job.run() == 130
    assert (state_of(mine).status, read_share_end(mine).requeued, allocation.requeued) == ("stopped", False, 0)
    assert "budget spent" in mine.journal.read_text()


def test_jobs_without_a_budget_do_not_read_each_other(share, monkeypatch):
    monkeypatch.setattr(SharedBudget, "begin", lambda _: pytest.fail("read the other shares"))
    assert start(share("a"))[0].run() == 0
