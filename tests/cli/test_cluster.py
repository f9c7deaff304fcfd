"""The commands of a matrix of a cluster, over a scheduler without a cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import time

import pytest

from factories import make_data
from fake_scheduler import FakeScheduler
from kmatrix.cli.running.follow import follow
from kmatrix.engines.base import JobRules
from kmatrix.records.decode import replaced
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs.files import (
    SchedulerPhase,
    newest_shares,
    read_engine,
    read_submission,
    write_engine,
)
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import matrix_dirs
from kmatrix.records.runs import Status
from kmatrix.runner.loop import EXIT_STOPPED
from kmatrix.runner.shares import REPORT_S, report_submission
from kmatrix.status.state import RunState
from programs import Program, prepare_here

pytestmark = pytest.mark.process

CONFIG = (
    *("CONFIG_GPT2_DEVICE_CPU=y", "CONFIG_GPT2_MODEL_CUSTOM=y", "CONFIG_GPT2_N_LAYER=1", "CONFIG_GPT2_N_HEAD=2"),
    *("CONFIG_GPT2_N_EMBD=16", "CONFIG_GPT2_BLOCK_SIZE=32", "CONFIG_GPT2_BATCH_SIZE=4", "CONFIG_GPT2_NUM_GPUS=2"),
    *("CONFIG_GPT2_MAX_ITERS=10", "CONFIG_GPT2_EVAL_INTERVAL=5", "CONFIG_GPT2_EVAL_SAMPLES=12"),
    *("CONFIG_GPT2_TOKENIZER_BYTE=y", "CONFIG_GPT2_DATASET_SHARDS=y", 'CONFIG_GPT2_DATA_PATH="random"'),
    *("CONFIG_MATRIX=y", "CONFIG_AUTO_GENERATE_GRAPHS=n", "CONFIG_ENGINE_SLURM=y"),
)
NODES = "NUM_NODES=1,2"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeScheduler(tmp_path / "slurm.json")

    def found(engine, settings):
        fake.settings = dict(settings)
        return fake

    asking = ("engines.polling",)
    for module in (*asking, "experiment.cluster.nodes", "cli.running.cluster", "cli.running.jobs", "cli.control.stop"):
        monkeypatch.setattr(f"kmatrix.{module}.find_scheduler", found)
    return fake


@pytest.fixture
def user(tmp_path, monkeypatch, slurm):
    prepare_here(monkeypatch)
    make_data(tmp_path / "data" / "random")
    program = Program(tmp_path)
    program.write(*CONFIG, f'CONFIG_DATA_DIR="{tmp_path}/data"', f'CONFIG_RESULTS_DIR="{tmp_path}/results"')
    return program


def only_matrix(tmp_path):
    (matrix,) = matrix_dirs(tmp_path / "results")
    return matrix


def test_a_matrix_is_submitted_and_the_prompt_is_back_with_the_job_ids(user, slurm, tmp_path):
    out = user.check("test-matrix", NODES).out
    matrix = only_matrix(tmp_path)
    assert re.search(r"^job 10[01]: 1 run, on 1 node with", out, re.MULTILINE)
    assert re.search(r"^job 10[01]: 1 run, on 2 nodes with", out, re.MULTILINE)
    assert "job 102: the report, after all others" in out
    assert f"make status TARGET={matrix.path}" in out
    engine = read_engine(matrix)
    assert (engine.engine, engine.submitted, engine.path) == ("slurm", True, str(matrix.path))
    assert slurm.state["102"]["after"] == "100 101"


def test_the_report_asks_for_no_more_time_than_the_partition_allows():
    assert report_submission(JobRules(has_times=True, most_seconds=300.0)).shape.seconds == 300.0
    assert report_submission(JobRules(has_times=True)).shape.seconds == REPORT_S


def test_continue_submits_nothing_twice_and_with_new_settings_what_has_ended(user, slurm, tmp_path):
    user.check("test-matrix", NODES)
    out = user.check("continue").out
    assert "2 runs pending already, and not submitted again: job 100, 101" in out
    assert "jobs keep the settings" not in out
    assert "jobs keep the settings" in user.check("continue", "SLURM_PARTITION=long").out
    assert len(slurm.state) == 3
    for job in slurm.state:
        slurm.change(job, SchedulerPhase.ENDED)
    user.check("continue", "RUN=*2nodes*", "SLURM_PARTITION=short", "RETRY_FAILED=1")
    matrix = only_matrix(tmp_path)
    assert read_engine(matrix).settings["SLURM_PARTITION"] == "short"
    assert slurm.settings["SLURM_PARTITION"] == "short"
    newest = newest_shares(matrix)
    assert [share.submission for run, share in newest.items() if "2nodes" in run] == [4]
    assert read_submission(JobsDir(matrix).submission(4)).arguments == {"RETRY_FAILED": "1"}
    assert slurm.state["104"]["after"] == "100 101 103"


def test_continue_passes_another_micro_batch_to_the_job(user, slurm, tmp_path):
    user.check("test-matrix", NODES)
    for job in slurm.state:
        slurm.change(job, SchedulerPhase.ENDED)
    assert "MICRO_BATCH=3 would change the global batch" in user.refused("continue", "MICRO_BATCH=3")
    user.check("continue", "RUN=*2nodes*", "MICRO_BATCH=2")
    assert read_submission(JobsDir(only_matrix(tmp_path)).submission(4)).arguments == {"MICRO_BATCH": "2"}


def test_the_steps_that_fit_into_a_budget_follow_from_an_earlier_run_on_the_cluster(user, slurm, tmp_path):
    user.check("test-matrix", "NUM_NODES=1")
    (run,) = only_matrix(tmp_path).runs()
    values = {"run_id": read_json(run.run_json)["run_id"], "attempt": 1, "status": "finished", "step": 10}
    write_json(run.result, {**values, "tokens_per_second": 256.0})  # steps of 8 x 32 tokens: 1 s
    message = user.refused("test-matrix", "NUM_NODES=1", "MAX_ITERS=0", "TIME=1h")
    assert "pass MAX_ITERS=3585, which fits at 256 tokens/s, measured in " in message


def test_continue_names_the_hosts_on_which_connections_were_lost(user, slurm, tmp_path):
    user.check("test-matrix", NODES)
    for job in slurm.state:
        slurm.change(job, SchedulerPhase.ENDED)
    wide = next(run for run in only_matrix(tmp_path).runs() if "2nodes" in run.name)
    attempt = {"attempt": 1, "status": "failed", "kind": "nccl", "reason": "timeout", "hosts": ["n1", "n2"]}
    write_json(wide.status, {"status": "failed", "reason": "timeout", "attempts": [attempt]})
    out = user.check("continue").out
    lost = f"note: {wide.name} lost connections or GPUs on n1 and n2"
    assert f"{lost}; to leave out a node: SLURM_EXTRA_FLAGS=--exclude=<node>" in out


def test_an_interrupted_submission_is_completed_by_the_same_command(user, slurm, tmp_path):
    slurm.before_submit = lambda: setattr(slurm, "refuses", "invalid account" if slurm.state else "")
    message = user.refused("test-matrix", NODES)
    assert "invalid account" in message
    assert f"hint: submit the rest: make continue TARGET={only_matrix(tmp_path).path}" in message
    assert not read_engine(only_matrix(tmp_path)).submitted
    slurm.refuses, slurm.before_submit = "", lambda: None
    out = user.check("test-matrix", NODES, "SLURM_ACCOUNT=mine").out
    assert "has the same runs, and was interrupted" in out
    assert "1 run pending already" in out
    matrix = only_matrix(tmp_path)
    assert read_engine(matrix).submitted
    assert read_engine(matrix).settings["SLURM_ACCOUNT"] == "mine"
    assert len(slurm.state) == 3


def test_the_same_command_makes_no_second_matrix_while_jobs_wait_or_run(user, slurm, tmp_path):
    user.check("test-matrix", NODES)
    for reuse, why in (("REUSE=y", "its jobs wait or run"), ("REUSE=n", "less than 60 s ago")):
        out = user.check("test-matrix", NODES, reuse).out
        assert f"{why}: no second matrix is made" in out
        assert "2 runs pending already" in out
        assert only_matrix(tmp_path)
        assert len(slurm.state) == 3
    user.check("test-matrix", "NUM_NODES=2")  # other runs
    assert len(matrix_dirs(tmp_path / "results")) == 2


def test_the_same_command_makes_no_second_matrix_where_the_storage_has_another_path(user, slurm, tmp_path):
    user.check("test-matrix", NODES)
    matrix = only_matrix(tmp_path)
    (tmp_path / "mount").symlink_to(matrix.path.parent)
    # As a host writes it whose path of the results is another one.
    write_engine(matrix, replaced(read_engine(matrix), path=str(tmp_path / "mount" / matrix.name)))
    assert "no second matrix is made" in user.check("test-matrix", NODES).out
    assert only_matrix(tmp_path)
    assert len(slurm.state) == 3


def test_a_second_matrix_is_made_when_asked_for_later_with_other_code_or_after_the_jobs(
    user, slurm, tmp_path, monkeypatch
):
    user.check("test-matrix", NODES)
    long_ago = time.time() - 100
    os.utime(JobsDir(only_matrix(tmp_path)).log, (long_ago, long_ago))
    user.check("test-matrix", NODES, "REUSE=n")
    assert len(matrix_dirs(tmp_path / "results")) == 2
    for matrix in matrix_dirs(tmp_path / "results"):
        record = read_json(matrix.matrix_json)
        write_json(matrix.matrix_json, {**record, "provenance": {**record["provenance"], "code": "f" * 64}})
    user.check("test-matrix", NODES)
    assert len(matrix_dirs(tmp_path / "results")) == 3
    for job in slurm.state:
        slurm.change(job, SchedulerPhase.ENDED)
    monkeypatch.setattr("kmatrix.engines.polling.EVERY_S", -1.0)
    user.check("test-matrix", NODES)
    assert len(matrix_dirs(tmp_path / "results")) == 4


def test_each_run_has_the_command_in_short_and_the_matrix_in_full(user, slurm, tmp_path):
    seeds = ",".join(str(10**9 + number) for number in range(100))  # run.json of each would list those of all others
    user.check("test-matrix", f"SEED={seeds}", "NUM_NODES=2")
    matrix = only_matrix(tmp_path)
    assert seeds in read_json(matrix.matrix_json)["command"]
    commands = {read_json(run.run_json)["provenance"]["command"] for run in matrix.runs()}
    (command,) = commands
    assert len(command) <= 500
    assert "SEED=1000000000,1000000001," in command


def test_runs_that_never_start_on_the_cluster_are_refused_before_anything_is_made(user, slurm, tmp_path):
    slurm.problems = ["4 nodes per run: the partition batch has 2 nodes; pass NUM_NODES=2"]
    assert "pass NUM_NODES=2" in user.refused("test-matrix")
    slurm.problems, slurm.is_down = [], True
    assert "Slurm does not answer" in user.refused("test-matrix")
    assert not (tmp_path / "results").exists()


def test_plan_shows_the_jobs(user, slurm, tmp_path):
    said = user.check("plan", "NUM_NODES=2").out
    assert "Slurm: 1 run, on 2 nodes" in said
    assert "Slurm: at most 2 node-hours if each job starts once and takes its whole time" in said
    assert not (tmp_path / "results").exists()


def test_a_preflight_that_is_interrupted_kills_every_job_of_it(user, slurm, monkeypatch):
    """Each share by itself: a Job of Kubernetes that has several is deleted with all of them, or not at all."""
    killed = []
    monkeypatch.setattr(slurm, "cancel", lambda jobs, *, now=False: killed.append((sorted(jobs), now)))

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kmatrix.cli.running.cluster.watch", interrupt)
    user("test-matrix", "OPTIMIZER=adamw,sgd", "PREFLIGHT=1")
    assert killed == [(["100_0", "100_1"], True)]


def test_arguments_that_a_cluster_or_a_machine_cannot_use_are_refused(user, slurm, tmp_path):
    assert "SIMULATE=2 needs runs on one node" in user.refused("test-matrix", NODES, "SIMULATE=2")
    assert matrix_dirs(tmp_path / "results") == []
    user.check("test-matrix", NODES)
    assert "selects GPUs of this machine" in user.refused("continue", "GPUS=0")
    assert "continue does not take MAX_ITERS" in user.refused("continue", "MAX_ITERS=3")
    assert "unknown symbol SLURM_PARTITON" in user.refused("continue", "SLURM_PARTITON=x")
    assert "quickstart runs on this machine" in user.refused("quickstart", "ENGINE=slurm")
    assert "DETACH=1 changes nothing" in user.check("continue", "DETACH=1").out
    for job in slurm.state:
        slurm.change(job, SchedulerPhase.ENDED)
    for command in ("continue", "test-rerun", "add"):
        words = ["SEED=1,2"] if command == "add" else []
        assert "SIMULATE=2 needs runs on one node" in user.refused(
            command, f"TARGET={only_matrix(tmp_path).path}", "SIMULATE=2", *words
        )
    matrix = only_matrix(tmp_path)
    (matrix.path / "engine.json").unlink()
    assert "engine.json is missing" in user.refused("continue"), "its jobs may train"
    shutil.rmtree(JobsDir(matrix).path)
    assert "without a scheduler" in user.refused("continue", "SLURM_PARTITION=short")


def test_jobs_of_another_user_are_not_submitted_again(user, slurm, tmp_path, monkeypatch):
    user.check("test-matrix")
    jobs, owner = slurm.jobs(), os.geteuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(slurm, "find", lambda _: {})
    monkeypatch.setattr(slurm, "poll", lambda _: {})
    assert "belongs to another user" in user.refused("continue")
    assert "it shows you only your own jobs" in user.check("status").out
    assert slurm.jobs() == jobs


def test_a_damaged_engine_file_is_refused(user, slurm, tmp_path):
    user.check("test-matrix")
    path = JobsDir(only_matrix(tmp_path)).engine_json
    path.write_text(json.dumps({**json.loads(path.read_text()), "id": "x\nscancel"}))
    assert "engine.json" in user.refused("continue")


def test_following_ends_with_the_status_of_the_runs(user, slurm, tmp_path):
    user.check("test-matrix")
    for job in slurm.state:
        slurm.change(job, SchedulerPhase.ENDED)
    slurm.submit = lambda folder, *_: _ended(slurm, folder)
    result = user("continue", "WAIT=1")
    assert result.status == 130, result.err  # the run was not trained
    assert "1 planned" in result.out


def test_following_waits_for_the_report(user, slurm, tmp_path, monkeypatch):
    user.check("test-matrix")
    for job in slurm.jobs()[:-1]:
        slurm.change(job, SchedulerPhase.ENDED)
    matrix, looks = only_matrix(tmp_path), []

    def sleep(_):
        looks.append(matrix.summary.exists())
        matrix.summary.write_text("the report", encoding="utf-8")
        slurm.change(slurm.jobs()[-1], SchedulerPhase.ENDED)

    monkeypatch.setattr("kmatrix.cli.running.follow.time.sleep", sleep)
    monkeypatch.setattr("kmatrix.engines.polling.EVERY_S", 0.0)
    monkeypatch.chdir(tmp_path)
    assert follow(matrix) == EXIT_STOPPED  # no run was trained
    assert looks == [False]


def test_following_prints_what_happens_and_not_how_runs_ended_before(user, slurm, tmp_path, monkeypatch, capsys):
    user.check("test-matrix")
    matrix = only_matrix(tmp_path)
    (run,) = matrix.runs()
    states = [Status.STOPPED, Status.STOPPED, Status.RUNNING, Status.FINISHED]
    monkeypatch.setattr("kmatrix.cli.running.follow.recover_status", lambda *_, **__: RunState(status=states[0]))

    def sleep(_):
        del states[0]
        if len(states) == 1:
            for job in slurm.jobs():
                slurm.change(job, SchedulerPhase.ENDED)

    monkeypatch.setattr("kmatrix.cli.running.follow.time.sleep", sleep)
    monkeypatch.setattr("kmatrix.engines.polling.EVERY_S", 0.0)
    capsys.readouterr()
    assert follow(matrix) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"{run.name}: running", f"{run.name}: finished", "1 finished"]


def _ended(slurm, folder):
    job = slurm.receive(read_submission(folder).label)
    slurm.change(job, SchedulerPhase.ENDED)
    return job


SEEDS = ("OPTIMIZER=adamw,sgd", "NUM_NODES=1", "MATRIX_SEEDS_AUTO=y", "MATRIX_SEEDS_MAX=4")


def test_adaptive_seeds_are_submitted_round_by_round_and_the_last_job_counts(user, slurm, tmp_path, monkeypatch):
    monkeypatch.setattr("kmatrix.engines.polling.EVERY_S", 0.0)
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    planned = user.check("plan", *SEEDS).out
    assert "Slurm: 6 runs, 6 tasks, each on 1 node" in planned
    assert "these are the first seeds; a last job submits the next ones, up to 8 runs" in planned
    out = user.check("test-matrix", *SEEDS).out
    assert "job 101: the next seeds, or the report, after all others" in out
    assert "6 runs submitted" in out
    assert "2 in reserve" in out
    matrix = only_matrix(tmp_path)
    assert read_submission(JobsDir(matrix).submission(2)).arguments == {"SLURM_ACCOUNT": "lab"}
    status = user.check("status").out
    assert "6 planned, 2 in reserve, jobs: 7 waiting" in status
    assert "job 101 submits the next seeds, if the verdict needs any" in status
    # While only the last job is left, the matrix is not over, and the same command makes no second one.
    slurm.change("100", SchedulerPhase.ENDED)
    assert "jobs: 1 waiting" in user.check("status").out
    assert "no second matrix is made" in user.check("test-matrix", *SEEDS).out
    (share,) = {share.submission for share in newest_shares(matrix).values()}
    assert share == 3  # the runs of the first one had ended without a result
    for job in ("101", "102"):
        slurm.change(job, SchedulerPhase.ENDED)
    assert "cancelled 1 job" in user.check("stop").out
    assert "without a job" not in user.check("status").out
    assert "continue: make continue" in user.check("status").out


def test_a_rerun_submits_a_seed_that_is_in_reserve(user, slurm, tmp_path):
    user.check("test-matrix", *SEEDS)
    for job in slurm.state:
        slurm.change(job, SchedulerPhase.ENDED)
    matrix = only_matrix(tmp_path)
    user.check("test-rerun", f"TARGET={matrix.path}", "RUN=*sgd_seed1340*")
    (run,) = read_submission(JobsDir(matrix).submission(3)).shares[0].runs
    assert "sgd_seed1340" in run
