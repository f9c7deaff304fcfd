"""`make status` and `make estimate` of a matrix on a cluster: where runs are, why they wait, what to type next."""

from __future__ import annotations

import json
import time

import pytest

from cluster_factory import ScriptedScheduler, age, answer, claim, end, make_engine, make_submission, node, view
from kmatrix.cli.status import as_json, headline, lines, plain
from kmatrix.gpu.formats.json_array import JsonArrayFile
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs.files import CANCELLED, REPORT, EngineFile, JobLine, append_job_line, write_engine
from kmatrix.records.jobs.paths import JobsDir, NodeDir
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.loop import drive
from kmatrix.runner.resume import reopen
from kmatrix.status.activity import QUIET_S
from kmatrix.status.view.overview import Overview
from kmatrix.text import time_of_day
from records_factory import CREATED, FakeRun, make_matrix
from scripted import ScriptedEngine, adaptive_matrix, name_of

DONE = FakeRun(optimizer="sgd")
WIDE = FakeRun(device="cuda", gpus=2, status="running", stop_at=40, train={"num_nodes": 2})
WAITS = FakeRun(device="cuda", gpus=4, status="planned", train={"num_nodes": 2})
ALSO = FakeRun(optimizer="muon", status="planned")


@pytest.fixture
def matrix(tmp_path):
    """Return a matrix of which one run has finished, one trains on two nodes, and two wait."""
    made = make_matrix(tmp_path, [DONE, WIDE, WAITS, ALSO], took=None)
    make_engine(made)
    attempt = {"attempt": 1, "status": "running", "started": CREATED}
    folder = made.run(WIDE.name)
    write_json(folder.status, read_json(folder.status) | {"attempts": [attempt]})
    (first,) = make_submission(made, [[WIDE.name]], job="12", nodes=2)
    make_submission(made, [[WAITS.name], [ALSO.name], [DONE.name]], number=2, job="13")
    claim(first, "12", host="n1", nodes=("n1", "n2"))
    return made


def reply(made, **more):
    """Write the answer of the scheduler: one job runs, two wait, one is over."""
    waits = {"reason": "waiting for resources", **more}
    answer(
        made,
        {
            "1.0": view("12", "running", nodes=("n1", "n2")),
            "2.0": view("13_0", "pending", **waits),
            "2.1": view("13_1", "pending", **waits),
            "2.2": view("13_2", "ended"),
        },
    )


def row(text, name):
    return next(line for line in text if line.startswith(f"{name} "))


def test_rows_show_the_hosts_of_runs_and_which_jobs_wait(matrix):
    reply(matrix)
    text = plain(Overview(matrix).poll())
    assert text[0] == f"{matrix.name}: running, 2 planned, 1 running, 1 finished, jobs: 1 running, 2 waiting"
    assert "running" in row(text, WIDE.name)
    assert "n1,n2" in row(text, WIDE.name)
    assert "queued" in row(text, WAITS.name)
    assert "2 nodes" in row(text, WAITS.name)
    assert "finished" in row(text, DONE.name)


def test_runs_that_wait_for_the_same_reason_share_a_line(matrix):
    starts = time.time() + 600
    reply(matrix, starts=starts)
    text = plain(Overview(matrix).poll())
    names = f"{WAITS.name}, {ALSO.name}"
    assert f"{names} queued: waiting for resources, expected start {time_of_day(starts)}" in text


def test_the_time_of_a_run_is_that_of_its_own_host(matrix):
    """The clock of the host that trains, in metrics.jsonl, and that of this one are days apart here."""
    reply(matrix)
    folder = matrix.run(WIDE.name)
    age(folder.metrics, 30.0)
    newest = json.loads(folder.metrics.read_text().splitlines()[-1])["time"]
    (shown,) = [one for one in Overview(matrix).poll().runs if one.name == WIDE.name]
    assert shown.elapsed_s == pytest.approx(newest - CREATED + 30.0, abs=5)


