"""The plan of a matrix: runs are made from it, again if they are missing."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import threading
from dataclasses import asdict

import pytest

from kmatrix.errors import LaunchError, RecordError
from kmatrix.records import lock
from kmatrix.records.files import write_json
from kmatrix.records.lock import MAKING, held, holder, start_of, this_process, try_lock
from kmatrix.records.paths import MatrixDir, matrix_dirs, staged_dir
from kmatrix.records.plan import RunTexts, interrupted_dirs, make_runs, planned_runs, refuse_unmade, write_plan


@pytest.fixture
def matrix(tmp_path):
    """Return a matrix that lists the runs a and b, without their directories."""
    made = MatrixDir(tmp_path / "test_matrix_results_20261120_062141")
    made.path.mkdir()
    write_plan(made, [RunTexts(name, ("CONFIG_A=y\n", "", json.dumps({"name": name}))) for name in "ab"])
    write_json(made.matrix_json, {"name": made.name, "checkpoints": None, "runs": [{"name": "a"}, {"name": "b"}]})
    return made


def test_missing_runs_are_known_and_made_from_the_plan(matrix):
    assert matrix.missing() == ["a", "b"]
    assert make_runs(matrix, {"b"}) == ["b"]
    assert [run.name for run in matrix.runs()] == ["b"]
    assert (matrix.run("b").config.read_text(), matrix.missing()) == ("CONFIG_A=y\n", ["a"])


def test_only_the_missing_files_of_a_run_are_written(matrix):
    make_runs(matrix, {"a", "b"})
    run = matrix.run("a")
    run.run_json.write_text("")  # not flushed before a power failure
    run.config.write_text("CONFIG_A=n\n")
    write_json(run.status, {"status": "finished", "reused_from": "other/a"})
    assert matrix.missing() == ["a"]
    assert make_runs(matrix, {"a"}) == ["a"]
    assert run.config.read_text() == "CONFIG_A=n\n"
    assert json.loads(run.run_json.read_text()) == {"name": "a", "reused_from": "other/a"}


def test_runs_are_added_to_the_plan(matrix):
    write_plan(matrix, [RunTexts("c", ("", "", "{}"))], append=True)
    assert [run.name for run in planned_runs(matrix)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        json.dumps({"name": "../a", "files": {}}),
        json.dumps({"name": ".a", "files": {}}),
        json.dumps({"name": "a", "files": {"run.json": "{}"}}),
        json.dumps({"name": "a", "files": {".config": 1, "defconfig": "", "run.json": ""}}),
    ],
)
def test_a_damaged_plan_is_named_and_writes_nothing(matrix, line):
    matrix.plan.write_bytes(gzip.compress(line.encode() + b"\n"))
    with pytest.raises(RecordError, match="is damaged"):
        make_runs(matrix, {"a", "../a"})
    assert matrix.runs() == []
    matrix.plan.write_bytes(gzip.compress(b"{}")[:-3])
    with pytest.raises(RecordError, match="is damaged"):
        make_runs(matrix, {"a"})


def test_an_interrupted_creation_is_not_a_matrix_and_is_named(tmp_path):
    path = tmp_path / "test_matrix_results_20261120_062141"
    staged_dir(path).mkdir()
    assert matrix_dirs(tmp_path) == []
    refuse_unmade(tmp_path, "test_matrix_results_20261120_0")
    for target in (None, path.name, str(path)):
        with pytest.raises(RecordError, match="was interrupted before its plan was complete"):
            refuse_unmade(tmp_path, target)


def test_a_creation_is_interrupted_only_after_its_process_has_ended(tmp_path, monkeypatch):
    path = tmp_path / "test_matrix_results_20261120_062141"
    staged = MatrixDir(staged_dir(path))
    staged.path.mkdir()
    with held(staged, MAKING):
        assert interrupted_dirs(tmp_path) == []
        with pytest.raises(LaunchError, match=f"^{path.name} is being made by process {os.getpid()}"):
            refuse_unmade(tmp_path, None)
    monkeypatch.setattr(lock, "RETRY_S", 0.01)
    # A child that a killed creation was just starting has the lock until it executes its program.
    ended = subprocess.Popen(["true"])
    dead = {**asdict(this_process()), "pid": ended.pid, "pid_started": start_of(ended.pid)}
    ended.wait()
    staged.lock.write_text(json.dumps(dead))
    for look, expected in (
        (lambda: interrupted_dirs(tmp_path), [staged.path]),
        (lambda: holder(staged), None),
    ):
        handle = try_lock(staged.lock)
        release = threading.Timer(0.05, lambda handle=handle: os.close(handle))
        release.start()
        assert look() == expected
        release.join()


def test_matrices_of_one_second_are_in_the_order_of_their_numbers(tmp_path):
    names = [f"test_matrix_results_20261120_062141{more}" for more in ("", "_2", "_9", "_10")]
    for name in reversed(names):
        (tmp_path / name).mkdir()
    assert [matrix.name for matrix in matrix_dirs(tmp_path)] == names
