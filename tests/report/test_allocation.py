"""The report of a matrix on a cluster has the hours that its jobs held, next to those of attempts and training."""

from __future__ import annotations

import pytest

from cluster_factory import answer, claim, make_engine, make_submission, view
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs.files import ShareOwner
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.jobs.usage import ShareUsage, keep_usage, record_start
from kmatrix.report.analysis import analyse
from kmatrix.report.summary import render_summary
from kmatrix.report.write import write_summary
from records_factory import CREATED, FakeRun, make_matrix

HOUR = 3600.0


def matrix_of(tmp_path, *, device="cuda", packed=False, attempt_s=HOUR):
    """Return a matrix of two runs on 2 nodes with 4 GPUs each, whose jobs took two hours, one of them in two starts."""
    runs = [FakeRun(gpus=8, device=device, optimizer=name) for name in ("adamw", "muon")]
    found = make_matrix(tmp_path, runs)
    make_engine(found)
    names = [run.name for run in found.runs()]
    shares = make_submission(
        found, [names] if packed else [[name] for name in names], nodes=2, gpus_per_node=4 * (device == "cuda")
    )
    for share in shares:
        record_start(share, ShareOwner(job="12"), HOUR)
        record_start(share, ShareOwner(job="12", restart=1), HOUR)
    for run in found.runs():
        record = read_json(run.run_json)
        write_json(run.run_json, {**record, "train": {**record["train"], "num_gpus": 8, "num_nodes": 2}})
        last = {"attempt": 1, "status": "finished", "started": CREATED, "ended": CREATED + 60, "seconds": attempt_s}
        write_json(run.status, {**read_json(run.status), "attempts": [last]})
        write_json(run.result, {**read_json(run.result), "seconds": attempt_s / 2, "world_size": 8})
    return found


def section(matrix):
    text = render_summary(analyse(matrix)).partition("Allocated hours\n")[2]
    return text.partition("\n\n")[0].splitlines()[1:]


def test_the_section_compares_jobs_attempts_and_training(tmp_path):
    lines = section(matrix_of(tmp_path))

    assert [line.split() for line in lines[2:5]] == [
        ["allocated", "8.00", "32.00", "100.0%"],
        ["attempts", "4.00", "16.00", "50.0%"],
        ["trained", "2.00", "8.00", "25.0%"],
    ]
    assert lines[0].split() == ["node-hours", "GPU-hours", "share"]
    assert lines[5] == "2 jobs, 2 restarts, 8 CPU-hours; from the files of the jobs"


def test_results_json_has_the_same_hours(tmp_path):
    matrix = matrix_of(tmp_path)
    write_summary(analyse(matrix))

    found = read_json(matrix.results)["allocation"]

    assert (found["jobs"], found["starts"], found["counted_by_accounting"]) == (2, 4, 0)
    assert found["trained"] == {"node_hours": 2.0, "gpu_hours": 8.0, "share": 0.25}


def test_the_source_of_each_hour_is_named(tmp_path):
    matrix = matrix_of(tmp_path)
    keep_usage(JobsDir(matrix), {"1.0": ShareUsage(starts=2, node_s=5 * HOUR, cpu_s=5 * HOUR, gpu_s=20 * HOUR)})
    assert section(matrix)[5] == "2 jobs, 2 restarts, 9 CPU-hours; from sacct, and for 1 job from the files of the jobs"
    keep_usage(JobsDir(matrix), {"1.1": ShareUsage(starts=2, node_s=5 * HOUR, cpu_s=5 * HOUR, gpu_s=20 * HOUR)})
    assert section(matrix)[5] == "2 jobs, 2 restarts, 10 CPU-hours; from sacct"


def test_on_the_cpu_there_are_no_gpu_hours(tmp_path):
    lines = section(matrix_of(tmp_path, device="cpu"))

    assert lines[0].split() == ["node-hours", "share"]
    assert lines[4].split() == ["trained", "2.00", "25.0%"]


def test_hours_of_nodes_that_runs_shared_are_not_compared(tmp_path):
    lines = section(matrix_of(tmp_path, packed=True))

    assert [line.split() for line in lines[2:4]] == [
        ["allocated", "4.00", "16.00", "100.0%"],
        ["attempts", "-", "16.00", "100.0%"],
    ]
    assert lines[-1] == "runs have shared nodes (PACK_NODES): their node-hours are unknown"


def test_hours_of_a_copy_are_not_compared_because_jobs_of_the_original_trained_a_part(tmp_path):
    matrix = matrix_of(tmp_path)
    JobsDir(matrix).former.mkdir()

    lines = section(matrix)

    assert lines[4].split() == ["trained", "2.00", "8.00", "-"]
    assert lines[-1] == "allocated: without the jobs of the matrix that this one is a copy of"


def test_reused_results_have_no_hours_here(tmp_path):
    matrix = matrix_of(tmp_path)
    for run in matrix.runs():
        write_json(run.run_json, {**read_json(run.run_json), "reused_from": "test_matrix_results_1/x"})

    assert section(matrix)[4].split() == ["trained", "0", "0", "0.0%"]


@pytest.mark.parametrize(
    ("phase", "age_s", "seconds"), [("running", 9.0, 69.0), ("running", 300.0, 60.0), ("ended", 9.0, 60.0)]
)
def test_a_running_job_counts_until_now_and_a_dead_one_until_its_last_sign_of_life(tmp_path, phase, age_s, seconds):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", result=False)])
    make_engine(matrix)
    (share,) = make_submission(matrix, [[run.name for run in matrix.runs()]])
    claim(share, seconds=60.0, age_s=age_s)
    answer(matrix, {share.id: view("12", phase)})

    assert analyse(matrix).usage.node_hours * HOUR == pytest.approx(seconds, abs=3.0)


@pytest.mark.parametrize("has_engine", [True, False])
def test_without_a_job_that_has_started_there_is_no_section(tmp_path, has_engine):
    matrix = make_matrix(tmp_path, [FakeRun()])
    if has_engine:
        make_engine(matrix)
        make_submission(matrix, [[run.name for run in matrix.runs()]])

    assert "Allocated hours" not in render_summary(analyse(matrix))
    write_summary(analyse(matrix))
    assert read_json(matrix.results)["allocation"] is None
