"""Copies of data on a disk of the node."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading

import pytest

from kmatrix.engines import staging
from kmatrix.engines.staging import MARK, Stage, contents, folders_of, remove_unused, stage_folder
from kmatrix.records.dataset import STAGED, local_copy
from kmatrix.records.files import write_json


@pytest.fixture
def data(tmp_path):
    """A folder with two shards, as prepared."""
    folder = tmp_path / "shared" / "stdlib"
    folder.mkdir(parents=True)
    shards = []
    for name in ("stdlib_train_000000.bin", "stdlib_val_000000.bin"):
        (folder / name).write_bytes(name.encode() * 1000)
        about = (folder / name).stat()
        sha256 = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        known = {"tokens": 10, "sha256": sha256, "size": about.st_size, "mtime_ns": about.st_mtime_ns}
        shards.append({"name": name, "max_token": 1, **known})
    write_json(folder / "dataset.json", {"shards": shards})
    return folder


@pytest.fixture
def run(plan, data):
    """A run that reads the data."""
    found = plan("a").dir
    write_json(found.run_json, {"run_id": "id-a", "name": "a", "train": {"data_path": str(data)}})
    return found


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Return a stage; each call is another process."""
    monkeypatch.setattr(staging, "SPARE", 0)
    monkeypatch.setattr(staging, "WAIT_S", 0.01)
    made, said = [], []

    def make(**known) -> Stage:
        made.append(Stage(tmp_path / "local", said.append, **known))
        return made[-1]

    make.said = said
    yield make
    for one in made:
        for lock in one._locks:
            os.close(lock)


def copy_of(variables, data):
    return json.loads(variables[STAGED]).get(str(data))


def test_data_are_copied_with_their_times_and_found_by_ranks(stage, run, data, monkeypatch):
    variables = stage().environment([run])
    copy = local_copy(data)
    assert copy == data  # without the variable
    monkeypatch.setenv(STAGED, variables[STAGED])
    copy = local_copy(data)
    assert copy != data
    assert {name: about for name, about in contents(copy).items() if name != MARK} == contents(data)
    assert local_copy(data / "other") == data / "other"


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1}'])
def test_a_damaged_variable_means_the_original(monkeypatch, data, text):
    monkeypatch.setenv(STAGED, text)
    assert local_copy(data) == data


def test_a_copy_is_used_again_and_made_again_if_the_data_changed(stage, run, data):
    first = copy_of(stage().environment([run]), data)
    stage().environment([run])
    assert len([line for line in stage.said if line.startswith("copied")]) == 1
    for one in (data / "dataset.json", data / "new.txt"):
        one.write_text("{}")
    assert copy_of(stage().environment([run]), data) is None  # others read the older copy
    assert "older copy" in stage.said[-1]
    assert first


def test_a_changed_copy_that_nobody_uses_is_made_again(stage, run, data):
    one = stage()
    one.environment([run])
    os.close(one._locks.pop())
    (data / "new.txt").write_text("x")
    copy = copy_of(stage().environment([run]), data)
    assert (local_copy(data) / "new.txt").exists()
    assert os.path.exists(f"{copy}/new.txt")  # noqa: PTH110


def test_an_incomplete_copy_is_made_again(stage, run, data):
    one = stage()
    copy = copy_of(one.environment([run]), data)
    os.close(one._locks.pop())
    os.truncate(f"{copy}/stdlib_train_000000.bin", 5)
    stage().environment([run])
    assert os.path.getsize(f"{copy}/stdlib_train_000000.bin") > 5  # noqa: PTH202


def test_a_copy_of_another_user_is_not_read(stage, run, data, monkeypatch):
    """STAGE_DIR may be a folder of all users, in which anybody could put other data under the name of the copy."""
    one = stage()
    assert copy_of(one.environment([run]), data)
    os.close(one._locks.pop())
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    monkeypatch.setattr(staging.shutil, "rmtree", lambda *_, **__: None)  # it may not be removed, either
    assert copy_of(stage().environment([run]), data) is None
    assert "is read from the shared storage" in stage.said[-1]


