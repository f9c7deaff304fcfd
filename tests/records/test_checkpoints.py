"""The checkpoint directory of a run: its index, which checkpoints are kept, and the commands that read it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest

from factories import ROOT, environment
from kmatrix.errors import RecordError
from kmatrix.records.checkpoints import (
    CheckpointIndex,
    CheckpointKind,
    Entry,
    entry_of,
    read_index,
    sha256_of,
    superseded,
)
from kmatrix.records.files import write_json
from kmatrix.records.paths import MatrixDir
from programs import run

R, B, F, E = (
    CheckpointKind.ROLLING,
    CheckpointKind.BEST,
    CheckpointKind.FINAL,
    CheckpointKind.EMERGENCY,
)


def add_checkpoint(index, step, *kinds, attempt=1):
    """Write a small file as a checkpoint and add it to the index."""
    path = index.folder / f"step_{step:08d}.pt"
    index.folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(f"weights of {step}".encode())
    entry = Entry(
        name=path.name,
        step=step,
        kinds=frozenset(kinds),
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
        val_loss=3.25,
        attempt=attempt,
        time=1_795_155_916.0,
    )
    index.announce(entry)
    return entry


def steps(entries):
    return [entry.step for entry in entries]


def index_of(folder, *several):
    """Return the index of a directory with one checkpoint per step and kinds."""
    index = CheckpointIndex(folder)
    for step, *kinds in several:
        add_checkpoint(index, step, *kinds)
    return index


@pytest.mark.parametrize(
    "kinds, superseded_steps",
    [
        ([{R}, {R}, {R}, {R}], [1, 2]),
        ([{R, B}, {R}, {R}, {R}], [2]),
        ([{R, B}, {R, F}, {R}, {R}], []),
        ([{B}, {R}, {F}], []),
        ([set(), {R}, {B}], [1]),
        ([{E}], []),
        ([{E}, {R}], [1]),
        ([{R}, {E}], []),
    ],
)
def test_the_newest_are_kept_and_those_with_another_reason_too(tmp_path, kinds, superseded_steps):
    index = index_of(tmp_path, *[(step, *reasons) for step, reasons in enumerate(kinds, 1)])
    assert steps(superseded(index.entries, keep=2)) == superseded_steps


def test_only_the_newest_best_checkpoint_counts_as_best(tmp_path):
    index = index_of(tmp_path, (1, B), (2, R, B), (3, B))
    assert [set(entry.kinds) for entry in index.entries] == [set(), {R}, {B}]
    assert steps(superseded(index.entries, keep=10)) == [1]


def test_a_checkpoint_can_be_given_more_reasons_and_keeps_its_position(tmp_path):
    index = index_of(tmp_path, (1, R), (2, R, B), (3, R))
    index.mark(index.entries[0], {B, F})
    assert [(e.step, set(e.kinds)) for e in CheckpointIndex(tmp_path).entries] == [(1, {R, B, F}), (2, {R}), (3, {R})]


def test_the_index_is_read_back_as_written(tmp_path):
    index = index_of(tmp_path, (300, R, B))
    assert read_index(tmp_path) == index.entries


def test_an_index_of_a_newer_trainer_may_have_more_fields(tmp_path):
    index = index_of(tmp_path, (300, R))
    write_json(tmp_path / "index.json", {"checkpoints": [index.entries[0].to_json() | {"colour": "red"}]})
    assert read_index(tmp_path) == index.entries


@pytest.mark.parametrize("change", [{"name": "../../run.json"}, {"kinds": ["old"]}, {"kinds": None}])
def test_an_invalid_index_is_refused_by_name(tmp_path, change):
    index = index_of(tmp_path, (300, R))
    write_json(tmp_path / "index.json", {"checkpoints": [index.entries[0].to_json() | change]})
    with pytest.raises(RecordError, match=r"index.json is damaged"):
        read_index(tmp_path)


def test_best_and_final_are_links_to_the_files(tmp_path):
    index = index_of(tmp_path, (1, B), (2, B, F))
    index.name_links()
    for name in ("best.pt", "final.pt"):
        assert (tmp_path / name).samefile(tmp_path / "step_00000002.pt")
        assert entry_of(tmp_path / name) == index.entries[1]
    index.remove(index.entries[1:2])
    index.name_links()
    assert not (tmp_path / "final.pt").exists()
    assert not (tmp_path / "best.pt").exists()


def test_partial_files_and_entries_without_a_file_are_ignored(tmp_path):
    index = index_of(tmp_path, (1, R), (2, R))
    (tmp_path / "step_00000001.pt").unlink()
    (tmp_path / ".step_00000003.pt.partial").write_bytes(b"half")
    assert CheckpointIndex(tmp_path).tidy() == ["step_00000001.pt"]
    assert steps(read_index(tmp_path)) == [2]
    assert not (tmp_path / ".step_00000003.pt.partial").exists()
    assert index.entries[1] in CheckpointIndex(tmp_path).present


def test_a_checkpoint_that_the_user_restores_is_kept(tmp_path):
    index = index_of(tmp_path, (1, R), (2, R))
    first = index.entries[0]
    index.remove([first])
    (tmp_path / first.name).write_bytes(b"restored")
    CheckpointIndex(tmp_path).tidy()
    assert (tmp_path / first.name).read_bytes() == b"restored"


def test_checkpoints_are_deleted_on_a_full_disk_although_the_index_needs_space(tmp_path, monkeypatch):
    index = index_of(tmp_path, (1, R), (2, R))
    first = tmp_path / index.entries[0].name

    def write(path, value):
        if first.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, value)

    monkeypatch.setattr("kmatrix.records.checkpoints.write_json", write)
    index.remove(index.entries[:1])
    assert not first.exists()
    assert steps(CheckpointIndex(tmp_path).entries) == [2]


def test_a_truncated_file_does_not_count_as_present(tmp_path):
    index = index_of(tmp_path, (1, R), (2, R, B))
    (tmp_path / "step_00000002.pt").write_bytes(b"w")
    assert steps(index.present) == [1]
    assert index.of_kind(B) is None


@pytest.fixture
def matrix(tmp_path):
    """A matrix of two runs with checkpoints, and one without."""
    folder = MatrixDir(tmp_path / "test_matrix_results_20261120_062141")
    for name in ("gpt2_adamw_1cpu", "gpt2_muon_1cpu", "gpt2_sgd_1cpu"):
        write_json(folder.run(name).run_json, {"run_id": name, "name": name, "train": {}})
    index_of(folder.run("gpt2_adamw_1cpu").checkpoints, (10, R), (20, R), (30, R, B), (40, R), (50, E))
    index_of(folder.run("gpt2_muon_1cpu").checkpoints, (10, R), (20, R, B, F))
    return folder


def test_the_list_shows_why_each_checkpoint_is_kept(matrix):
    result = run("list-checkpoints", f"TARGET={matrix.path}", "RUN=*muon*")
    assert result.status == 0
    head, *lines = [line.split() for line in result.out.splitlines()[1:]]
    assert head == ["step", "kinds", "val", "loss", "size", "attempt", "written", "file"]
    assert [[*cells[:6], cells[-1]] for cells in lines] == [
        ["10", "rolling", "3.2500", "13", "B", "1", "step_00000010.pt"],
        ["20", "best,final,rolling", "3.2500", "13", "B", "1", "step_00000020.pt"],
    ]


def test_the_list_shows_missing_and_truncated_files(matrix):
    folder = matrix.run("gpt2_adamw_1cpu").checkpoints
    (folder / "step_00000010.pt").unlink()
    (folder / "step_00000040.pt").write_bytes(b"w")
    out = run("list-checkpoints", f"TARGET={matrix.path}").out
    assert "step_00000010.pt (missing)" in out
    assert "step_00000040.pt (damaged: wrong size)" in out
    assert "gpt2_sgd_1cpu" not in out


@pytest.mark.process
def test_the_list_does_not_need_torch(matrix):
    code = "import sys; from kmatrix.cli.commands import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "list-checkpoints", f"TARGET={matrix.path}"]
    completed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "gpt2_adamw_1cpu: 5 checkpoints" in completed.stdout


def test_a_damaged_index_gives_one_clear_error(matrix):
    (matrix.run("gpt2_muon_1cpu").checkpoints / "index.json").write_text(json.dumps({"schema": 1}))
    result = run("list-checkpoints", f"TARGET={matrix.path}")
    assert result.status == 2
    assert "index.json is damaged" in result.err
