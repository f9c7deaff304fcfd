"""Execute runs on this machine, from a plan to a status, with the fake trainer."""

import errno
import itertools
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kmatrix.engines.local.engine import LocalEngine
from kmatrix.errors import LaunchError
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.lock import holder
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.states import BudgetEntry, read_matrix_status
from kmatrix.runner.execute import check_plans
from kmatrix.runner.loop import drive
from kmatrix.runner.signals import SAME_KEY_S
from kmatrix.status.classify import describe_exit
from kmatrix.status.cost import MatrixBudget, SpentBudget
from kmatrix.status.state import JobPhase, RunPlan
from kmatrix.status.status_file import recover_status
from running import (
    END_S,
    MAX_ITERS,
    classify_end,
    engine,
    is_alive,
    once_training,
    processes_naming,
    status_of,
    wait_for_start,
)
from waiting import wait_until

# A matrix from start to end


@pytest.mark.process
def test_runs_are_executed_one_after_the_other_and_all_finish(matrix, plan):
    plans = [plan("a"), plan("b")]
    outcome = drive(matrix, plans, engine(), poll_s=0.02)
    assert (outcome.exit_code, outcome.counts) == (0, {"finished": 2})
    times = [(status_of(run)["started"], status_of(run)["ended"]) for run in plans]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


@pytest.mark.process
def test_the_status_files_have_the_documented_fields(matrix, plan):
    run = plan("a")
    drive(matrix, [run], engine(), poll_s=0.02)
    status = status_of(run)
    assert set(status) == {
        *("schema", "run_id", "name", "status", "kind", "reason", "attempt", "started", "ended", "exit_code", "pid"),
        *("log_tail", "attempts", "set_aside", "reused_from", "alerts", "links"),
    }
    (attempt,) = status["attempts"]
    assert (attempt["attempt"], attempt["status"], attempt["resume"], attempt["micro_batch"]) == (
        *(1, "finished", "none"),
        None,
    )
    assert (status["run_id"], status["status"], status["attempt"], status["exit_code"]) == ("id-a", "finished", 1, 0)
    assert (status["reason"], status["pid"], status["log_tail"]) == (None, None, [])
    matrix_status = read_json(matrix.status)
    assert set(matrix_status) == {
        *("schema", "status", "started", "ended", "pid", "host", "pid_started", "boot_id", "counts"),
        *("gpus", "budget"),
    }
    assert (matrix_status["status"], matrix_status["pid"], matrix_status["counts"]) == (
        "finished",
        os.getpid(),
        {"finished": 1},
    )


@pytest.mark.process
def test_the_journal_lists_events_in_order(matrix, plan):
    drive(matrix, [plan("a"), plan("b", "nan")], engine(), skipped={"c": "too big"}, poll_s=0.02)
    lines = [(line["event"], line.get("run"), line.get("status")) for line in read_jsonl(matrix.journal)]
    assert lines == [
        ("matrix started", None, None),
        ("run skipped", "c", "skipped"),
        ("run started", "a", "running"),
        ("run ended", "a", "finished"),
        ("run started", "b", "running"),
        ("run ended", "b", "failed"),
        ("matrix ended", None, "failed"),
    ]


@pytest.mark.process
def test_a_failed_run_does_not_prevent_the_others_and_sets_the_exit_code(matrix, plan):
    plans = [plan("a", "fail"), plan("b")]
    outcome = drive(matrix, plans, engine(), poll_s=0.02)
    assert (outcome.exit_code, outcome.counts) == (1, {"finished": 1, "failed": 1})
    assert read_json(matrix.status)["status"] == "failed"


@pytest.mark.process
def test_a_skipped_run_is_recorded_with_its_reason_and_sets_the_exit_code(matrix, plan):
    plan("b")
    outcome = drive(matrix, [plan("a")], engine(), skipped={"b": "needs 4 GPUs, there is 1"}, poll_s=0.02)
    assert (outcome.exit_code, outcome.counts) == (1, {"finished": 1, "skipped": 1})
    record = read_json(matrix.run("b").status)
    assert (record["status"], record["reason"], record["run_id"]) == ("skipped", "needs 4 GPUs, there is 1", "id-b")


