"""The folder of a run's checkpoints, and which matrix may change it."""

from __future__ import annotations

import shutil

import pytest

from kmatrix.errors import ConfigError, LaunchError
from kmatrix.experiment import settings
from kmatrix.records.checkpoint_dir import (
    check_own_files,
    checkpoint_dir,
    original_of,
    own_checkpoint_dir,
)
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir


def take_folder(matrix, base):
    write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), **settings.take_folder(matrix, base)})


NAME = "test_matrix_results_20261120_062141"


def make(path, folder=None):
    """Make a matrix with the run a. folder: of its checkpoints."""
    matrix = MatrixDir(path)
    path.mkdir(parents=True)
    plan = {"name": path.name, "runs": [{"name": "a"}]}
    write_json(matrix.matrix_json, {**plan, "place": str(path), "checkpoints": folder and str(folder)})
    write_json(matrix.run("a").run_json, {"name": "a", "matrix": path.name, "train": {}})
    return matrix


def copied(matrix):
    """Copy a matrix as `cp -a` does."""
    return MatrixDir(shutil.copytree(matrix.path, matrix.path.with_name("copy")))


@pytest.fixture
def outside(tmp_path):
    """Return a matrix whose checkpoints are below CHECKPOINT_DIR."""
    matrix = make(tmp_path / "results" / NAME)
    folder = tmp_path / "disk" / NAME
    folder.mkdir(parents=True)
    write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "checkpoints": str(folder)})
    return matrix


def test_checkpoints_are_in_the_run_directory_wherever_the_matrix_is(tmp_path):
    copy = copied(make(tmp_path / NAME))
    assert own_checkpoint_dir(copy.run("a")) == copy.run("a").checkpoints
    with pytest.raises(ConfigError, match="are in its run directories"):
        take_folder(copy, tmp_path / "disk")


def test_a_copy_does_not_own_the_folder_and_a_moved_matrix_does(outside, tmp_path):
    folder = checkpoint_dir(outside.run("a")).parent
    copy = copied(outside)
    assert checkpoint_dir(copy.run("a")) == folder / "a"  # to read
    for refused in (lambda: check_own_files(copy), lambda: own_checkpoint_dir(copy.run("a"))):
        with pytest.raises(LaunchError, match="is a copy of it"):
            refused()
    assert (original_of(copy), original_of(outside)) == (str(outside.path), "")
    moved = MatrixDir(outside.path.rename(tmp_path / "moved"))
    check_own_files(moved)
    assert original_of(moved) == ""


def test_the_command_line_gives_a_copy_another_folder_or_that_of_an_original_that_is_gone(outside, tmp_path):
    folder = checkpoint_dir(outside.run("a")).parent
    copy = copied(outside)
    with pytest.raises(LaunchError, match="is a copy of it"):
        take_folder(copy, tmp_path / "disk")
    take_folder(copy, tmp_path / "other")
    assert own_checkpoint_dir(copy.run("a")) == tmp_path / "other" / folder.name / "a"
    assert own_checkpoint_dir(outside.run("a")) == folder / "a"
    shutil.rmtree(outside.path)
    take_folder(copy, tmp_path / "disk")
    assert own_checkpoint_dir(copy.run("a")) == folder / "a"
