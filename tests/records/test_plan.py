"""The plan of a matrix: runs are made from it, again if they are missing."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import threading
from dataclasses import asdict

import pytest

from kmatrix.errors import LaunchError, RecordError, damaged_files
from kmatrix.records import lock
from kmatrix.records.files import write_json
from kmatrix.records.lock import MAKING, held, holder, start_of, this_process, try_lock
from kmatrix.records.paths import (
    MATRIX_PREFIX,
    MatrixDir,
    is_in_the_future,
    matrix_dirs,
    next_path,
    staged_dir,
)
from kmatrix.records.plan import RunTexts, interrupted_dirs, make_runs, planned_runs, refuse_unmade, write_plan
from kmatrix.records.runs import read_matrix_file_or_empty


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
    assert matrix.missing() == ["a"]
    assert make_runs(matrix, {"a"}) == ["a"]
    assert run.config.read_text() == "CONFIG_A=n\n"
    assert json.loads(run.run_json.read_text()) == {"name": "a"}


def test_runs_are_added_to_the_plan(matrix):
    write_plan(matrix, [RunTexts("c", ("", "", "{}"))], append=True)
    assert [run.name for run in planned_runs(matrix)] == ["a", "b", "c"]


def test_the_last_line_of_a_name_counts_after_an_addition_that_was_killed(matrix):
    for text in ("old", "new"):
        write_plan(matrix, [RunTexts("c", (text, "", "{}"))], append=True)
    assert make_runs(matrix, {"c"}) == ["c"]
    assert matrix.run("c").config.read_text() == "new"


def test_no_run_is_made_from_a_plan_with_a_wrong_checksum(matrix):
    data = bytearray(matrix.plan.read_bytes())
    data[-8] ^= 1  # the CRC of gzip comes after the last line
    matrix.plan.write_bytes(data)
    with pytest.raises(RecordError, match="is damaged"):
        make_runs(matrix, {"a", "b"})
    assert matrix.runs() == []


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "a\0b", "n" * 300, "n" * 100 + "é"])
def test_a_name_that_leads_out_of_the_matrix_is_damage(matrix, name):
    write_json(matrix.matrix_json, {"runs": [{"name": name}]})
    assert matrix.missing() == ["a", "b"]  # of the plan
    assert read_matrix_file_or_empty(matrix).runs == ()
    assert damaged_files() != []


def test_the_plan_names_the_runs_if_matrix_json_is_missing(matrix):
    make_runs(matrix, {"b"})
    matrix.matrix_json.unlink()
    assert [run.name for run in matrix.all_runs()] == ["a", "b"]
    assert matrix.missing() == ["a"]
    assert make_runs(matrix, {"a"}) == ["a"]
    # Damaged as well: the runs on disk are all that is known.
    matrix.plan.write_bytes(matrix.plan.read_bytes()[:-1])
    shutil.rmtree(matrix.run("a").path)
    assert [run.name for run in matrix.all_runs()] == ["b"]
    assert [text for text in damaged_files() if "plan.jsonl.gz is damaged" in text] != []


def test_a_plan_damaged_at_random_places_never_makes_an_altered_run(matrix):
    """Bits are flipped, bytes replaced, inserted and cut off."""
    write_plan(matrix, [RunTexts("c", ("CONFIG_C=y\n", "", "{}"))], append=True)
    whole, chance = matrix.plan.read_bytes(), random.Random(12)
    runs = {run.name: run for run in planned_runs(matrix)}
    errors = []
    for _ in range(300):
        data, place = bytearray(whole), chance.randrange(len(whole))
        change = chance.choice(["flip", "byte", "insert", "cut", "zeros"])
        if change == "flip":
            data[place] ^= 1 << chance.randrange(8)
        elif change == "byte":
            data[place] = chance.randrange(256)
        elif change == "insert":
            data.insert(place, chance.randrange(256))
        else:
            data[place:] = bytes(len(data) - place if change == "zeros" else 0)
        matrix.plan.write_bytes(data)
        try:
            found = {run.name: run for run in planned_runs(matrix)}
        except RecordError as error:
            errors.append(error.what)
        else:
            assert found.items() <= runs.items()
    assert len(errors) > 200
    assert set(errors) == {f"{matrix.plan} is damaged"}


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


@pytest.mark.process
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


def test_a_new_matrix_is_the_newest_one_whatever_the_clock_and_the_user_did(tmp_path):
    made = []
    # A second later, in the same second, the clock set back by a year, and by an hour; then it is right again.
    for now in (1795155701, 1795155702, 1795155702, 1763619702, 1795152102, 1795155703):
        made.append(next_path(tmp_path, now))
        made[-1].mkdir()
    first, *others, last = made
    second = others[0].name
    assert [path.name for path in others] == [second, f"{second}_2", f"{second}_3", f"{second}_4"]
    assert [matrix.path for matrix in matrix_dirs(tmp_path)] == made
    assert [is_in_the_future(path, 1795155702) for path in (first, *others, last)] == [False] * 5 + [True]
    # Copies and other names: by the time in matrix.json, and before the original.
    for number, name in enumerate(("copy", f"{last.name.removeprefix(MATRIX_PREFIX)}.bak", "99999999_999999")):
        copy = tmp_path / f"{MATRIX_PREFIX}{name}"
        copy.mkdir()
        write_json(copy / "matrix.json", {"created": 1795155600 + number})
    names = [matrix.name.removeprefix(MATRIX_PREFIX) for matrix in matrix_dirs(tmp_path)]
    assert (names[:2], names[-1]) == (["copy", "99999999_999999"], last.name.removeprefix(MATRIX_PREFIX))
    assert next_path(tmp_path, 1795155702).name == f"{last.name}_2"
    # One that is being made counts, too.
    staged_dir(next_path(tmp_path, 1795155702)).mkdir()
    assert next_path(tmp_path, 1795155702).name == f"{last.name}_3"


def test_matrices_of_one_second_are_in_the_order_of_their_numbers(tmp_path):
    names = [f"test_matrix_results_20261120_062141{more}" for more in ("", "_2", "_9", "_10")]
    for name in reversed(names):
        (tmp_path / name).mkdir()
    assert [matrix.name for matrix in matrix_dirs(tmp_path)] == names
