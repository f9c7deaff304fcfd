"""Kill commands when they change names of files; act on copies of a matrix; add to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from factories import make_data
from instant import Killed, killed_at, tree
from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints, check_file
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir

pytestmark = pytest.mark.story

STEP = 12  # every twelfth call that changes a name is killed, from the first one on
SETTINGS = (
    *("NUM_GPUS=1", "OPTIMIZER=adamw", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "PREFLIGHT=n"),
    *("MAX_ITERS=30", "DATASET=shards", "BLOCK_SIZE=32", "EVAL_SAMPLES=10"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


def make_matrix(program, data, results, *arguments, seeds="1,2"):
    """Make and run a matrix of one optimizer and several seeds."""
    results.mkdir(exist_ok=True)
    words = [*SETTINGS, f"SEED={seeds}", f"DATA_PATH={data}", f"RESULTS_DIR={results}", *arguments]
    program.check("test-matrix", *words)
    (path,) = results.glob("test_matrix_results_*")
    return path


def statuses(program, path):
    result = program.check("status", f"TARGET={path}", "JSON=1")
    return {run["name"]: run["status"] for run in json.loads(result.out)["runs"]}


@pytest.fixture
def other_mount():
    """Return a directory on another file system."""
    place = Path("/dev/shm")
    if not place.is_dir() or place.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("/dev/shm is not another file system")
    folder = Path(tempfile.mkdtemp(dir=place, prefix="kmatrix_test_"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("outside", [False, True])
def test_commands_on_a_copy_leave_the_original_as_it_is(program, data, tmp_path, other_mount, outside):
    disk = tmp_path / "disk"
    original = make_matrix(program, data, tmp_path / "original", *([f"CHECKPOINT_DIR={disk}"] if outside else []))
    before = tree(original), tree(disk) if outside else {}
    (tmp_path / "copies").mkdir()
    copies = {
        tmp_path / "copies" / original.name: "-a",
        original.with_name("renamed"): "-a",
        other_mount / original.name: "-a",
    }
    for number, (copy, how) in enumerate(copies.items()):
        subprocess.run(["cp", how, str(original), str(copy)], check=True)
        # One run has no result: `continue` has something to do.
        name = sorted(statuses(program, copy))[0]
        for path in ("result.json", "metrics.jsonl"):
            (copy / name / path).unlink()
        shutil.rmtree(copy / name / "attempts")
        for command in (
            ["continue"],
            ["test-rerun"],
            ["status"],
            ["summary"],
            ["update-graphs"],
            ["list-checkpoints"],
        ):
            result = program(*command, f"TARGET={copy}")
            refused = outside and command[0] in ("continue", "test-rerun")
            assert result.status == (2 if refused else 0), result.err
            assert not refused or f"belong to {original}" in result.err
        assert (tree(original), tree(disk) if outside else {}) == before
        if not outside:
            assert set(statuses(program, copy).values()) == {"finished"}
            assert (copy / name / "archive" / "2").is_dir()
            continue
        # CHECKPOINT_DIR on the command line gives the copy a folder of its own; the original's is refused.
        own = tmp_path / f"disk_{number}"
        assert f"belong to {original}" in program.refused("continue", f"TARGET={copy}", f"CHECKPOINT_DIR={disk}")
        program.check("test-rerun", f"TARGET={copy}", f"CHECKPOINT_DIR={own}")
        assert (tree(original), tree(disk)) == before
    # The original itself is free to do all of this, also after it was renamed.
    moved = original.rename(original.with_name("moved"))
    program.check("test-rerun", f"TARGET={moved}")


def test_a_deleted_run_is_planned_and_runs_again(program, data, tmp_path):
    path = make_matrix(program, data, tmp_path / "results")
    first, second = sorted(statuses(program, path))
    kept = (path / second / "result.json").read_bytes()
    shutil.rmtree(path / first)
    assert statuses(program, path) == {first: "planned", second: "finished"}
    program.check("continue", f"TARGET={path}")
    assert set(statuses(program, path).values()) == {"finished"}
    assert (path / second / "result.json").read_bytes() == kept


def files_of(path):
    """Return the contents of all results, metrics and logs in a matrix, archived ones included."""
    names = ("result.json", "metrics.jsonl", "output.log")
    return sorted(file.read_bytes() for name in names for file in path.rglob(name))


def check_checkpoints(path):
    """Check that every checkpoint is whole."""
    for run in MatrixDir(path).runs():
        checkpoints = Checkpoints(checkpoint_dir(run))
        for item in checkpoints.all():
            check_file(checkpoints.path(item))


@pytest.mark.parametrize("outside", [False, True])
def test_a_rerun_killed_anywhere_leaves_the_old_or_the_new_state(program, data, tmp_path, outside):
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    path = make_matrix(program, data, tmp_path / "results", *([f"CHECKPOINT_DIR={disk}"] if outside else []))
    folders = [path, *([disk] if outside else [])]
    for folder in folders:
        shutil.copytree(folder, saved / folder.name)
    old = files_of(path)
    seen = set()
    for number in range(1, 400, STEP):
        for folder in folders:
            # In place: the owner of a folder of checkpoints is known by its inode.
            for child in folder.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            shutil.copytree(saved / folder.name, folder, dirs_exist_ok=True)
        try:
            with killed_at(number):
                program.check("test-rerun", f"TARGET={path}")
            break
        except Killed:
            assert set(statuses(program, path).values()) <= {"planned", "finished", "stopped"}
            seen.add("new" if list(path.glob("*/archive")) else "old")
        result = program.check("continue", f"TARGET={path}")
        assert set(statuses(program, path).values()) == {"finished"}
        now_files = files_of(path)
        assert all(text in now_files for text in old), result.out  # nothing is lost
        assert all(len(list(run.archive.iterdir())) == 1 for run in MatrixDir(path).runs() if run.archive.is_dir())
        check_checkpoints(path)
    assert seen == {"old", "new"}


def test_a_continue_killed_anywhere_makes_each_missing_run_once(program, data, tmp_path):
    path = make_matrix(program, data, tmp_path / "results")
    saved, name = tmp_path / "saved", sorted(statuses(program, path))[0]
    shutil.rmtree(path / name)
    shutil.copytree(path, saved)
    for number in range(1, 400, STEP):
        shutil.rmtree(path)
        shutil.copytree(saved, path)
        try:
            with killed_at(number):
                program.check("continue", f"TARGET={path}")
            break
        except Killed:
            assert statuses(program, path).keys() == {name, *(run.name for run in MatrixDir(saved).runs())}
        program.check("continue", f"TARGET={path}")
        assert set(statuses(program, path).values()) == {"finished"}
        assert read_json(path / name / "run.json")["name"] == name
        assert not list(path.glob(".*.new"))


def test_an_addition_killed_anywhere_is_complete_after_continue_or_was_never_begun(program, data, tmp_path):
    path = make_matrix(program, data, tmp_path / "results", seeds="1")
    saved, (old,) = tmp_path / "saved", statuses(program, path)
    shutil.copytree(path, saved)
    kept, seen = tree(saved / old), set()
    for number in range(1, 400, STEP):
        shutil.rmtree(path)
        shutil.copytree(saved, path)
        try:
            with killed_at(number):
                program.check("add", "SEED=2", f"TARGET={path}")
            break
        except Killed:
            seen.add(len(statuses(program, path)))
        program.check("continue", f"TARGET={path}")
        names = set(statuses(program, path))
        if names == {old}:
            program.check("add", "SEED=2", f"TARGET={path}")
            names = set(statuses(program, path))
        assert len(names) == 2
        assert set(statuses(program, path).values()) == {"finished"}
        assert {file: value[3] for file, value in tree(path / old).items()} == {
            file: value[3] for file, value in kept.items()
        }
        assert "already has these cells" in program.refused("add", "SEED=2", f"TARGET={path}")
        assert not list(path.glob(".*.new"))
    assert seen == {1, 2}


def test_values_of_an_axis_are_added_and_the_runs_of_the_matrix_stay(program, data, tmp_path):
    path = make_matrix(program, data, tmp_path / "results")
    before = {name: tree(path / name) for name in statuses(program, path)}
    for words, message in (
        ([], "pass NAME=value"),
        (["SEED=2"], "already has these cells"),
        (["OPTIMIZER=mun"], "unknown value"),
    ):
        kept = tree(path)
        assert message in program.refused("add", *words, f"TARGET={path}")
        assert tree(path) == kept
    assert "added 2 runs to" in program.check("add", "OPTIMIZER=muon", f"TARGET={path}").out
    program.check("add", "GRAD_CLIP=0.5", f"TARGET={path}")
    now = statuses(program, path)
    assert len(now) == 8
    assert set(now.values()) == {"finished"}
    assert {name: tree(path / name) for name in before} == before
    # The runs from before the axis are seeds of the configuration that they are.
    program.check("summary", f"TARGET={path}")
    groups = read_json(path / "results.json")["configurations"]
    assert {(group["axes"]["optimizer"], group["axes"]["gradclip"]): group["seeds"] for group in groups} == {
        (optimizer, clip): [1, 2] for optimizer in ("adamw", "muon") for clip in ("1.0", "0.5")
    }
    # Runs are chosen by their status.
    first = sorted(before)[0]
    result = read_json(path / first / "result.json")
    write_json(path / first / "result.json", {**result, "status": "failed", "kind": "nan"})
    attempt = read_json(path / first / "attempts" / "1.json")
    write_json(path / first / "attempts" / "1.json", {**attempt, "end": {**attempt["end"], "kind": "nan"}})
    kept = {name: tree(path / name) for name in before if name != first}
    program.check("test-rerun", f"TARGET={path}", "STATUS=failed")
    assert (path / first / "archive" / "2" / "result.json").exists()
    assert {name: tree(path / name) for name in kept} == kept
    assert set(statuses(program, path).values()) == {"finished"}