def test_a_scheduler_that_does_not_answer_is_named_above_the_steps(matrix):
    answer(matrix, {}, why_not="Unable to contact slurm controller (connect failure)")
    text = plain(Overview(matrix).poll())
    silent = "Slurm does not answer: Unable to contact slurm controller (connect failure); "
    assert text[1] == silent + "the steps below are from the runs' own files"
    assert "40/100" in row(text, WIDE.name)
    assert "running" in row(text, WIDE.name)  # its claim is fresh


def test_a_node_without_a_sign_of_life_is_named(matrix):
    reply(matrix)
    node(NodeDir(matrix.run(WIDE.name), 1), "n2", age_s=QUIET_S + 5)
    text = plain(Overview(matrix).poll())
    assert any(line.startswith("! node n2 has not answered for ") and WIDE.name in line for line in text)


def test_a_suspended_job_is_reported_and_its_hosts_are_not_taken_for_lost(matrix):
    (share,) = make_submission(matrix, [[WIDE.name]], number=3, job="14", nodes=2)
    claim(share, "14", host="n1", nodes=("n1", "n2"), age_s=10 * QUIET_S)
    answer(matrix, {"3.0": view("14", "running", state="SUSPENDED", reason="is suspended (SUSPENDED)")})
    text = plain(Overview(matrix).poll())
    assert f"! the job of {WIDE.name} is suspended (SUSPENDED)" in text
    assert not any("has not answered" in line for line in text)


def test_attempts_say_why_they_ended_and_the_lost_node_is_named(matrix):
    folder = matrix.run(WIDE.name)
    attempts = [
        {"attempt": 1, "status": "stopped", "kind": "time limit", "reason": "the time limit of its job was near"},
        {"attempt": 2, "status": "stopped", "kind": "node lost", "reason": "n2 does not answer"},
        {"attempt": 3, "status": "running", "started": CREATED},
    ]
    write_json(folder.status, read_json(folder.status) | {"attempt": 3, "attempts": attempts})
    reply(matrix)
    (share,) = make_submission(matrix, [[WIDE.name]], job="12", nodes=2, events=[])
    claim(share, "12", host="n1", nodes=("n1", "n3"), restart=2)
    text = plain(Overview(matrix).poll())
    before = "before: time limit, node lost (n2 does not answer)"
    assert f"{WIDE.name}: attempt 3; {before}; restart 2 of job 12" in text


def test_a_job_that_waits_again_names_the_node_that_it_lost(matrix):
    folder = matrix.run(WIDE.name)
    write_json(folder.status, read_json(folder.status) | {"status": "stopped", "reason": "n2 does not answer"})
    (share,) = make_submission(matrix, [[WIDE.name]], job="12", nodes=2, events=[])
    claim(share, "12", host="n1")
    end(share, "12", kind="node lost", lost=("n2",), requeued=True)
    text = plain(Overview(matrix).poll())
    assert "queued" in row(text, WIDE.name)
    assert f"{WIDE.name} queued: its job starts again (node lost), lost n2 before" in text


@pytest.mark.parametrize(("state", "has_log"), [("FAILED", True), ("CANCELLED", False)])
def test_a_job_that_died_before_its_run_began_comes_with_its_log(tmp_path, state, has_log):
    made = make_matrix(tmp_path, [ALSO], took=None)
    make_engine(made)
    (share,) = make_submission(made, [[ALSO.name]])
    share.log.write_text("module: command not found\n", encoding="utf-8")
    answer(made, {"1.0": view("12", "ended", state=state, reason="ended with an error")})
    (line,) = [one for one in plain(Overview(made).poll()) if "without a job" in one]
    assert line.startswith(f"{ALSO.name} without a job: ended with an error")
    assert (f" logs TARGET={made.path} RUN={ALSO.name}" in line) == has_log


def test_slurm_calls_the_job_of_a_run_that_was_held_a_failed_one_and_status_does_not(tmp_path):
    made = make_matrix(tmp_path, [ALSO], took=None)
    make_engine(made)
    (share,) = make_submission(made, [[ALSO.name]])
    claim(share)
    end(share)
    answer(made, {"1.0": view("12", "ended", state="FAILED", reason="ended with an error")})
    assert not [line for line in plain(Overview(made).poll()) if "without a job" in line]


