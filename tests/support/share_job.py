"""Shares of a matrix, and starts of jobs over them with the fake trainer."""

from __future__ import annotations

import signal

import pytest

from cluster_factory import write_submission
from fake_allocation import FakeAllocation
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import ShareEntry, SubmissionFile
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.runner.share import job as share_job
from kmatrix.runner.share import rivals
from kmatrix.runner.share.folder import RunningShare
from kmatrix.runner.share.job import open_job
from kmatrix.status.status_file import recover_status
from running import FAKES, MAX_ITERS, PYTHON


@pytest.fixture
def fast(monkeypatch):
    """Short waits, and the signal handlers of the test afterwards."""
    monkeypatch.setattr(share_job, "END_S", 0.0)
    monkeypatch.setattr(share_job, "AGAIN_S", 0.01)
    monkeypatch.setattr(share_job, "NODES_POLL_S", 0.02)
    monkeypatch.setattr(rivals, "LEAVE_S", 0.02)
    monkeypatch.setattr(share_job, "REQUESTS_S", 0.02)
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture
def share(matrix):
    """Write runs and a submission of them; return the share of some of these runs."""

    def make(*names, others=(), number=1, task=0, **train) -> RunningShare:
        for name in (*names, *others):
            if not matrix.run(name).run_json.exists():
                about = {"batch_size": 12, "max_iters": MAX_ITERS, "num_gpus": 1, "data_path": "/data"} | train
                write_json(matrix.run(name).run_json, {"run_id": f"id-{name}", "name": name, "train": about})
        folder = JobsDir(matrix).submission(number)
        folder.path.mkdir(parents=True)
        write_submission(folder, SubmissionFile(shares=(ShareEntry(task=task, runs=names),)))
        return RunningShare(matrix.path, number, task, names=names)

    return make


def start(share, behave="finish", allocation=None, **known):
    """Return the start of a job, and its job."""
    allocation = allocation or FakeAllocation()
    job = open_job(share, SubmissionFile(**known), allocation)
    job.command, job.torchrun = (f"--behave={behave}",), (str(PYTHON), str(FAKES))
    job.signals.listen()
    return job, allocation


def state_of(share, name="a"):
    return recover_status(share.run(name), has_runner=True)