@pytest.mark.process
def test_runs_of_earlier_runners_count_and_a_run_of_a_dead_runner_is_stopped(matrix, plan):
    drive(matrix, [plan("a")], engine(), poll_s=0.02)
    lost = plan("b")
    write_json(lost.dir.status, {"status": "running", "attempts": [{"attempt": 1, "status": "running"}]})
    outcome = drive(matrix, [plan("c")], engine(), poll_s=0.02)
    assert (outcome.exit_code, outcome.counts) == (0, {"finished": 2, "stopped": 1})
    assert (status_of(lost)["status"], status_of(lost)["reason"]) == ("stopped", "its runner died")
    assert read_json(matrix.status)["status"] == "stopped"


# How one run ended


@pytest.mark.process
@pytest.mark.parametrize(
    ("behave", "kind", "reason"),
    [
        ("nan", "nan", "loss is nan at step 2"),
        ("killed", "killed", "killed by signal 9 (out of memory killer?)"),
        ("silent", "died", "ended with exit code 0 and no result.json"),
        ("smaller", "mismatch", "configuration mismatch: batch_size requested 12, used 6"),
    ],
)
def test_a_failed_run_has_a_reason(matrix, plan, behave, kind, reason):
    run = plan("a", behave)
    assert drive(matrix, [run], engine(), poll_s=0.02).exit_code == 1
    assert [status_of(run)[name] for name in ("status", "kind", "reason")] == ["failed", kind, reason]
    result = read_json(run.dir.result)  # of the runner, if the trainer could not write it
    assert behave == "smaller" or [result[name] for name in ("status", "kind", "reason")] == ["failed", kind, reason]


@pytest.mark.process
def test_an_adjustment_declared_by_the_trainer_is_not_a_failure(matrix, plan):
    assert drive(matrix, [plan("a", "adjusted")], engine(), poll_s=0.02).exit_code == 0


@pytest.mark.process
def test_a_failed_run_records_the_end_of_the_log_of_this_attempt(matrix, plan):
    run = plan("a", "fail", attempt=2)
    run.dir.output_log.write_text("of the first attempt\n" * 50)
    drive(matrix, [run], engine(), poll_s=0.02)
    tail = status_of(run)["log_tail"]
    assert tail[0] == "threads 1 gpus ''"
    assert tail[-1] == "ModuleNotFoundError: No module named 'flash_attn'"
    assert "of the first attempt" in run.dir.output_log.read_text()


def test_the_log_tail_contains_no_key(plan):
    key = "hf_" + "a1B" * 12
    run = plan("a")
    run.dir.output_log.write_text(f"denied: {key}\nRuntimeError: token={key}\n", encoding="utf-8")

    verdict = classify_end(run, exit_code=1)

    assert any("denied" in line for line in verdict.log_tail)
    assert key not in "\n".join([verdict.reason, *verdict.log_tail])


def test_the_log_tail_ends_before_the_report_of_torchrun(plan):
    run = plan("a")
    report = "E1120 06:05:01.303000 17961 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    report_body = "\n".join(["Traceback (most recent call last):", *(f"torchrun {i}" for i in range(50))])
    run.dir.output_log.write_text(
        f"Iter 0 | loss 5.3\nnan: loss is nan at step 1\n{report} local_rank: 0\n{report_body}\n"
    )
    tail = classify_end(run, exit_code=1).log_tail
    assert tail == ("Iter 0 | loss 5.3", "nan: loss is nan at step 1", f"{report} local_rank: 0")