def test_a_run_that_waits_for_the_others_of_its_job_has_no_attempt_yet(matrix):
    (share,) = make_submission(matrix, [[WIDE.name, ALSO.name]], number=3, job="15")
    claim(share, "15", host="n1", restart=2)
    answer(matrix, {"3.0": view("15", "running")})
    assert f"{ALSO.name}: restart 2 of job 15" in plain(Overview(matrix).poll())


def test_a_run_that_gets_nowhere_comes_with_the_command_that_gives_it_more_time(matrix):
    folder = matrix.run(WIDE.name)
    ended = {"status": "failed", "kind": "no progress", "reason": "2 restarts of job 12 in a row saved no later step"}
    attempt = {"attempt": 1, "started": CREATED, "ended": CREATED + 60, **ended}
    write_json(folder.status, read_json(folder.status) | {**ended, "attempts": [attempt]})
    answer(matrix, {"1.0": view("12", "ended")})
    (line,) = [one for one in plain(Overview(matrix).poll()) if "got nowhere" in one]
    assert line.endswith(f" continue TARGET={matrix.path} RETRY_FAILED=1 SLURM_TIME=<longer>")


def test_the_end_of_a_killed_start_comes_with_the_restart_and_with_the_way_on(matrix):
    folder, why = matrix.run(WIDE.name), "out of memory (K8S_MEMORY)"
    ended = {"status": "failed", "kind": "no progress", "reason": "2 restarts of job 12 in a row saved no later step"}
    attempt = {"attempt": 1, "started": CREATED, "ended": CREATED + 60, **ended}
    write_json(folder.status, read_json(folder.status) | {**ended, "attempts": [attempt]})
    (share,) = make_submission(matrix, [[WIDE.name]], job="12", nodes=2, events=[])
    claim(share, "12", host="n1", restart=2)
    answer(matrix, {"1.0": view("12", "ended", before=why)})
    text = plain(Overview(matrix).poll())
    assert any(f"got nowhere: {why}; change that, then make continue" in line for line in text)
    assert any(line.endswith(f"restart 2 of job 12 ({why})") for line in text)


def test_a_node_without_a_sign_of_life_comes_with_what_the_scheduler_says(matrix):
    reply(matrix)
    (share,) = make_submission(matrix, [[WIDE.name]], job="12", nodes=2, events=[])
    claim(share, "12", host="n1", nodes=("n1", "n2"), age_s=QUIET_S + 5)
    answer(matrix, {"1.0": view("12", "running", reason="its pod is being deleted")})
    text = plain(Overview(matrix).poll())
    assert any("! node n1 has not answered for" in line and line.endswith("its pod is being deleted") for line in text)


def test_a_matrix_whose_jobs_all_wait_is_queued_and_need_not_be_continued(tmp_path):
    made = make_matrix(tmp_path, [ALSO], took=None)
    make_engine(made)
    make_submission(made, [[ALSO.name]])
    answer(made, {"1.0": view("12", "pending")})
    found = Overview(made).poll()
    assert headline(found) == [f"{made.name}: queued, 1 planned, jobs: 1 waiting"]
    assert not any("continue" in line for line in plain(found))
    assert as_json(found)["jobs"]["waiting"] == 1


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"submitted": False}, "the submission was interrupted: 1 run without a job; submit: "),
        ({"path": "/elsewhere", "submitted": True}, "moved from /elsewhere: "),
    ],
)
def test_runs_without_a_job_come_with_the_next_command(tmp_path, engine, message):
    made = make_matrix(tmp_path, [ALSO], took=None)
    write_engine(made, EngineFile(**{"engine": "slurm", "id": "k7", "path": str(made.path.resolve()), **engine}))
    text = plain(Overview(made).poll())
    assert any(line.startswith(message) and "continue TARGET=" in line for line in text)
    assert sum("continue" in line for line in text) == 1


