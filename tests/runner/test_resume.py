"""Continue matrices and retry runs, with the fake trainer."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from checkpoints import add_checkpoint
from instant import InstantEngine
from kmatrix.cli.running.limits import refuse_if_spent, resume_from
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.experiment.reuse import reuse_runs
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.records.checkpoint_dir import new_folder
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.lock import MAKING, held, holder, this_process, try_lock
from kmatrix.records.paths import MatrixDir
from kmatrix.records.plan import RunTexts, make_runs, write_plan
from kmatrix.records.runs import Status
from kmatrix.records.tracking import SyncState, SyncStatus, sync_status, write_track
from kmatrix.runner.archive import archive_result
from kmatrix.runner.loop import drive
from kmatrix.runner.resume import describe_plan, reopen
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.status_file import recover_status
from programs import run as program
from running import END_S, engine, plan_of, processes_naming, wait_for_start
from state_rules import find_violation
from waiting import wait_until

GPUS = tuple(Gpu(index=i, name="A10G", uuid=f"GPU-{i}", memory_total=23028) for i in range(2))


def resume_plan(matrix, behave="finish", **options):
    """Return the pending plans, with trainers that behave like this."""
    return reopen(matrix, options.pop("gpus", ()), command=(f"--behave={behave}",), **options)


@pytest.fixture
def make(matrix, plan):
    """Make the directory of a run with the fields that a continued matrix reads."""

    def run(name, **train):
        planned = plan(name)
        record = read_json(planned.dir.run_json)
        fields = {"num_gpus": 1, "device": "cpu", "cpu_threads": 1, "data_path": "/data"}
        write_json(planned.dir.run_json, {**record, "timeout_s": 0, "train": {**record["train"], **fields, **train}})
        return planned.dir

    return run


def attempts(run):
    return [
        (entry["attempt"], entry["status"], entry["resume"], entry["micro_batch"])
        for entry in read_json(run.status)["attempts"]
    ]


@pytest.mark.nightly
def test_a_stopped_run_resumes_and_finished_runs_are_kept(matrix, make, start_runner):
    first, second, _ = make("a"), make("b"), make("c")
    process = start_runner("a", "b=hang", "c")
    wait_until(second.metrics.exists)
    wait_until(lambda: len(list(read_jsonl(second.metrics))) > 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_S) == 130
    kept = first.result.read_bytes()
    todo = resume_plan(matrix)
    assert [(each.name, each.attempt, each.resume) for each in todo.plans] == [("b", 2, "auto"), ("c", 1, "none")]
    assert drive(matrix, todo.plans, engine(), poll_s=0.02).exit_code == 0
    assert first.result.read_bytes() == kept
    assert attempts(second) == [(1, "stopped", "none", None), (2, "finished", "auto", None)]
    saved = int((second.path / "checkpoints" / "step").read_text())
    assert saved > 0
    assert [line["step"] for line in read_jsonl(second.metrics) if line["attempt"] == 2][:1] in ([saved], [])
    assert resume_plan(matrix).plans == ()


@pytest.mark.process
def test_a_run_of_a_killed_runner_resumes(matrix, make, start_runner):
    run = make("a")
    process = start_runner("a=hang")
    wait_for_start(plan_of(matrix, run.name))
    process.kill()
    process.wait()
    wait_until(lambda: processes_naming(matrix) == [])
    todo = resume_plan(matrix)
    assert [(each.attempt, each.resume) for each in todo.plans] == [(2, "auto")]
    assert drive(matrix, todo.plans, engine(), poll_s=0.02).exit_code == 0
    assert attempts(run)[1] == (2, "finished", "auto", None)
    assert recover_status(run, has_runner=False).status is Status.FINISHED


@pytest.mark.process
def test_a_failed_run_is_retried_only_on_request(matrix, make):
    run = make("a")
    drive(matrix, resume_plan(matrix, "nan").plans, engine(), poll_s=0.02)
    todo = resume_plan(matrix)
    assert todo.plans == ()
    assert describe_plan(todo) == ["1 failed: unchanged (RETRY_FAILED=1 retries)"]
    drive(matrix, resume_plan(matrix, retry_failed=True).plans, engine(), poll_s=0.02)
    assert attempts(run) == [(1, "failed", "none", None), (2, "finished", "auto", None)]


def test_only_the_selected_runs_continue(matrix, make):
    for name in "abc":
        make(name)
    todo = resume_plan(matrix, names={"b"})
    assert [each.name for each in todo.plans] == ["b"]
    outcome = drive(matrix, todo.plans, InstantEngine(), poll_s=0.0)
    assert (outcome.exit_code, outcome.counts) == (0, {"planned": 2, "finished": 1})


@pytest.mark.parametrize("resume", ["best", "latest", "none", "/a/checkpoint.pt"])
def test_another_checkpoint_can_be_requested_and_reaches_the_trainer(matrix, make, resume):
    run = make("a")
    write_json(run.status, {"status": "stopped", "attempts": [{"attempt": 1, "status": "stopped"}]})
    (each,) = resume_plan(matrix, resume=resume).plans
    expected = [str(run.path), "--attempt", "2"]
    assert each.arguments == expected + ([] if resume == "none" else ["--resume", resume])


def test_another_micro_batch_that_keeps_the_global_batch_reaches_the_trainer_and_stays(matrix, make):
    run = make("a", num_gpus=2, batch_size=6, global_batch=24)
    write_json(run.status, {"status": "stopped", "attempts": [{"attempt": 1, "status": "stopped"}]})
    (each,) = resume_plan(matrix, micro_batch=3).plans
    assert each.arguments == [str(run.path), "--attempt", "2", "--resume", "auto", "--micro-batch", "3"]
    assert describe_plan(resume_plan(matrix, micro_batch=3))[0].endswith("micro-batch 3")
    write_json(run.status, {"attempts": [{"attempt": 1, "status": "stopped", "micro_batch": 3}], "status": "stopped"})
    assert resume_plan(matrix).plans[0].micro_batch == 3


def test_a_micro_batch_that_would_change_the_global_batch_is_refused_with_the_divisors(matrix, make):
    make("a", num_gpus=2, batch_size=6, global_batch=24)
    with pytest.raises(ConfigError, match="MICRO_BATCH=5 would change the global batch of a") as error:
        resume_plan(matrix, micro_batch=5)
    assert error.value.why == "each of 2 ranks has 12 of the 24 sequences of a step"
    assert error.value.hint == "pass a divisor of 12: 1, 2, 3, 4, 6, 12"


def test_a_continued_run_keeps_its_planned_configuration(matrix, make):
    run = make("a", num_gpus=2, device="cuda", cpu_threads=3)
    (each,) = resume_plan(matrix, gpus=GPUS).plans
    assert (each.ranks, each.cuda, each.cpu_threads, each.timeout_s) == (2, True, 3, 0.0)
    assert each.run_id == read_json(run.run_json)["run_id"]


def test_a_run_with_too_few_gpus_is_skipped_and_continues_once_there_are_enough(matrix, make):
    run = make("a", num_gpus=2, device="cuda")
    todo = resume_plan(matrix, gpus=GPUS[:1])
    assert todo.skipped == {"a": "needs 2 GPUs, found 1"}
    assert drive(matrix, (), engine(), skipped=todo.skipped, poll_s=0.02).exit_code == 1
    assert read_json(run.status)["status"] == "skipped"
    assert [each.name for each in resume_plan(matrix, gpus=GPUS).plans] == ["a"]


@pytest.mark.process
def test_out_of_memory_halves_the_micro_batch_until_it_fits(matrix, make):
    run, seen = make("a"), []
    outcome = drive(matrix, resume_plan(matrix, "oom3").plans, engine(), on_progress=seen.append, poll_s=0.02)
    assert outcome.exit_code == 0
    assert attempts(run) == [
        *[(1, "failed", "none", None), (2, "failed", "auto", 6)],
        (3, "finished", "auto", 3),
    ]
    assert read_json(run.status)["attempts"][0]["kind"] == "oom"
    assert read_json(run.run_used)["train"]["batch_size"] == 3
    assert [line["micro_batch"] for line in read_jsonl(matrix.journal) if line["event"] == "run retried"] == [6, 3]
    (first, second) = [progress.reason for progress in seen if progress.status is Status.FAILED]
    assert first == "out of memory with 12 sequences; retrying with micro-batch 6"
    assert second.endswith("retrying with micro-batch 3")


@pytest.mark.process
def test_a_stop_between_two_attempts_stops_the_run(matrix, make):
    run = make("a")

    def show(progress):
        if progress.status is Status.FAILED:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = drive(matrix, resume_plan(matrix, "oom3").plans, engine(), on_progress=show, poll_s=0.02)
    assert len(attempts(run)) == 1 or outcome.exit_code == 130
    assert [each.micro_batch for each in resume_plan(matrix).plans] == [6]


@pytest.mark.process
def test_a_trainer_that_ignores_the_micro_batch_is_a_failure(matrix, make):
    run = make("a")
    entry = {"attempt": 1, "status": "failed", "kind": "oom"}
    write_json(run.status, {"status": "failed", "attempts": [entry]})
    drive(matrix, resume_plan(matrix, "adjusted").plans, engine(), poll_s=0.02)
    assert read_json(run.status)["status"] == "finished"  # it used 6, as requested
    (other,) = [make("b")]
    entry = {"attempt": 2, "status": "failed", "kind": "oom", "micro_batch": 6}
    write_json(other.status, {"status": "failed", "attempt": 2, "attempts": [entry]})
    drive(matrix, resume_plan(matrix, "smaller").plans, engine(), poll_s=0.02)
    assert read_json(other.status)["reason"] == "configuration mismatch: batch_size requested 3, used 6"


@pytest.mark.process
def test_a_plan_that_another_runner_executed_meanwhile_is_dropped(matrix, make):
    run, other = make("a"), make("b")
    late = resume_plan(matrix).plans
    drive(matrix, resume_plan(matrix, names={"a"}).plans, engine(), poll_s=0.02)
    kept = run.result.read_bytes()
    outcome = drive(matrix, late, engine(), poll_s=0.02)
    assert (outcome.exit_code, outcome.counts) == (0, {"finished": 2})
    assert run.result.read_bytes() == kept
    assert len(attempts(run)) == len(attempts(other)) == 1


# The holder of a matrix


def test_a_lock_of_an_earlier_boot_is_ignored(matrix, make):
    run = make("a")
    write_json(matrix.lock, {"pid": os.getpid(), "host": "localhost", "pid_started": 1, "boot_id": "before"})
    write_json(matrix.status, {"status": "running", "pid": os.getpid()})
    write_json(run.status, {"status": "running", "attempts": [{"attempt": 1, "status": "running"}]})
    assert holder(matrix) is None
    assert not matrix.is_held()
    assert drive(matrix, resume_plan(matrix).plans, InstantEngine(), poll_s=0.0).exit_code == 0
    assert attempts(run)[0][1] == "stopped"


def test_the_holder_of_a_matrix_is_a_live_process(matrix):
    with held(matrix):
        assert holder(matrix) == this_process()
        assert holder(matrix).lives_here()


def test_a_second_command_refuses_a_matrix_that_is_being_made(matrix, make):
    make("a")
    with held(matrix, MAKING):
        result = program("continue", f"TARGET={matrix.path}")
    assert (result.status, f"is being made by process {os.getpid()}" in result.err) == (2, True)
    assert not matrix.journal.exists()


def test_a_truncated_journal_continues_on_a_new_line(matrix, make):
    make("a")
    matrix.journal.write_text('{"schema": 1, "event": "run sta')
    drive(matrix, resume_plan(matrix).plans, InstantEngine(), poll_s=0.0)
    assert next(line["event"] for line in read_jsonl(matrix.journal)) == "matrix started"


@pytest.mark.process
def test_a_lost_terminal_does_not_end_the_runner(matrix, make, start_runner):
    run = make("a")
    process = start_runner("a=hang")
    wait_for_start(plan_of(matrix, run.name))
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: [line["event"] for line in read_jsonl(matrix.journal)][-1] == "terminal lost")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_S) == 130


# Archived results


def test_an_archived_result_is_complete_and_its_run_is_planned_again(matrix, make):
    run = make("a")
    drive(matrix, resume_plan(matrix).plans, InstantEngine(), poll_s=0.0)
    old = {path.name: path.read_bytes() for path in (run.result, run.metrics, run.output_log, run.curves)}
    assert archive_result(run) == run.archive / "1"
    assert {name: (run.archive / "1" / name).read_bytes() for name in old} == old
    assert read_json(run.archive / "1" / "status.json")["status"] == "finished"
    remaining = {path.name for path in run.path.iterdir()}
    assert remaining == {"run.json", "status.json", ".lock", "archive"}
    assert recover_status(run, has_runner=False).status is Status.PLANNED
    (planned,) = resume_plan(matrix).plans
    assert (planned.attempt, planned.resume) == (2, "none")
    drive(matrix, [planned], InstantEngine(), poll_s=0.0)
    assert attempts(run) == [(2, "finished", "none", None)]
    assert {line["attempt"] for line in read_jsonl(run.metrics)} == {2}
    assert read_json(run.curves)["attempt"] == 2
    assert archive_result(run) == run.archive / "2"
    assert sorted(path.name for path in run.archive.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("moves", range(6))
def test_an_archive_interrupted_by_a_kill_loses_nothing_and_the_next_runner_completes_it(
    matrix, make, monkeypatch, moves
):
    run = make("a")
    drive(matrix, resume_plan(matrix).plans, InstantEngine(), poll_s=0.0)
    names = ("result.json", "metrics.jsonl", "run_used.json", "output.log")
    old = {name: (run.path / name).read_bytes() for name in names}
    left, real = [moves], Path.replace

    def replace(self, target):
        # Count only moves into the archive: names with a dot are temporary files of atomic writes.
        if self.parent == run.path and not self.name.startswith("."):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with suppress(KeyboardInterrupt):
        archive_result(run)
    monkeypatch.undo()
    assert find_violation(recover_status(run, has_runner=False)) == ""
    plans = resume_plan(matrix).plans
    assert [each.attempt for each in plans] == [2]
    drive(matrix, plans, InstantEngine(), poll_s=0.0)
    assert {name: (run.archive / "1" / name).read_bytes() for name in old} == old
    assert read_json(run.result)["attempt"] == 2


def test_checkpoints_on_another_disk_are_archived_there(matrix, make, tmp_path):
    run = make("a")
    folder = new_folder(tmp_path / "disk", matrix, matrix.path)
    write_json(matrix.matrix_json, {"name": matrix.name, "checkpoints": str(folder), "runs": [{"name": "a"}]})
    drive(matrix, resume_plan(matrix).plans, InstantEngine(), poll_s=0.0)
    (folder / "a").mkdir(exist_ok=True)
    (folder / "a" / "step_5.pt").write_text("weights")
    archive_result(run)
    assert (folder / "a.archive1" / "step_5.pt").read_text() == "weights"
    assert not (folder / "a").exists()


def test_a_run_with_live_processes_is_not_archived(matrix, make):
    run = make("a")
    handle = try_lock(run.lock)
    with pytest.raises(LaunchError, match="still has processes"):
        archive_result(run)
    os.close(handle)


# Reused runs


NEUTRAL = {"log_norms", "log_interval"}
ORIGIN = {"code": "c0de", "versions": {"torch": "2.13"}, "cpu": "EPYC", "gpus": []}


@pytest.fixture
def finished_and_planned(matrix, make):
    """A finished run in one matrix, and the same run planned in another."""
    first = make("a")
    record = read_json(first.run_json) | {"provenance": ORIGIN}
    train = record["train"] | {"log_interval": 5, "data_sha256": "d", "data_path": "/here"}
    write_json(first.run_json, {**record, "train": train})
    drive(matrix, resume_plan(matrix).plans, InstantEngine(), poll_s=0.0)
    write_json(first.gpu_summary, {"simulated": False})
    first.gpu_stats.write_text("[]")
    first.checkpoints.mkdir(exist_ok=True)
    add_checkpoint(first.checkpoints, 30)
    later = MatrixDir(matrix.path.with_name("test_matrix_results_20260102_000000"))
    second = later.run("b")
    train = train | {"log_interval": 1, "data_path": "/there"}
    write_json(second.run_json, {**record, "name": "b", "train": train})
    return first, second


def reuse(second):
    later = MatrixDir(second.path.parent)
    return reuse_runs(later, later.path.parent, NEUTRAL)


def test_a_finished_run_with_the_same_id_is_reused_and_marked(finished_and_planned):
    first, second = finished_and_planned
    source = f"{first.path.parent.name}/a"
    assert reuse(second) == {"b": source}
    state = recover_status(second, has_runner=False)
    assert (state.status, state.reused_from) == (
        Status.FINISHED,
        source,
    )
    assert read_json(second.run_json)["reused_from"] == source
    assert read_json(second.run_json)["name"] == "b"
    assert recover_status(second, has_runner=False).status is Status.FINISHED
    assert resume_plan(MatrixDir(second.path.parent)).plans == ()
    shutil.rmtree(first.path.parent)
    assert read_json(second.result)["status"] == "finished"
    assert not second.checkpoints.exists()


def test_a_killed_reuse_is_made_again_from_the_plan(finished_and_planned, monkeypatch):
    _, second = finished_and_planned
    later = MatrixDir(second.path.parent)
    write_json(later.matrix_json, {"name": later.name, "runs": [{"name": "b"}]})
    write_plan(later, [RunTexts("b", ("", "", second.run_json.read_text()))])
    with monkeypatch.context() as patched:
        rename = Path.rename
        patched.setattr(Path, "rename", lambda path, to: killed() if to == second.path else rename(path, to))
        with pytest.raises(KeyboardInterrupt):
            reuse(second)
    assert later.missing() == ["b"]
    make_runs(later, {"b"})
    assert reuse(second) != {}


def killed(*_args, **_kwargs):
    raise KeyboardInterrupt


def test_the_tracker_state_of_a_reused_run_is_not_copied(finished_and_planned):
    first, second = finished_and_planned
    write_track(first, [SyncStatus(tracker="wandb", state=SyncState.DONE, points=1)])
    first.track_log.write_text("")
    (first.path / "wandb").mkdir()
    write_json(second.run_json, read_json(second.run_json) | {"tracking": {"trackers": ["wandb"]}})
    reuse(second)
    assert not any((second.path / name).exists() for name in ("track.json", "track.log", ".track.lock", "wandb"))
    (sent,) = sync_status(second)
    assert (sent.state, sent.waiting) == (SyncState.BEHIND, 1)
    assert sent.error == f"reused from {first.path.parent.name}/a"


def test_a_run_reused_twice_names_where_it_was_trained(finished_and_planned):
    first, second = finished_and_planned
    reuse(second)
    third = MatrixDir(second.path.parent.with_name("test_matrix_results_20260103_000000")).run("c")
    record = {name: value for name, value in read_json(second.run_json).items() if name != "reused_from"}
    write_json(third.run_json, record)
    assert reuse(third) == {"c": f"{first.path.parent.name}/a"}


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"data_sha256": "other"}},
        {"train": {"cpu_threads": 7}},
        {"provenance": {"code": "other"}},
        {"provenance": {"versions": {"torch": "2.14"}}},
        {"provenance": {"cpu": "Xeon"}},
    ],
)
def test_a_run_that_would_not_be_equal_is_trained_again(finished_and_planned, change):
    _, second = finished_and_planned
    record = read_json(second.run_json)
    write_json(second.run_json, record | {part: record[part] | values for part, values in change.items()})
    assert reuse(second) == {}
    assert recover_status(second, has_runner=False).status is Status.PLANNED


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_only_finished_runs_are_reused(finished_and_planned, status):
    first, second = finished_and_planned
    write_json(first.result, read_json(first.result) | {"status": status})
    write_json(first.status, {"status": status, "attempt": 1})
    assert reuse(second) == {}


def test_a_rerun_of_a_reused_run_does_not_change_the_original(finished_and_planned):
    first, second = finished_and_planned
    reuse(second)
    kept = first.metrics.read_bytes()
    archive_result(second)
    assert "reused_from" not in read_json(second.run_json)
    plans = resume_plan(MatrixDir(second.path.parent)).plans
    assert [(each.attempt, each.resume) for each in plans] == [(2, "none")]
    drive(MatrixDir(second.path.parent), plans, InstantEngine(), poll_s=0.0)
    state = recover_status(second, has_runner=False)
    assert (state.status, state.reused_from) == (
        Status.FINISHED,
        "",
    )
    assert first.metrics.read_bytes() == kept
    assert (second.archive / "1" / "result.json").exists()


# The command


def test_a_checkpoint_is_given_by_its_full_path_and_anything_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "step_5.pt").touch()
    monkeypatch.chdir(tmp_path)
    assert resume_from("step_5.pt") == str(tmp_path / "step_5.pt")
    with pytest.raises(ConfigError, match="RESUME=bset: no such checkpoint"):
        resume_from("bset")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["TARGET=nothing"], "TARGET=nothing is not a matrix directory"),
        (["RUN=lion*"], "RUN=lion* matches no run of"),
        (["RETRY_FAILED=maybe"], "RETRY_FAILED=maybe"),
        (["DETACH=2"], "expected 1 or 0"),
        (["RESUME=bset"], "no such checkpoint"),
        (["MAX_ITERS=9"], "continue does not take MAX_ITERS"),
    ],
)
def test_an_invalid_argument_of_continue_is_refused_without_changes(matrix, make, arguments, message):
    run = make("a")
    write_json(matrix.matrix_json, {"name": matrix.name, "runs": [{"name": "a"}]})
    before = sorted(path.name for path in run.path.iterdir())
    result = program("continue", f"RESULTS_DIR={matrix.path.parent}", *arguments)
    assert result.status == 2
    assert message in result.err
    assert sorted(path.name for path in run.path.iterdir()) == before
    assert not matrix.status.exists()


def test_continue_is_refused_while_another_runner_holds_the_matrix(matrix, make):
    make("a")
    write_json(matrix.matrix_json, {"name": matrix.name, "runs": [{"name": "a"}]})
    with held(matrix):
        result = program("continue", f"TARGET={matrix.path}")
    assert (result.status, f"is being run by process {os.getpid()}" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "test-rerun needs a matrix"),
        (["TARGET={}", "OPTIMIZER=lion"], "no run has lion"),
        (["TARGET={}", "RUN=z"], "matches no run"),
    ],
)
def test_a_rerun_without_a_selection_archives_nothing(matrix, make, arguments, message):
    run = make("a", optimizer="adamw")
    write_json(run.result, {"status": "finished"})
    write_json(matrix.matrix_json, {"name": matrix.name, "runs": [{"name": "a"}]})
    result = program("test-rerun", *(argument.format(matrix.path) for argument in arguments))
    assert (result.status, message in result.err) == (2, True)
    assert run.result.exists()
    assert not run.archive.exists()


def test_a_matrix_whose_budget_is_spent_is_refused_and_names_the_argument(matrix, make):
    run = make("a")
    state = {"attempt": 1, "status": "stopped", "started": 1000.0, "ended": 8200.0, "seconds": 7200.0}
    write_json(run.status, {"status": "stopped", "attempts": [state]})
    with pytest.raises(LaunchError, match=r"the budget of \S+ is spent: 2 of 2 hours\n.*BUDGET_HOURS="):
        refuse_if_spent(matrix, MatrixBudget(hours=2))
    refuse_if_spent(matrix, MatrixBudget(hours=3))
    with pytest.raises(LaunchError, match=r"^BUDGET_DOLLARS=5 cannot be checked: the runs of \S+ have no price"):
        refuse_if_spent(matrix, MatrixBudget(dollars=5))
