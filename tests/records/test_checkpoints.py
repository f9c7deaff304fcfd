"""The checkpoints of a run: which exist, which are kept, what a kill leaves, and the commands that list them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from checkpoints import add_checkpoint
from factories import ROOT, environment
from instant import Killed, killed_at
from kmatrix.errors import RecordError
from kmatrix.records.checkpoints import Checkpoints, check_file
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from programs import run


def steps(items):
    return [item.step for item in items]


def test_a_checkpoint_is_read_back_as_it_was_described(tmp_path):
    item = add_checkpoint(tmp_path, 300, b"weights of 300", val_loss=3.25, final=True)
    assert Checkpoints(tmp_path).all() == [item]
    assert (item.name, item.bytes, item.val_loss, item.final) == ("step_00000300.pt", 14, 3.25, True)
    check_file(tmp_path / item.name)


def test_best_newest_and_final_follow_from_the_descriptions(tmp_path):
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.0), (4, None)):
        add_checkpoint(tmp_path, step, val_loss=loss, final=step == 2)
    checkpoints = Checkpoints(tmp_path)
    assert steps([checkpoints.newest(), checkpoints.best(), checkpoints.final()]) == [4, 3, 2]


def test_after_a_resume_from_an_earlier_one_the_newest_is_the_last_written(tmp_path):
    for step, attempt in ((1, 1), (2, 1), (3, 1), (2, 2)):
        add_checkpoint(tmp_path, step, attempt=attempt)
    assert steps(Checkpoints(tmp_path).all()) == [1, 3, 2]
    assert Checkpoints(tmp_path).newest().step == 2


@pytest.mark.parametrize(
    ("losses", "final", "kept"),
    [
        ([None] * 4, None, [3, 4]),
        ([1.0, None, None, None], None, [1, 3, 4]),
        ([1.0, None, 0.5, None], 2, [2, 3, 4]),
        ([3.0, 2.0, 1.0, None], 1, [1, 3, 4]),
    ],
)
def test_the_newest_the_best_and_the_final_one_are_kept(tmp_path, losses, final, kept):
    for step, loss in enumerate(losses, 1):
        add_checkpoint(tmp_path, step, val_loss=loss, final=step == final)
    Checkpoints(tmp_path).retire(keep=2)
    assert steps(Checkpoints(tmp_path).all()) == kept
    assert len(list(tmp_path.iterdir())) == 2 * len(kept)


def test_a_kill_at_any_file_operation_of_a_save_leaves_a_sound_checkpoint(tmp_path):
    """Steps 4 (replaced) and 5 (new) are written and older ones deleted. No file without a description remains."""
    number, killed = 0, True
    while killed:
        folder = tmp_path / str(number)
        for step in (1, 2, 4):
            add_checkpoint(folder, step, b"%d of attempt 1" % step, val_loss=float(step))
        try:
            with killed_at(number):
                for step in (4, 5):
                    add_checkpoint(folder, step, b"%d of attempt 2" % step, attempt=2)
                    Checkpoints(folder).retire(keep=2)
            killed = False
        except Killed:
            number += 1
        checkpoints = Checkpoints(folder)
        checkpoints.tidy()
        present = checkpoints.all()
        assert len(present) >= 2, number
        for item in present:
            check_file(checkpoints.path(item))
            assert checkpoints.path(item).read_bytes() == b"%d of attempt %d" % (item.step, item.attempt)
        assert {path.name for path in folder.glob("step_*.pt")} == {item.name for item in present}
        assert not list(folder.glob(".*"))
    assert number > 10
    assert steps(present) == [1, 4, 5]


def test_a_file_that_changed_is_refused_by_its_hash(tmp_path):
    path = tmp_path / add_checkpoint(tmp_path, 1).name
    path.write_bytes(b"wEights")
    with pytest.raises(RecordError, match=r"step_00000001\.pt is damaged"):
        check_file(path)


def test_a_damaged_description_concerns_one_checkpoint_and_a_newer_one_is_refused(tmp_path):
    for step in (1, 2):
        add_checkpoint(tmp_path, step)
    path = tmp_path / "step_00000002.json"
    value = read_json(path)
    path.write_text("{")
    assert steps(Checkpoints(tmp_path).all()) == [1]
    path.write_text(str(value | {"schema": 99}).replace("'", '"').replace("None", "null").replace("False", "false"))
    assert steps(Checkpoints(tmp_path).all()) == [1]


@pytest.fixture
def matrix(tmp_path):
    """A matrix of two runs with checkpoints, and one without."""
    folder = MatrixDir(tmp_path / "test_matrix_results_20261120_062141")
    for name in ("gpt2_adamw_1cpu", "gpt2_muon_1cpu", "gpt2_sgd_1cpu"):
        write_json(folder.run(name).run_json, {"run_id": name, "name": name, "train": {}})
    write_json(
        folder.matrix_json, {"runs": [{"name": path.name, "run_id": path.name} for path in folder.path.iterdir()]}
    )
    add_checkpoint(folder.run("gpt2_adamw_1cpu").checkpoints, 10)
    for step in (10, 20):
        add_checkpoint(folder.run("gpt2_muon_1cpu").checkpoints, step, val_loss=3.25, final=step == 20)
    return folder


def test_the_list_shows_what_each_checkpoint_is(matrix):
    result = run("list-checkpoints", f"TARGET={matrix.path}", "RUN=*muon*")
    assert result.status == 0
    head, *lines = [line.split() for line in result.out.splitlines()[1:]]
    assert head == ["step", "kinds", "val", "loss", "size", "attempt", "written", "file"]
    assert [lines[0][:2], [*lines[1][:6], lines[1][-1]]] == [
        ["10", "3.2500"],
        ["20", "newest,best,final", "3.2500", "7", "B", "1", "step_00000020.pt"],
    ]


@pytest.mark.process
def test_the_list_does_not_need_torch(matrix):
    code = "import sys; from kmatrix.cli.commands import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "list-checkpoints", f"TARGET={matrix.path}"]
    completed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "gpt2_adamw_1cpu: 1 checkpoint" in completed.stdout
    assert "gpt2_sgd_1cpu" not in completed.stdout