def test_gpus_of_all_nodes_are_shown_with_their_hosts(matrix):
    reply(matrix)
    for number, host in enumerate(("n1", "n2")):
        folder = NodeDir(matrix.run(WIDE.name), number)
        node(folder, host)
        gpu = {"gpu_index": 0, "gpu_name": "NVIDIA A10G", "uuid": f"GPU-{host}", "utilization": 97.0}
        entry = {"timestamp": "2026-11-20T05:23:30+00:00", "multi_gpu_data": [gpu]}
        file = JsonArrayFile(folder.recording.gpu_stats_multi)
        file.append(entry)
        file.close()
    text = "\n".join(plain(Overview(matrix).poll()))
    assert "n1:0 NVIDIA A10G" in text
    assert "n2:0 NVIDIA A10G" in text


def test_an_estimate_knows_the_start_that_the_scheduler_expects(matrix):
    now = time.time()
    reply(matrix, starts=now + 3600)
    found = Overview(matrix).poll(now)
    (shown,) = [one for one in found.runs if one.name == ALSO.name]
    assert shown.starts_s == pytest.approx(3600, abs=10)
    assert shown.ends_s == pytest.approx(3600 + shown.left_s, abs=10)
    assert any(line.startswith("end: ") for line in lines(found, now))


def test_an_estimate_without_an_expected_start_says_so(matrix):
    reply(matrix)
    now = time.time()
    text = lines(Overview(matrix).poll(now), now)
    assert any(
        line.startswith("time left: unknown (Slurm expects no start of 2 runs yet; the longest") for line in text
    )


@pytest.mark.process
def test_the_scheduler_is_asked_by_the_command(matrix, monkeypatch, capsys):
    from kmatrix.cli.commands import Arguments
    from kmatrix.cli.status import status

    scheduler = ScriptedScheduler(phases={"12": "running", "13_0": "pending", "13_1": "pending", "13_2": "ended"})
    monkeypatch.setattr("kmatrix.engines.polling.find_scheduler", lambda engine, settings: scheduler)
    assert status(Arguments("status", {"TARGET": str(matrix.path)})) == 0
    assert "jobs: 1 running, 2 waiting" in capsys.readouterr().out
    assert scheduler.questions == 1


def test_a_job_that_starts_says_what_it_waits_for(matrix):
    reply(matrix)
    answer(matrix, {"2.0": view("13_0", "running", nodes=("n3",), reason="pod 1 of 2: unschedulable")})
    assert f"{WAITS.name} starting: pod 1 of 2: unschedulable" in plain(Overview(matrix).poll())


def test_a_job_that_is_gone_says_why_unless_its_user_has_cancelled_it(matrix):
    gone = {"2.0": view("13_0", "unknown", reason="its Job was deleted"), "2.1": view("13_1", "unknown")}
    answer(matrix, gone)
    line = f"{WAITS.name} without a job: its Job was deleted"
    assert line in plain(Overview(matrix).poll())
    append_job_line(JobsDir(matrix), JobLine(event=CANCELLED, submission=2, time=1.0))
    assert line not in plain(Overview(matrix).poll())


@pytest.mark.process
def test_seeds_that_the_last_job_did_not_submit_come_with_its_log_and_the_command(tmp_path):
    made = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    made.path.mkdir()
    losses = {"adamw": [3.285, 3.271, 3.28], "muon": [3.287, 3.272, 3.29]}  # another seed of each is wanted
    first = [name_of(one, number) for one in losses for number in (1, 2, 3)]
    plans = reopen(adaptive_matrix(made, list(losses), 5), (), names=first).plans
    drive(made, plans, ScriptedEngine(losses), poll_s=0.0)
    make_engine(made)
    make_submission(made, [[name] for name in first], job="12")
    (last,) = make_submission(made, [[]], number=2, job="13", kind=REPORT, seeds=True)
    answer(made, {**{f"1.{task}": view(f"12_{task}", "ended") for task in range(6)}, "2.0": view("13", "ended")})
    again = f"submit: make continue TARGET={made.path}"
    assert f"the next seeds have no job: 2 runs; {again}" in plain(Overview(made).poll())
    last.log.write_text("no further seeds are submitted: the budget of the matrix is spent\n")
    found = Overview(made).poll()
    assert f"the next seeds have no job: 2 runs; why: {last.log}; {again}" in plain(found)
    assert as_json(found)["jobs"]["next_log"] == "jobs/0002/0/slurm.log"
