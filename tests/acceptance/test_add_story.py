"""Add cells to a matrix, and choose runs by their status."""

from __future__ import annotations

import json

import pytest

from factories import make_data
from instant import tree
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir

pytestmark = [pytest.mark.accept, pytest.mark.timeout(600)]

SETTINGS = (
    *("NUM_GPUS=1", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "PREFLIGHT=n", "MAX_ITERS=30"),
    *("DATASET=shards", "BLOCK_SIZE=32", "EVAL_SAMPLES=10"),
)


@pytest.fixture
def path(program, tmp_path):
    """Return a matrix of one optimizer and two seeds."""
    make_data(tmp_path / "data")
    words = ["OPTIMIZER=adamw", "SEED=1,2", f"DATA_PATH={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path / 'results'}"]
    program.check("test-matrix", *SETTINGS, *words)
    (found,) = (tmp_path / "results").glob("test_matrix_results_*")
    return found


def statuses(program, path, *arguments):
    result = program.check("status", f"TARGET={path}", "JSON=1", *arguments)
    return {run["name"]: run["status"] for run in json.loads(result.out)["runs"]}


def test_values_of_an_axis_are_added_and_the_runs_of_the_matrix_stay(program, path):
    before = {name: tree(path / name) for name in statuses(program, path)}
    result = program.check("add", "OPTIMIZER=muon", f"TARGET={path}")
    assert "added 2 runs to" in result.out
    now = statuses(program, path)
    assert set(now) - set(before) == {"gpt2_muon_seed1_1cpu", "gpt2_muon_seed2_1cpu"}
    assert set(now.values()) == {"finished"}
    assert {name: tree(path / name) for name in before} == before
    record = read_json(path / "matrix.json")
    assert [axis["values"] for axis in record["axes"] if axis["label"] == "optimizer"] == [["adamw", "muon"]]
    assert not any(word.startswith("OPTIMIZER=") and "muon" not in word for word in record["overrides"])
    # A second time, on another axis, and on one that the matrix does not have yet.
    program.check("add", "SEED=3", f"TARGET={path}")
    assert len(statuses(program, path)) == 6
    assert "the default depends on another axis" in program.refused("add", "LR=1e-3", f"TARGET={path}")
    program.check("add", "GRAD_CLIP=0.5", f"TARGET={path}")
    names = set(statuses(program, path))
    assert len(names) == 12
    assert sum("0.5" in name for name in names) == 6
    # The runs from before the axis are seeds of the configuration that they are.
    program.check("summary", f"TARGET={path}")
    groups = read_json(path / "results.json")["groups"]
    assert {(group["axes"]["optimizer"], group["axes"]["clip"]): group["seeds"] for group in groups} == {
        (optimizer, clip): [1, 2, 3] for optimizer in ("adamw", "muon") for clip in ("1.0", "0.5")
    }
    # The plan has them: a deleted one is made again.
    (run,) = (run for run in MatrixDir(path).runs() if run.name == "gpt2_muon_seed3_1cpu")
    for file in run.path.rglob("*"):
        if file.is_file():
            file.unlink()
    program.check("continue", f"TARGET={path}")
    assert set(statuses(program, path).values()) == {"finished"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "add needs a value"),
        (["SEED=2"], "already has these cells"),
        (["OPTIMISER=muon"], "OPTIMIZER"),
        (["OPTIMIZER=mun"], "unknown value"),
    ],
)
def test_a_matrix_is_not_changed_by_a_refused_addition(program, path, words, message):
    before = tree(path)
    assert message in program.refused("add", *words, f"TARGET={path}")
    assert tree(path) == before


def test_only_results_and_checkpoints_are_reused_from_a_matrix_of_somebody_else(program, path, tmp_path):
    linked, other = sorted(run.name for run in MatrixDir(path).runs())
    secret = tmp_path / "secret" / other
    secret.mkdir(parents=True)
    (secret / "index.json").write_text('{"schema": 1, "checkpoints": []}')
    (secret / "diary.txt").write_text("mine")
    write_json(path / "matrix.json", {**read_json(path / "matrix.json"), "checkpoints": str(secret.parent)})
    (path / linked / "notes").symlink_to(secret)

    again = ["OPTIMIZER=adamw", "SEED=1,2", f"DATA_PATH={tmp_path / 'data'}", f"RESULTS_DIR={path.parent}"]
    made = program.check("test-matrix", *SETTINGS, *again)

    assert f"{linked} is trained again: {path.name}/{linked} contains symbolic links" in made.out
    assert f"{other}: reused from {path.name}/{other}" in made.out
    (new,) = (folder for folder in path.parent.glob("test_matrix_results_*") if folder != path)
    assert {file.name for file in (new / other / "checkpoints").iterdir()} == {"index.json"}


def test_runs_are_chosen_by_their_status(program, path):
    first, second = sorted(statuses(program, path))
    write_json(path / first / "status.json", {"status": "failed", "reason": "nan", "attempt": 1})
    result = read_json(path / first / "result.json")
    write_json(path / first / "result.json", {**result, "status": "failed", "kind": "nan"})
    assert statuses(program, path, "STATUS=failed") == {first: "failed"}
    assert second not in program.check("status", f"TARGET={path}", "STATUS=failed").out
    assert "unknown status fail" in program.refused("status", f"TARGET={path}", "STATUS=fail")
    kept = tree(path / second)
    program.check("test-rerun", f"TARGET={path}", "STATUS=failed")
    assert (path / first / "archive" / "1" / "result.json").exists()
    assert tree(path / second) == kept
    assert set(statuses(program, path).values()) == {"finished"}
    assert "no run of" in program.check("test-rerun", f"TARGET={path}", "STATUS=failed").out
    assert "no run has this status" in program.check("status", f"TARGET={path}", "STATUS=failed").out