FAILURE = """[{rank}]:
  time      : 2026-11-20_12:00:{second:02}
  host      : node
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 4711) {more}
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


@pytest.mark.parametrize(
    ("others", "root", "kind", "reason"),
    [
        ([(1, -9, 0)], (0, 1, 0), "killed", "rank 1 killed by signal 9 (out of memory killer?)"),
        ([(1, 1, 0)], (0, -9, 0), "killed", "rank 0 killed by signal 9 (out of memory killer?)"),
        ([(1, -15, 0)], (0, 1, 0), "error", "a peer is gone"),
        ([(1, -9, 30)], (0, 1, 0), "error", "a peer is gone"),
        ([], (0, 1, 0), "error", "a peer is gone"),
    ],
    ids=["seen after its peer", "seen first", "stopped by torchrun", "killed by torchrun after its time", "alone"],
)
def test_a_killed_rank_is_distinguished_from_the_peers_that_failed_because_of_it(plan, others, root, kind, reason):
    run = plan("a", ranks=2)
    write_json(run.dir.result, {"run_id": run.run_id, "attempt": 1, "status": "failed", "reason": "a peer is gone"})
    failures = [FAILURE.format(rank=rank, code=code, second=second, more="") for rank, code, second in (*others, root)]
    run.dir.output_log.write_text(
        "\n".join(["Failures:", *failures[:-1], "Root Cause (first observed failure):", failures[-1]])
    )
    verdict = classify_end(run, exit_code=1)
    assert (verdict.status, verdict.kind, verdict.reason) == (Status.FAILED, kind, reason)


PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:44690: Connection reset by peer."


@pytest.mark.parametrize(
    ("reason", "exit_code", "kind"),
    [
        (PEER_LOST, None, "killed"),
        (PEER_LOST, 1, "error"),
        (f"rank 1: {PEER_LOST}", None, "killed"),
        ("rank 1: RuntimeError: shapes do not fit", None, "error"),
    ],
    ids=["with its runner", "its runner lives", "seen by another rank first", "a rank that failed by itself"],
)
def test_a_run_whose_processes_vanished_with_the_runner_was_killed(plan, reason, exit_code, kind):
    run = plan("a", ranks=2)
    write_json(run.dir.result, {"run_id": run.run_id, "attempt": 1, "status": "failed", "reason": reason})
    verdict = classify_end(run, exit_code=exit_code)
    assert (verdict.status, verdict.kind, reason in verdict.reason) == (Status.FAILED, kind, True)


def result_of(plan, *, used_fields=None, adjusted=(), **fields):
    """Write the files of a trainer that finished, and classify them."""
    write_json(plan.dir.result, {"run_id": plan.run_id, "attempt": plan.attempt, "status": "finished"} | fields)
    train = read_json(plan.dir.run_json)["train"]
    write_json(plan.dir.run_used, {"train": train | (used_fields or {}), "adjusted": list(adjusted)})
    return classify_end(plan, exit_code=134)


def test_a_finished_result_counts_whatever_the_exit_code(plan):
    assert result_of(plan("a")).status is Status.FINISHED


@pytest.mark.parametrize("fields", [{"attempt": 1}, {"run_id": "other"}])
def test_a_result_of_an_earlier_attempt_or_another_run_is_ignored(plan, fields):
    verdict = result_of(plan("a", attempt=2), **fields)
    assert (verdict.status, verdict.reason) == (Status.FAILED, "killed by signal 6 (abort)")


def test_a_finished_result_without_run_used_json_is_a_failure(plan):
    run = plan("a")
    write_json(run.dir.result, {"run_id": "id-a", "attempt": 1, "status": "finished"})
    assert classify_end(run, exit_code=0).reason.startswith("cannot check the configuration")


def test_a_truncated_result_is_a_failure_that_names_the_file(plan):
    run = plan("a")
    run.dir.result.write_text('{"run_id": "id-a", "att')
    verdict = classify_end(run, exit_code=0)
    assert (verdict.status, "result.json is damaged" in verdict.reason) == (Status.FAILED, True)


def test_a_rank_error_with_an_attempt_number_counts_only_for_that_attempt(plan):
    run = plan("a", attempt=2)
    for rank, attempt in ((0, 1), (1, 2)):
        error = {"rank": rank, "attempt": attempt, "time": 100.0 + rank, "kind": "error", "reason": f"reason {rank}"}
        write_json(run.dir.rank_state(rank), error)
    assert classify_end(run, started=1.0, exit_code=1).reason == "rank 1: reason 1"


def test_the_rank_that_failed_first_is_named(plan):
    run = plan("a")
    for rank, at in ((0, 101.0), (1, 100.0)):
        error = {"rank": rank, "attempt": 1, "time": at, "kind": "error", "reason": f"reason {rank}"}
        write_json(run.dir.rank_state(rank), error)
    assert classify_end(run, started=1.0, exit_code=1).reason == "rank 1: reason 1"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (3, "ended with exit code 3"),
        (-9, "killed by signal 9 (out of memory killer?)"),
        (137, "killed by signal 9 (out of memory killer?)"),
        (143, "killed by signal 15 (SIGTERM)"),
        (139, "killed by signal 11 (segmentation fault)"),
        (255, "ended with exit code 255"),
        (None, "ended without an exit code"),
    ],
)
def test_exit_codes_are_described(code, message):
    assert describe_exit(code) == message


# Limits and stops


@pytest.mark.process
def test_a_run_that_exceeds_its_timeout_is_stopped_and_counts_as_failed(matrix, plan):
    plans = [plan("a", "hang", timeout_s=0.6), plan("b")]
    outcome = drive(matrix, plans, engine(), on_progress=once_training(plans[0]), poll_s=0.02)
    assert outcome.counts == {"finished": 1, "failed": 1}
    assert status_of(plans[0])["reason"] == "took longer than 0.6 s"
    assert read_json(plans[0].dir.result)["status"] == "stopped"  # the trainer saved a checkpoint before it exited
    assert processes_naming(matrix) == []


@pytest.mark.process
def test_a_run_that_ignores_sigterm_is_killed_after_the_grace_period(matrix, plan):
    run = plan("a", "stubborn", timeout_s=0.5)
    drive(matrix, [run], engine(grace_s=0.4), on_progress=once_training(run), poll_s=0.02)
    assert (status_of(run)["status"], status_of(run)["exit_code"]) == ("failed", 137)
    assert processes_naming(matrix) == []


@pytest.mark.process
def test_a_signal_stops_the_current_run_cleanly_and_keeps_the_rest_planned(matrix, plan, start_runner):
    plans = [plan("a", "grandchildren"), plan("b")]
    process = start_runner("a=grandchildren", "b")
    wait_for_start(plans[0])
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_S) == 130
    assert [status_of(run)["status"] for run in plans] == ["stopped", "planned"]
    assert status_of(plans[0])["reason"] == "asked to stop"
    matrix_status = read_json(matrix.status)
    assert (matrix_status["status"], matrix_status["counts"]) == ("stopped", {"planned": 1, "stopped": 1})
    assert processes_naming(matrix) == []
    assert not [pid for pid in read_json(plans[0].dir.path / "grandchildren.json")["pids"] if is_alive(pid)]


@pytest.mark.process
def test_a_second_interrupt_kills_at_once(matrix, plan, start_runner):
    run = plan("a", "stubborn")
    process = start_runner("a=stubborn", grace_s=60)
    wait_for_start(run)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: any(line["event"] == "stop asked" for line in read_jsonl(matrix.journal)))
    requested_at = time.monotonic()  # an earlier one counts as the same key press
    wait_until(lambda: time.monotonic() - requested_at > SAME_KEY_S)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(END_S) == 130
    assert (status_of(run)["status"], status_of(run)["reason"]) == (
        "stopped",
        "asked to stop, and it was killed before it could save",
    )
    assert processes_naming(matrix) == []


@pytest.mark.process
def test_a_killed_runner_leaves_no_process_and_its_run_saves_a_checkpoint(matrix, plan, start_runner):
    run = plan("a", "grandchildren")
    process = start_runner("a=grandchildren", grace_s=END_S)
    wait_for_start(run)
    process.kill()
    process.wait()
    wait_until(lambda: processes_naming(matrix) == [])
    wait_until(lambda: not any(is_alive(pid) for pid in read_json(run.dir.path / "grandchildren.json")["pids"]))
    assert read_json(run.dir.result)["status"] == "stopped"
    assert holder(matrix) is None
    assert recover_status(run.dir, has_runner=False).status is Status.STOPPED


@pytest.mark.nightly
def test_a_run_waits_for_processes_left_by_a_killed_runner(matrix, plan, start_runner):
    run = plan("a", "stubborn")
    process = start_runner("a=stubborn", grace_s=0.5)
    guard = wait_for_start(run)
    first, seen = read_json(run.dir.path / "env.json")["pid"], []
    os.kill(guard, signal.SIGSTOP)  # its time begins when the next runner has seen it
    process.kill()
    process.wait()

    def show(progress):
        seen.append((progress.note, is_alive(first)))
        if len(seen) == 3:
            os.kill(guard, signal.SIGCONT)

    outcome = drive(matrix, [plan("a", attempt=2)], engine(grace_s=0.5), on_progress=show, poll_s=0.02)
    assert outcome.exit_code == 0
    waiting = [alive for note, alive in seen if note.startswith("waiting for an earlier attempt to exit: ")]
    assert waiting[:3] == [True] * 3
    assert re.fullmatch(r"waiting for an earlier attempt to exit: guard \(pid \d+\), .*", seen[0][0])
    assert not any(alive for _, alive in seen[len(waiting) :])
    assert len(seen) > len(waiting)


@pytest.mark.nightly
def test_processes_without_guard_and_runner_delay_the_next_attempt_and_are_named(matrix, plan, start_runner):
    """After SIGKILL of runner and guard, torchrun (here the trainer itself) still holds the lock."""
    run = plan("a", "stubborn")
    process = start_runner("a=stubborn", grace_s=60)
    guard = wait_for_start(run)
    first = read_json(run.dir.path / "env.json")["pid"]
    psutil.Process(guard).kill()
    process.kill()
    process.wait()
    seen = []

    def show(progress):
        seen.append(progress.note)
        if len(seen) == 3 and is_alive(first):
            os.kill(first, signal.SIGKILL)

    assert drive(matrix, [plan("a", attempt=2)], engine(), on_progress=show, poll_s=0.02).exit_code == 0
    assert f"(pid {first})" in seen[0]
    waits = [line for line in read_jsonl(matrix.journal) if line["event"] == "run waits"]
    assert [(line["run"], f"(pid {first})" in line["reason"]) for line in waits] == [("a", True)]


@pytest.mark.process
def test_a_second_runner_of_a_matrix_is_refused_and_names_the_first(matrix, plan, start_runner):
    run = plan("a", "hang")
    process = start_runner("a=hang")
    wait_for_start(run)
    assert holder(matrix).pid == process.pid
    with pytest.raises(LaunchError, match=rf"process {process.pid} on .*\n.*\n.*Ctrl"):
        drive(matrix, [run], engine(), poll_s=0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_S) == 130


@pytest.fixture
def disk(monkeypatch):
    """Return a function: from its call on, no status can be written while its condition holds."""
    files = (
        ("kmatrix.status.status_file", "write_json"),
        ("kmatrix.runner.status_writer", "write_json"),
        ("kmatrix.runner.status_writer", "append_jsonl"),
    )

    def fill(is_full):
        for module, name in files:
            real = getattr(sys.modules[module], name)

            def write(path, value, real=real, **options):
                if is_full():
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                real(path, value, **options)

            monkeypatch.setattr(f"{module}.{name}", write)

    return fill


@pytest.mark.process
def test_a_status_file_that_cannot_be_written_stops_the_run_with_its_path(matrix, plan, disk):
    run, later = plan("a"), plan("b")
    # Its start is the last that can be written.
    disk(lambda: any(line["event"] == "run started" for line in read_jsonl(matrix.journal)))
    with pytest.raises(LaunchError, match=r"cannot write .*/a/status.json\n  why: No space left on device"):
        drive(matrix, [run, later], engine(), poll_s=0.02)
    assert read_json(run.dir.result)["status"] == "finished"
    assert status_of(later)["status"] == "planned"
    assert processes_naming(matrix) == []


def test_a_runner_that_fails_before_it_knows_the_runs_writes_no_status(matrix, plan, monkeypatch):
    """A copy with hard links gets files of its own first, for which the disk may have no space."""

    def raise_disk_full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kmatrix.runner.loop.own_copies", raise_disk_full)
    with pytest.raises(LaunchError, match="No space left on device"):
        drive(matrix, [plan("a")], engine(), poll_s=0.02)
    assert not matrix.status.exists()  # no runs at all would count as finished


@pytest.mark.process
def test_a_matrix_that_is_moved_while_it_runs_is_not_made_again_at_its_old_path(matrix, plan):
    run, later, place = plan("a", "until asked"), plan("b"), matrix.path.with_name("moved")

    def move(_):
        if matrix.path.exists() and run.dir.metrics.exists():
            matrix.path.rename(place)

    with pytest.raises(
        LaunchError, match=r"_000000 is gone\n  why: it was moved or deleted while its runs trained\n  hint: .*"
    ):
        drive(matrix, [run, later], engine(), on_progress=move, poll_s=0.02)
    assert not matrix.path.exists()
    assert processes_naming(matrix) == []
    moved = MatrixDir(place)
    assert [recover_status(one, has_runner=False).status for one in moved.runs()] == ["stopped", "planned"]
    again = replace(run, dir=moved.run("a"), attempt=2, command=("--behave=finish",))
    assert drive(moved, [again], engine(), poll_s=0.02).counts["finished"] == 1


# A budget for the matrix


@pytest.mark.process
def test_a_matrix_whose_budget_is_spent_stops_its_runs_and_starts_no_more(matrix, plan, monkeypatch):
    plans, notes = [plan("a", "hang"), plan("b")], []
    # The budget is spent as soon as the first run trains.
    limit = SpentBudget(symbol="BUDGET_HOURS", more=4, text="2 of 2 hours")
    monkeypatch.setattr(
        MatrixBudget, "spent", lambda self, runs, now: limit if plans[0].dir.metrics.exists() and list(runs) else None
    )
    outcome = drive(matrix, plans, engine(), budget=MatrixBudget(hours=2), on_note=notes.append, poll_s=0.02)
    assert outcome.exit_code == 130
    assert outcome.spent == limit
    assert [status_of(run)["status"] for run in plans] == ["stopped", "planned"]
    assert status_of(plans[0])["reason"] == "the budget of the matrix is spent"
    assert read_json(plans[0].dir.result)["status"] == "stopped"  # it saved a checkpoint
    assert "the budget of the matrix is spent" in notes[0]
    assert read_matrix_status(matrix).budget == BudgetEntry(hours=2)
    assert [line["event"] for line in read_jsonl(matrix.journal) if "budget" in line["event"]] == ["budget spent"]


# The engine


@pytest.mark.process
def test_a_secret_reaches_the_trainer_but_no_file(matrix, plan, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value")
    run = plan("a", "fail")
    drive(matrix, [run], engine(), poll_s=0.02)
    assert read_json(run.dir.path / "env.json")["secret"] == "s3cr3t-value"
    (run.dir.path / "env.json").unlink()
    assert "s3cr3t-value" not in engine().plan([run])
    files = [path for path in matrix.path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert not [path for path in files if b"s3cr3t-value" in path.read_bytes()]


def test_the_printed_command_line_has_torchrun_ranks_and_attempt(matrix):
    run = RunPlan(name="a", run_id="id-a", dir=matrix.run("a"), ranks=4, attempt=2)
    text = LocalEngine(Path("/v/bin/python"), Path("/p")).plan([run])
    assert "/v/bin/python -m torch.distributed.run --standalone --nproc-per-node=4 -m gpt2.train" in text
    assert f"{run.dir.path} --attempt 2 >>{run.dir.output_log} 2>&1" in text
    assert "PYTHONPATH=/p:/p/lib" in text


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"ranks": 0}, "expected at least 1"),
        ({"ranks": 2, "cuda": True}, "2 ranks on 0 GPUs"),
        ({"cpu_threads": 0}, "0 threads"),
        ({"run_id": "other"}, "belongs to run id-a, expected other"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_before_anything_starts(matrix, plan, fields, problem):
    good, too_large = plan("b"), plan("a", **fields)
    with pytest.raises(LaunchError, match=problem):
        check_plans(matrix, [good, too_large], engine())
    assert not matrix.status.exists()
    assert not good.dir.output_log.exists()


@pytest.mark.process
def test_a_submitted_run_is_not_executed_twice(matrix, plan):
    run, local_engine = plan("a"), engine()
    assert local_engine.submit([run]) == local_engine.submit([run])
    wait_until(lambda: local_engine.poll()["a"].phase is JobPhase.ENDED)
    local_engine.submit([run])
    assert local_engine.poll()["a"].phase is JobPhase.ENDED


# Progress


@pytest.mark.process
def test_progress_has_step_loss_speed_and_counts(matrix, plan):
    seen = []
    drive(matrix, [plan("a"), plan("b")], engine(), skipped={"c": "why"}, on_progress=seen.append, poll_s=0.02)
    assert (seen[0].run, seen[0].status, seen[0].reason) == ("c", Status.SKIPPED, "why")
    last = seen[-1]
    assert (last.run, last.index, last.total, last.status) == ("b", 2, 2, Status.FINISHED)
    assert (last.step, last.max_iters, last.val_loss, last.tokens_per_second) == (
        MAX_ITERS - 1,
        MAX_ITERS,
        2.75,
        41000.0,
    )
    assert last.counts == {"finished": 2, "skipped": 1}


# The real torchrun


@pytest.mark.nightly
def test_with_torchrun_a_killed_torchrun_fails_the_run_and_its_workers_exit(matrix, plan, start_runner):
    plans = [plan("a", "hang"), plan("b", "quick")]
    process = start_runner("a=hang", "b=quick", launcher="torchrun")
    guard = psutil.Process(wait_for_start(plans[0]))
    guard.children()[0].kill()
    assert process.wait(END_S) == 1
    assert status_of(plans[0])["reason"] == "killed by signal 9 (out of memory killer?)"
    assert status_of(plans[1])["status"] == "finished"
    assert processes_naming(matrix) == []
