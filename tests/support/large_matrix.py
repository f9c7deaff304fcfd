"""Make a matrix of thousands of runs for measurements: finished ones, or jobs of a cluster of which most wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster_factory import answer, claim, make_engine, make_submission
from kmatrix.records.files import read_json, write_json
from kmatrix.records.jobs.files import JobView, SchedulerPhase, ShareEntry, SubmissionFile, share_job
from kmatrix.records.paths import MatrixDir
from records_factory import CREATED, FakeRun, make_matrix

OPTIMIZERS = ("adamw", "muon", "sgd", "adam")
AT_A_TIME = 4  # runs
RUN_S = 60.0


def make_large_matrix(root: Path, count: int) -> MatrixDir:
    """Write a matrix of `count` finished runs: optimizers x 10 learning rates x seeds."""
    matrix = make_matrix(root, [_run(number) for number in range(count)])
    for number in range(count):
        path = matrix.run(_run(number).name).status
        begin = CREATED + RUN_S * (number // AT_A_TIME)
        attempt = {"attempt": 1, "status": "finished", "started": begin, "ended": begin + RUN_S}
        write_json(path, read_json(path) | {"attempts": [attempt]}, durable=False)
    return matrix


def _run(number: int) -> FakeRun:
    seed = number // (10 * len(OPTIMIZERS))
    axes = {"lr": str(number // len(OPTIMIZERS) % 10), "seed": str(seed)}
    loss = 3.2 + 0.0001 * (number * 7919 % 100)  # all different, so that there is something to rank
    return FakeRun(optimizer=OPTIMIZERS[number % len(OPTIMIZERS)], seed=seed, axes=axes, final_loss=loss)


def make_queued_matrix(root: Path, count: int, *, running: int = 4, tasks: int = 1000) -> MatrixDir:
    """Write a matrix of `count` runs on a cluster, one job each, in arrays of `tasks` jobs: a few run, the others wait.

    The scheduler has just answered.
    """
    runs = [replace(_run(number), status="running" if number < running else "planned") for number in range(count)]
    matrix = make_matrix(root, runs, took=None)
    make_engine(matrix)
    names = [[run.name] for run in runs]
    views = {}
    for number, start in enumerate(range(0, count, tasks), start=1):
        job = str(100 + number)
        shares = make_submission(matrix, names[start : start + tasks], number=number, job=job)
        for share in shares:
            one = share_job(job, SubmissionFile(shares=(ShareEntry(task=0),) * len(shares)), share.task)
            is_live = start + share.task < running
            phase = SchedulerPhase.RUNNING if is_live else SchedulerPhase.PENDING
            nodes, reason = (("n1",), "") if is_live else ((), "waits for free nodes (Resources)")
            views[share.id] = JobView(job=one, phase=phase, nodes=nodes, reason=reason)
            if is_live:
                claim(share, one, host="n1", nodes=("n1",))
    answer(matrix, views)
    return matrix
