"""engine.json: signatures, and what a copy or a move of a matrix does to its jobs."""

from __future__ import annotations

import shutil

import pytest

from fake_scheduler import FakeScheduler
from kmatrix.errors import LaunchError
from kmatrix.records.jobs.files import SchedulerPhase, ShareEntry, SubmissionFile, read_engine, write_engine
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from kmatrix.runner import cluster
from kmatrix.runner.cluster import new_engine, own_engine
from kmatrix.runner.submit import hand_over, submitting

pytestmark = pytest.mark.process

RUN = SubmissionFile(shares=(ShareEntry(task=0, runs=("a",)),))


@pytest.fixture
def slurm(tmp_path):
    return FakeScheduler(tmp_path / "slurm.json")


@pytest.fixture
def matrix(tmp_path, slurm, monkeypatch):
    made = MatrixDir(tmp_path / "m")
    made.path.mkdir()
    engine = new_engine("slurm", made.path, {"SLURM_SETUP": "env.sh"})
    write_engine(made, engine)
    with submitting(made) as submitter:
        hand_over(submitter, engine, slurm, [RUN])
    return made


def test_a_matrix_at_its_path_keeps_its_jobs(matrix, slurm, tmp_path):
    engine = read_engine(matrix)
    assert own_engine(matrix, engine, slurm) == (engine, "")
    (tmp_path / "mount").symlink_to(tmp_path)  # login nodes may have other names for the storage
    assert own_engine(MatrixDir(tmp_path / "mount" / "m"), engine, slurm) == (engine, "")


def test_a_copy_forgets_the_jobs_of_its_original_which_go_on(matrix, slurm, tmp_path):
    copy = MatrixDir(tmp_path / "copy")
    shutil.copytree(matrix.path, copy.path)
    engine, message = own_engine(copy, read_engine(copy), slurm)
    assert "copy of" in message
    assert engine == read_engine(copy)
    assert engine.id != read_engine(matrix).id
    assert engine.settings == read_engine(matrix).settings
    assert not JobsDir(copy).path.exists()
    assert (copy.path / "jobs.former" / "jobs.jsonl").is_file()
    assert slurm.state["100"]["phase"] == SchedulerPhase.PENDING


def test_the_jobs_of_a_matrix_that_was_moved_are_cancelled(matrix, slurm, tmp_path):
    former_id = read_engine(matrix).id
    moved = MatrixDir(matrix.path.rename(tmp_path / "moved"))
    engine, message = own_engine(moved, read_engine(moved), slurm)
    assert message.endswith("cancelled 100")
    assert slurm.state["100"]["phase"] == SchedulerPhase.ENDED
    assert engine.path == str(moved.path)
    # A copy that was made before is taken for a move as well: the two must not have the same jobs.
    assert engine.id != former_id
    assert own_engine(moved, engine, slurm) == (engine, "")


def test_a_moved_matrix_whose_jobs_do_not_end_is_refused(matrix, slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "cancel", lambda *_, **__: None)
    monkeypatch.setattr(cluster, "ENDING_S", 0.0)
    monkeypatch.setattr(cluster, "POLL_S", 0.001)
    moved = MatrixDir(matrix.path.rename(tmp_path / "moved"))
    before = read_engine(moved)
    with pytest.raises(LaunchError, match="did not end: 100"):
        own_engine(moved, before, slurm)
    assert read_engine(moved) == before
