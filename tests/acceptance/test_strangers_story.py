"""A folder of somebody else makes this machine run, write and serve nothing that its user did not ask for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from story import load_json, matrices, only

pytestmark = [pytest.mark.accept, pytest.mark.timeout(600)]

TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "EVAL_INTERVAL=20", "LOG_INTERVAL=1", "REUSE=n", "OPTIMIZER=adamw"),
    *("NUM_GPUS=1", "MAX_ITERS=4"),
)


def tree_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def theirs(clone, tmp_path):
    """A run that was made by somebody else: another home, with a command, and with paths of theirs."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    places = (f"RESULTS_DIR={folder}", f"CHECKPOINT_DIR={folder / 'checkpoints'}")
    command = f"ON_FINISH=touch {tmp_path / 'ran'}"
    made = clone.make("train", *TINY, *places, command, HOME=str(tmp_path / "their home"))
    assert made.returncode == 0, made.stdout + made.stderr
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    return only(matrices(folder))


def test_reproduce_runs_no_command_and_writes_to_no_place_of_the_run(clone, tmp_path, theirs):
    run, mine, before = only(theirs.glob("gpt2_*")), tmp_path / "mine", tree_of(theirs.parent)
    # A commit is printed in a line to paste, and the code has changed.
    record = load_json(run / "run.json")
    record["provenance"] |= {"git_commit": "; id #", "code": "other"}
    hostile = shutil.copytree(theirs, tmp_path / "hostile" / theirs.name) / run.name
    (hostile / "run.json").write_text(json.dumps(record))

    completed = clone.make("reproduce", f"RUN={hostile}", f"RESULTS_DIR={mine}")

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert not (tmp_path / "ran").exists()
    assert tree_of(theirs.parent) == before
    assert list(mine.glob("test_matrix_results_*/gpt2_*/checkpoints/final.pt"))
    for name, value in (("ON_FINISH", f"touch {tmp_path / 'ran'}"), ("CHECKPOINT_DIR", "")):
        assert f'note: not taken from the run: {name}="{value}' in completed.stdout
    assert "; id #" not in completed.stdout
    assert "equal bit for bit" in completed.stdout


def test_continue_and_rerun_of_a_foreign_matrix_run_no_command(clone, tmp_path, theirs):
    completed = clone.make("test-rerun", f"TARGET={theirs}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "was not run: somebody else made this matrix" in completed.stdout
    assert clone.make("continue", f"TARGET={theirs}").returncode == 0
    assert not (tmp_path / "ran").exists()

    run = only(theirs.glob("gpt2_*"))
    (tmp_path / "victim").write_text("mine")
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to(tmp_path / "victim")
    for command in ("continue", "test-rerun"):
        refused = clone.make(command, f"TARGET={theirs}")
        assert refused.returncode == 2
        assert "events.jsonl is a link to" in refused.stderr
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize(
    "value", ['x"; touch RAN; echo "', "x$$(touch RAN)$(shell touch RAN)", "x`touch RAN`", "x';touch RAN;'"]
)
def test_names_of_configurations_run_nothing(clone, tmp_path, value):
    hostile = value.replace("RAN", str(tmp_path / "ran"))
    for name in ("KCONFIG_CONFIG", "O", "RESULTS_DIR", "TARGET"):
        clone.make("status", f"{name}={hostile}")
    refused = clone.make("test-matrix", f"KCONFIG_CONFIG={hostile}")

    assert refused.returncode == 2
    assert "not found" in refused.stderr
    assert not (tmp_path / "ran").exists()


def test_the_users_own_command_runs_after_continue(clone, tmp_path):
    """As the counterpart: a matrix of this user, which was killed, runs their command at the end of `continue`."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    environment = {**clone.environment, "HOME": str(tmp_path / "home")}
    arguments = (*TINY, f"RESULTS_DIR={tmp_path}", f"ON_FINISH=touch {tmp_path / 'ran'}")
    process = subprocess.Popen(
        [clone.python, "-m", "kmatrix", "train", *arguments],
        cwd=clone.root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    for line in process.stdout:
        if line.startswith("1 run in "):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()

    completed = clone.make("continue", f"TARGET={only(matrices(tmp_path))}", HOME=str(tmp_path / "home"))

    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert (tmp_path / "ran").exists()
