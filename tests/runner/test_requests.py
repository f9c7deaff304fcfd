"""Runs of a matrix are held and released, while its runner is at work and without one."""

from __future__ import annotations

import pytest

from instant import tree
from kmatrix.engines.local.engine import LocalEngine
from kmatrix.records.files import read_json, write_json
from kmatrix.records.lock import held
from kmatrix.records.states import HELD_TEXT, change_requests
from kmatrix.runner.loop import EXIT_STOPPED, drive
from kmatrix.runner.resume import reopen
from programs import run
from running import engine, processes_naming, status_of, wait_for_start


def drive_with(matrix, plans, orders=None):
    """Drive the plans. orders: (run, its status) -> (run, True to hold it, False to release it), each once."""
    orders = dict(orders or {})

    def show(progress):
        for change in orders.pop((progress.run, str(progress.status)), ()):
            change_requests(matrix, [change[0]], hold=change[1])

    return drive(matrix, plans, engine(grace_s=5.0), on_progress=show, poll_s=0.02)


def seen(*plans):
    return [status_of(plan)["status"] for plan in plans]


@pytest.mark.process
def test_a_waiting_and_a_running_run_are_held_and_the_matrix_goes_on(matrix, plan):
    plans = [plan("a", "hang"), plan("b"), plan("c")]
    outcome = drive_with(matrix, plans, {("a", "running"): [("b", True), ("a", True)]})
    assert seen(*plans) == ["stopped", "planned", "finished"]
    assert outcome.exit_code == EXIT_STOPPED
    assert all(status_of(one)["reason"].startswith(HELD_TEXT) for one in plans[:2])
    assert read_json(matrix.status)["counts"] == {"finished": 1, "planned": 1, "stopped": 1}
    assert processes_naming(matrix) == []
    # The next runner leaves them out, too, until they are released: one resumes, one starts.
    again = reopen(matrix, (), command=("--behave=finish",)).plans
    assert drive_with(matrix, again).exit_code == EXIT_STOPPED
    assert seen(*plans) == ["stopped", "planned", "finished"]
    change_requests(matrix, ["a", "b"], hold=False)
    again = reopen(matrix, (), command=("--behave=finish",)).plans
    assert [(one.attempt, one.resume) for one in again] == [(2, "auto"), (1, "none")]
    assert drive_with(matrix, again).exit_code == 0
    assert seen(*plans) == ["finished"] * 3


@pytest.mark.process
def test_a_held_run_is_released_during_the_matrix_and_resumes(matrix, plan):
    plans = [plan("a", "hang"), plan("b"), plan("c", "hang")]
    orders = {
        ("a", "running"): [("a", True)],
        ("a", "stopped"): [("a", False), ("c", True)],
        ("a", "planned"): [],
    }
    starts = []

    def show(progress):
        for change in orders.pop((progress.run, str(progress.status)), ()):
            change_requests(matrix, [change[0]], hold=change[1])
        if progress.run == "a" and progress.status == "running" and len(starts) < 2:
            number = status_of(plans[0])["attempt"]
            if number not in starts:
                starts.append(number)
        if starts == [1, 2]:
            change_requests(matrix, ["a"], hold=True)

    outcome = drive(matrix, plans, engine(grace_s=5.0), on_progress=show, poll_s=0.02)
    assert starts == [1, 2]
    *ended, last = seen(*plans)
    assert ended == ["stopped", "finished"]
    assert last in ("planned", "stopped")  # it may have started just before the runner read the request
    assert status_of(plans[2])["reason"].startswith(HELD_TEXT)
    assert outcome.exit_code == EXIT_STOPPED
    assert [attempt["resume"] for attempt in status_of(plans[0])["attempts"]] == ["none", "auto"]


@pytest.mark.process
def test_a_request_at_the_end_of_a_run_does_not_change_a_finished_one(matrix, plan):
    plans = [plan("a", "quick"), plan("b", "quick")]
    outcome = drive_with(matrix, plans, {("a", "finished"): [("a", True)]})
    assert seen(*plans) == ["finished", "finished"]
    assert outcome.exit_code == 0


