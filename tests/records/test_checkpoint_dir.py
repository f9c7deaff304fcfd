"""The folder of a run's checkpoints, and which matrix may change it."""

from __future__ import annotations

import shutil

import pytest

from kmatrix.errors import ConfigError, LaunchError, RecordError
from kmatrix.records.checkpoint_dir import (
    Owner,
    check_own_files,
    checkpoint_dir,
    new_folder,
    own_checkpoint_dir,
    read_owner,
    take_folder,
)
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.records.plan import RunTexts, make_runs, write_plan

NAME = "test_matrix_results_20261120_062141"


def make(path, folder=None):
    """Make a matrix with the run a. folder: of its checkpoints."""
    matrix = MatrixDir(path)
    path.mkdir(parents=True)
    plan = {"name": path.name, "runs": [{"name": "a"}]}
    write_json(matrix.matrix_json, {**plan, "checkpoints": folder and str(folder)})
    write_json(matrix.run("a").run_json, {"name": "a", "matrix": path.name, "train": {}})
    return matrix


@pytest.fixture
def outside(tmp_path):
    """Return a matrix whose checkpoints are below CHECKPOINT_DIR."""
    matrix = make(tmp_path / "results" / NAME)
    folder = new_folder(tmp_path / "disk", matrix, matrix.path)
    write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "checkpoints": str(folder)})
    return matrix


def test_checkpoints_are_in_the_run_directory_wherever_the_matrix_is(tmp_path):
    make(tmp_path / NAME)
    copy = MatrixDir(tmp_path / "copy")
    shutil.copytree(tmp_path / NAME, copy.path)
    assert own_checkpoint_dir(copy.run("a")) == copy.run("a").checkpoints


def test_a_copy_does_not_own_the_folder_and_a_renamed_matrix_does(outside, tmp_path):
    folder = checkpoint_dir(outside.run("a")).parent
    copy = MatrixDir(tmp_path / "copy")
    shutil.copytree(outside.path, copy.path)
    assert checkpoint_dir(copy.run("a")) == folder / "a"  # to read
    with pytest.raises(LaunchError, match="may be another matrix's"):
        check_own_files(copy)
    moved = MatrixDir(outside.path.rename(tmp_path / "moved"))
    check_own_files(moved)
    assert read_owner(folder) == Owner.of(moved)
    # A copy in the place of the original is still a copy.
    shutil.copytree(moved.path, outside.path)
    with pytest.raises(LaunchError, match="may be another matrix's"):
        check_own_files(outside)


def test_the_command_line_gives_a_folder_to_a_copy_unless_the_owner_exists(outside, tmp_path):
    folder = checkpoint_dir(outside.run("a")).parent
    copy = MatrixDir(tmp_path / "copy")
    shutil.copytree(outside.path, copy.path)
    with pytest.raises(LaunchError, match="has the checkpoints of another matrix"):
        take_folder(copy, tmp_path / "disk")
    take_folder(copy, tmp_path / "other")
    assert own_checkpoint_dir(copy.run("a")) == tmp_path / "other" / folder.name / "a"
    assert own_checkpoint_dir(outside.run("a")) == folder / "a"
    take_folder(outside, tmp_path / "other2")  # it has left this folder, which then is free
    take_folder(copy, tmp_path / "disk")
    assert own_checkpoint_dir(copy.run("a")) == folder / "a"


@pytest.mark.parametrize(
    ("goes_to", "why"),
    [
        ("results/old", r"they belong to \S+/results/old, and "),
        ("elsewhere", rf"they belong to the matrix that was \S+/{NAME}, which has another directory now; "),
        (None, "which has another directory now"),
    ],
)
def test_a_copy_in_the_place_of_the_owner_gets_its_folder_only_if_the_user_says_that_the_owner_is_gone(
    outside, tmp_path, goes_to, why
):
    folder = checkpoint_dir(outside.run("a")).parent
    if goes_to:
        original = MatrixDir(outside.path.rename(tmp_path / goes_to))
        shutil.copytree(original.path, outside.path)
    else:
        shutil.copytree(outside.path, tmp_path / "copy")  # first, so that no new directory has the owner's inode
        shutil.rmtree(outside.path)
        (tmp_path / "copy").rename(outside.path)
    for refused in (lambda: take_folder(outside, tmp_path / "disk"), lambda: own_checkpoint_dir(outside.run("a"))):
        with pytest.raises(LaunchError, match=why) as caught:
            refused()
        assert f"{outside.path} may be a copy of it" in str(caught.value)
    assert not (folder / "a").exists()
    if goes_to:
        assert own_checkpoint_dir(original.run("a")) == folder / "a"  # it stays the owner
    else:
        (folder / "owner.json").unlink()
        take_folder(outside, tmp_path / "disk")
        assert own_checkpoint_dir(outside.run("a")) == folder / "a"


def test_checkpoints_of_another_matrix_are_not_renamed_when_a_missing_run_is_made_again(outside, tmp_path):
    checkpoint = checkpoint_dir(outside.run("a")) / "step_00000001.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"weights")
    copy = MatrixDir(tmp_path / "copy")
    shutil.copytree(outside.path, copy.path)
    for matrix in (copy, outside):
        write_plan(matrix, [RunTexts("a", ("", "", "{}"))])
        shutil.rmtree(matrix.run("a").path)
    for change in (lambda: make_runs(copy, {"a"}), lambda: check_own_files(copy)):
        with pytest.raises(LaunchError, match="may be another matrix's"):
            change()
        assert checkpoint.read_bytes() == b"weights"
    make_runs(outside, {"a"})
    assert checkpoint.parent.with_name("a.archive0").exists()


def test_a_remounted_disk_keeps_its_owner_and_equal_inodes_of_two_disks_are_not_one_matrix():
    owner = Owner(matrix="/results/m", inode=12, device=1)
    assert owner.is_same(Owner(matrix="/results/m", inode=12, device=2))
    assert owner.is_same(Owner(matrix="/results/renamed", inode=12, device=1))
    assert not owner.is_same(Owner(matrix="/copies/m", inode=12, device=2))
    assert not owner.is_same(Owner(matrix="/results/m", inode=13, device=1))


def test_a_matrix_with_its_own_checkpoints_gets_no_other_folder(tmp_path):
    with pytest.raises(ConfigError, match="are in its run directories"):
        take_folder(make(tmp_path / NAME), tmp_path / "disk")


def test_without_matrix_json_checkpoints_outside_are_not_looked_for_elsewhere(outside):
    run = outside.run("a")
    write_json(run.run_json, {**read_json(run.run_json), "checkpoints": f"{NAME}/a"})
    outside.matrix_json.unlink()
    with pytest.raises(RecordError, match=r"matrix\.json is missing"):
        checkpoint_dir(run)


@pytest.mark.parametrize("folder", ["..", ".", "", "a/../..", "/.."])
def test_a_folder_that_leads_out_of_checkpoint_dir_is_damage(outside, tmp_path, folder):
    text = folder if folder == "/.." else f"{tmp_path}/{folder}" if folder else "/"
    write_json(outside.matrix_json, {**read_json(outside.matrix_json), "checkpoints": text})
    with pytest.raises(RecordError, match=r"matrix\.json is damaged"):
        take_folder(outside, tmp_path / "disk")
    assert not list(tmp_path.glob("*.json"))


def test_two_matrices_of_one_name_get_two_folders(tmp_path):
    folders = [
        new_folder(tmp_path / "disk", make(tmp_path / place / NAME), tmp_path / place / NAME) for place in ("a", "b")
    ]
    assert [folder.name for folder in folders] == [NAME, f"{NAME}_2"]
