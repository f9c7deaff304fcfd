"""A folder of somebody else makes this machine run, write and serve nothing that its user did not ask for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from factories import make_data
from instant import InstantEngine
from kmatrix.runner import execute
from programs import Program, give_gpus
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
    # A rule can set any symbol.
    lines = [line for line in (hostile / ".config").read_text().splitlines() if "CONFIG_MATRIX_COUPLED" not in line]
    rule = f'CONFIG_MATRIX_COUPLED="OPTIMIZER=adamw => ON_FINISH={tmp_path}/command RESULTS_DIR={tmp_path}/theirs"'
    (hostile / ".config").write_text(
        "\n".join([*lines, rule, ""]).replace("# CONFIG_MATRIX is not set", "CONFIG_MATRIX=y")
    )
    (tmp_path / "command").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    (tmp_path / "command").chmod(0o755)

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


# Every file that the program writes into a matrix, a run, and the results folder: docs/formats.md.
OF_MATRIX = (
    *(
        "matrix.json",
        "plan.jsonl.gz",
        "rerun.json",
        "config.txt",
        "code.patch",
        "status.json",
        "journal.jsonl",
        ".lock",
    ),
    *("runner.log", "summary_report.txt", "results.json", "all_results.json", "graphs/val_loss.png", "graphs", "tb"),
)
OF_RUN = (
    *("run.json", "run_used.json", ".config", "defconfig", "status.json", "output.log", ".lock", "result.json"),
    *("metrics.jsonl", "events.jsonl", "phases.jsonl", "samples.jsonl", "training_metrics.json", "profile.json"),
    *("ranks", "ranks/0/state.json", "ranks/0/stacks.txt", "ranks/1/error.json", "checkpoints/index.json"),
    *("gpu_samples.bin", "gpu_events.jsonl", "gpu_summary.json", "gpu_stats_RUN.json", "gpu_stats_RUN_multi_gpu.json"),
    *("track.json", "track.log", ".track.lock", "wandb", "wandb/run-x/run-x.wandb", "archive/1/result.json"),
)
OF_RESULTS = ("trackio/.page-UID.json", "trackio/project.db")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Commands in this process, with an engine whose runs finish at once."""
    monkeypatch.setattr(execute, "LocalEngine", InstantEngine)
    give_gpus(monkeypatch, 0)
    made = Program(tmp_path)
    made.check("defconfig-gpt2-cpu-quick")
    return made


def plant(link: Path, victim: Path) -> None:
    """Replace a file or folder by a link to one with the same content, which belongs to the user."""
    link.parent.mkdir(parents=True, exist_ok=True)
    victim.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(victim)
    else:
        victim.write_text("mine")
    link.symlink_to(victim)


def test_no_command_writes_through_a_link_of_a_foreign_folder(program, tmp_path):
    make_data(tmp_path / "data")
    words = ["DATASET=shards", f"DATA_PATH={tmp_path / 'data'}", "BLOCK_SIZE=32", "EVAL_SAMPLES=10", "MAX_ITERS=30"]
    words += ["OPTIMIZER=adamw", "NUM_GPUS=1", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", f"RESULTS_DIR={tmp_path}/r"]
    program.check("test-matrix", *words)
    matrix = only(matrices(tmp_path / "r"))
    run, mine = only(matrix.glob("gpt2_*")), tmp_path / "mine"
    names = [name.replace("RUN", run.name) for name in OF_RUN]
    target = f"TARGET={matrix}"
    changing = (
        *(("continue", target, "RETRY_FAILED=1"), ("test-rerun", target), ("checkpoints-prune", target, "YES=1")),
        *(("track-sync", target, "TRACKER=tensorboard"), ("add", target, "SEED=7", f"DATA_PATH={tmp_path / 'data'}")),
    )
    # One link at a time: commands that change a matrix refuse it.
    for number, name in enumerate([*OF_MATRIX, *(f"{run.name}/{name}" for name in names)]):
        saved = shutil.copytree(matrix, tmp_path / "saved", symlinks=True)
        plant(matrix / name, mine / f"{number}" / Path(name).name)
        before, command = tree_of(mine), changing[number % len(changing)]
        result = program(*command)
        assert tree_of(mine) == before, (name, command, result)
        assert (result.status, "Traceback" in result.err) == (2, False), (name, command, result)
        shutil.rmtree(matrix)
        saved.rename(matrix)
    # All at once: commands that only report, and the pages.
    places = [(matrix / name, name) for name in OF_MATRIX if "/" not in name and name not in ("graphs", "tb")]
    places += [(run / name, f"{run.name}/{name}") for name in names if name not in ("ranks", "wandb")]
    places += [(matrix.parent / name, name) for name in (one.replace("UID", str(os.getuid())) for one in OF_RESULTS)]
    for path, name in places:
        plant(path, mine / "all" / name)
    before, here = tree_of(mine), f"RESULTS_DIR={matrix.parent}"
    for command in (
        *(("status", target), ("status", target, "JSON=1"), ("estimate", target), ("summary", target)),
        *(("update-graphs", target), ("list-checkpoints", target), ("compare", target), ("trackio-console", here)),
        *(("trackio-web", here), ("trackio-view", here), ("reproduce", f"RUN={run}"), *changing),
    ):
        result = program(*command)
        assert tree_of(mine) == before, (command, result)
        assert result.status in (0, 1, 2), (command, result)
        assert "Traceback" not in result.err, (command, result)


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