@pytest.mark.process
def test_requests_survive_a_killed_runner(matrix, plan, start_runner, tmp_path):
    from waiting import wait_until

    plans = [plan("a", "hang"), plan("b")]
    process = start_runner("a=hang", "b")
    wait_for_start(plans[0])
    change_requests(matrix, ["b"], hold=True)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_naming(matrix))
    # Without a runner, the commands write the status of the interrupted run themselves.
    for command, answer in (("release", "released"), ("hold", "held")):
        text = run(command, f"TARGET={matrix.path}", f"O={tmp_path}", "RUN=2").out
        assert text.splitlines()[0] == f"{plans[1].name}: {answer}"
    left = reopen(matrix, (), command=("--behave=finish",)).plans
    assert drive_with(matrix, left).exit_code == EXIT_STOPPED
    assert sorted(seen(*plans)) == ["finished", "planned"]


@pytest.mark.process
def test_a_release_at_the_very_end_of_a_matrix_is_followed(matrix, plan, monkeypatch):
    monkeypatch.setattr(
        "kmatrix.runner.execution.requests.READ_EVERY_S", 1000.0
    )  # the last run ends before the next read
    plans = [plan("a", "quick"), plan("b", "quick")]
    change_requests(matrix, ["b"], hold=True)
    assert drive_with(matrix, plans, {("a", "finished"): [("b", False)]}).exit_code == 0
    assert seen(*plans) == ["finished", "finished"]


@pytest.mark.process
def test_a_run_that_was_not_selected_is_released_for_the_next_runner(matrix, plan, tmp_path):
    """As with `make continue RUN=a`: the status of b changes at once, and the command says who runs it."""
    plans, outputs = [plan("a", "hang"), plan("b"), plan("c")], []
    where = (f"TARGET={matrix.path}", f"O={tmp_path}")
    change_requests(matrix, ["b"], hold=True)
    assert run("hold", *where, "RUN=b").out == "b: already held\n"

    def show(progress):
        if progress.status == "running" and not outputs:
            outputs.append(run("release", *where, "RUN=b").out)
            outputs.append(run("hold", *where, "RUN=c").out)
        if outputs and "reason" in status_of(plans[2]) and status_of(plans[1])["status"] == "planned":
            change_requests(matrix, ["a"], hold=True)

    for one in plans[1:]:
        run("hold", *where, f"RUN={one.name}")
    run("release", *where, "RUN=c")
    drive(matrix, plans[:1], engine(grace_s=5.0), on_progress=show, poll_s=0.02)
    assert "did not select it" in outputs[0]
    assert "continue: make continue TARGET=" in outputs[0]
    assert outputs[1] == "c: held, the runner follows within a second\n"
    assert seen(*plans) == ["stopped", "planned", "planned"]
    assert [HELD_TEXT in str(status_of(one)["reason"]) for one in plans] == [True, False, True]


@pytest.mark.process
def test_a_released_run_keeps_its_budget_and_its_starting_point(matrix, plan, monkeypatch):
    """The time of earlier attempts counts; an attempt that has not started yet starts as planned (RESUME=none)."""
    plans, submitted = [plan("a", "hang"), plan("b", attempt=2)], []
    write_json(plans[1].dir.status, {"status": "stopped", "attempts": [{"attempt": 1, "status": "stopped"}]})
    submit = LocalEngine.submit
    monkeypatch.setattr(LocalEngine, "submit", lambda self, runs: submitted.extend(runs) or submit(self, runs))
    orders = {
        ("running", 1): [("b", True), ("a", True)],
        ("stopped", 1): [("a", False), ("b", False)],
        ("running", 2): [("a", True)],
    }

    def show(progress):
        number = sum(one.name == "a" for one in submitted)
        for name, wanted in orders.pop((str(progress.status), number), ()) if progress.run == "a" else ():
            change_requests(matrix, [name], hold=wanted)

    drive(matrix, plans, engine(grace_s=5.0), on_progress=show, poll_s=0.02)
    assert seen(*plans) == ["stopped", "finished"]
    last = {one.name: one for one in submitted}
    assert (last["a"].attempt, last["a"].resume) == (2, "auto")
    assert last["a"].spent_s == pytest.approx(status_of(plans[0])["attempts"][0]["seconds"])
    assert (last["b"].attempt, last["b"].resume) == (2, "none")