def test_a_damaged_shard_is_not_copied(stage, run, data):
    shard = data / "stdlib_train_000000.bin"
    about = shard.stat()
    shard.write_bytes(b"x" * about.st_size)
    assert copy_of(stage().environment([run]), data) is None
    assert "stdlib_train_000000.bin is damaged" in stage.said[-1]


def test_without_space_or_rights_the_original_is_read(stage, run, data, monkeypatch, tmp_path):
    monkeypatch.setattr(staging, "SPARE", 1 << 60)
    assert copy_of(stage().environment([run]), data) is None
    assert "read from the shared storage" in stage.said[-1]
    assert "free" in stage.said[-1]
    (tmp_path / "local").rename(tmp_path / "away")
    (tmp_path / "local").write_text("a file")
    assert copy_of(stage().environment([run]), data) is None


@pytest.mark.process
def test_two_processes_copy_once(stage, run, data, tmp_path):
    copied = copy_of(stage().environment([run]), data)
    lock = next((tmp_path / "local").glob(".*.lock"))
    other = os.open(lock, os.O_RDWR)
    for one in [*stage.__closure__[0].cell_contents]:
        while one._locks:
            os.close(one._locks.pop())
    fcntl.flock(other, fcntl.LOCK_EX)
    found = []
    thread = threading.Thread(target=lambda: found.append(stage().environment([run])))
    thread.start()
    while not any(line.startswith("waiting for another process") for line in stage.said):
        thread.join(0.01)
    os.close(other)
    thread.join()
    assert copy_of(found[0], data) == copied
    assert len([line for line in stage.said if line.startswith("copied")]) == 1


def test_a_stop_ends_the_copying(stage, run, data):
    assert copy_of(stage(is_cancelled=lambda: True).environment([run]), data) is None


def test_unused_copies_are_removed_and_others_stay(stage, run, data, tmp_path):
    one = stage()
    copy = copy_of(one.environment([run]), data)
    assert remove_unused(tmp_path / "local", older_s=0.0) == []
    os.close(one._locks.pop())
    assert remove_unused(tmp_path / "local", older_s=3600.0) == []
    assert remove_unused(tmp_path / "local", older_s=0.0) == [os.path.basename(copy)]  # noqa: PTH119


def test_a_copy_that_was_used_again_is_not_an_unused_one(stage, run, data, tmp_path):
    first = stage()
    first.environment([run])
    os.close(first._locks.pop())
    lock = next((tmp_path / "local").glob(".*.lock"))
    os.utime(lock, (0, 0))
    second = stage()
    second.environment([run])
    os.close(second._locks.pop())
    assert remove_unused(tmp_path / "local", older_s=3600.0) == []


def test_folders_of_other_programs_stay(tmp_path):
    """STAGE_DIR may be a folder such as /tmp, or the user's own one."""
    other = tmp_path / "project"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    (tmp_path / ".project.lock").touch()
    (tmp_path / "..lock").touch()
    assert remove_unused(tmp_path, older_s=0.0) == []
    assert (other / "thesis.tex").exists()


def test_a_mix_has_the_folders_of_its_datasets(plan, tmp_path):
    mix = tmp_path / "mix"
    mix.mkdir()
    source = {"name": "one", "path": "/data/one", "weight": 1, "shards": 0, "sha256": "x", "train_tokens": 1}
    write_json(mix / "dataset.json", {"sources": [source]})
    run = plan("m").dir
    write_json(run.run_json, {"run_id": "id-m", "train": {"data_path": str(mix)}})
    assert folders_of(run) == {str(mix), "/data/one"}


def test_a_variable_without_a_value_does_not_make_a_copy_in_the_checkout(run, data, monkeypatch, tmp_path):
    monkeypatch.delenv("NO_SUCH_FOLDER", raising=False)
    monkeypatch.chdir(tmp_path)
    notes = []
    stage = Stage(stage_folder("$NO_SUCH_FOLDER/x"), notes.append)
    assert json.loads(stage.environment([run])[STAGED]) == {}
    assert "not an absolute path on this node" in notes[0]
    assert not list(tmp_path.glob("$*"))


def test_a_stage_folder_may_name_variables_of_the_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert str(stage_folder("/scratch/$SLURM_JOB_ID")) == "/scratch/12"
    assert stage_folder("") is None