def test_the_commands_work_without_a_runner_and_by_every_form_of_a_name(matrix, plan, tmp_path):
    plans = [plan("gpt2_adamw_seed1"), plan("gpt2_adamw_seed2"), plan("gpt2_muon_seed3")]
    where = (f"TARGET={matrix.path}", f"O={tmp_path}")
    for asked in ("1", "gpt2_muon", "seed2"):
        assert run("hold", *where, f"RUN={asked}").status == 0
    assert seen(*plans) == ["planned"] * 3
    assert run("status", *where).out.count(HELD_TEXT) == 3
    wrong = run("hold", *where, "RUN=gpt2_adamv_seed1")
    assert (wrong.status, "did you mean gpt2_adamw_seed1" in wrong.err) == (2, True)
    assert run("hold", *where, "RUN=gpt2_adamw").status == 2  # several
    assert run("hold", *where).status == 2
    assert run("release", *where, "STATUS=planned").status == 0
    assert HELD_TEXT not in run("status", *where).out
    assert ": not held" in run("release", *where, "RUN=1").out
    several = run("hold", *where, "RUN=1,2")
    assert (several.status, "a pattern for several: RUN='gpt2_adamw*'" in several.err) == (2, True)
    # A request for a run that has ended changes nothing.
    for one, status in zip(plans, ("finished", "failed"), strict=False):
        write_json(one.dir.status, {"run_id": one.run_id, "attempt": 1, "status": status, "reason": "why"})
        write_json(one.dir.result, {"run_id": one.run_id, "attempt": 1, "status": status})
    assert run("hold", *where, "RUN=1").out == "gpt2_adamw_seed1: finished, nothing to hold\n"
    assert run("hold", *where, "RUN=2").out == "gpt2_adamw_seed2: held; it has failed, and is not retried\n"
    assert seen(*plans[:2]) == ["finished", "failed"]


@pytest.mark.process
def test_a_damaged_file_starts_no_held_run_and_ends_no_running_one(matrix, plan, tmp_path):
    plans = [plan("a", "hang"), plan("b")]
    change_requests(matrix, ["b"], hold=True)
    whole = matrix.requests.read_bytes()

    def show(progress):
        if progress.run == "a" and progress.status == "running" and progress.step is not None:
            matrix.requests.write_bytes(whole[:20] if matrix.requests.read_bytes() == whole else whole)
            if progress.step > 40:
                matrix.requests.write_bytes(whole)
                change_requests(matrix, ["a"], hold=True)

    drive(matrix, plans, engine(grace_s=5.0), on_progress=show, poll_s=0.02)
    assert seen(*plans) == ["stopped", "planned"]
    matrix.requests.write_bytes(whole[:20])
    refused = run("release", f"TARGET={matrix.path}", f"O={tmp_path}", "RUN=b")
    assert (refused.status, "requests.json" in refused.err) == (2, True)
    assert matrix.requests.read_bytes() == whole[:20]


def test_a_request_for_a_copy_does_not_change_the_original(matrix, plan, tmp_path):
    import shutil

    plan("a")
    copy = tmp_path / "copy" / matrix.name
    shutil.copytree(matrix.path, copy)
    with held(matrix):
        before = tree(matrix.path)
        assert run("hold", f"TARGET={copy}", f"O={tmp_path}", "RUN=a").out == "a: held\n"
        assert tree(matrix.path) == before
