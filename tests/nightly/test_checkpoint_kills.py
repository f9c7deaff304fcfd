"""Stop and kill runs, damage their checkpoints, and resume them with make and torchrun, as a user does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from story import complete_lines
from waiting import wait_until

pytestmark = pytest.mark.nightly

ARGUMENTS = ("OPTIMIZER=adamw", "NUM_GPUS=2", "BATCH_SIZE=2", "GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "GPU_MONITOR=n")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gpt2.train")
READ_STEPS = """
import sys
from pathlib import Path
from gpt2.checkpoint.files import load_checkpoint
for name in sys.argv[1:]:
    print(load_checkpoint(Path(name))["step"])
"""


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def checkpoints(run):
    """Return the descriptions of the checkpoints, oldest first, with the name of each file."""
    found = [load(path) | {"name": f"{path.stem}.pt"} for path in (run / "checkpoints").glob("step_*.json")]
    return sorted(found, key=lambda item: (item["attempt"], item["step"]))


def events(run, kind):
    return [line for line in complete_lines(run / "events.jsonl") if line["event"] == kind]


@pytest.fixture
def plan_run(clone, tmp_path):
    """Return a function that plans a long run without starting it."""

    def plan(*arguments):
        assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
        completed = clone.make("train", *ARGUMENTS, "MAX_ITERS=2", "SAVE_BEST=n", *arguments, f"RESULTS_DIR={tmp_path}")
        assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
        (run,) = tmp_path.glob("test_matrix_results_*/gpt2_*")
        shutil.rmtree(run / "checkpoints")
        for name in ("metrics.jsonl", "events.jsonl", "result.json"):
            (run / name).unlink()
        value = load(run / "run.json")
        value["train"] |= {"max_iters": 100_000, "warmup_steps": 10, "warmup_fraction": None}
        (run / "run.json").write_text(json.dumps(value))
        return run

    return plan


@pytest.fixture
def start_torchrun(clone):
    """Return a function that starts torchrun on a run as the local engine does; leftover processes are killed."""
    running = []

    def start(run, *arguments):
        path = os.pathsep.join([str(clone.root), str(clone.root / "lib")])
        process = subprocess.Popen(
            [clone.python, *TORCHRUN, str(run), *arguments],
            cwd=clone.root,
            env=clone.environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=(run / "output.log").open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        kill_tree(process)


def kill_tree(process):
    """Kill torchrun and all its ranks at once, as a power failure does, and return when none is left."""
    # Each rank has a session of its own, and would save a checkpoint if it saw that torchrun is gone: torchrun is last.
    process.send_signal(signal.SIGSTOP)
    ranks = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(ranks)


def steps_of(clone, run, *names):
    """Return the steps of checkpoints, read in another process with the trainer's own reader."""
    path = os.pathsep.join([str(clone.root), str(clone.root / "lib")])
    files = [str(run / "checkpoints" / name) for name in names]
    completed = clone.run(clone.python, "-c", READ_STEPS, *files, PYTHONPATH=path)
    assert completed.returncode == 0, completed.stderr
    return [int(line) for line in completed.stdout.split()]


def test_sigterm_to_torchrun_saves_a_checkpoint_in_time_and_a_second_signal_is_harmless(
    clone, plan_run, start_torchrun
):
    """SIGTERM, then SIGINT twice: each time every rank stops at the same step and the next attempt resumes there."""
    run = plan_run()
    steps = []
    for attempt, signals in ((1, [signal.SIGTERM]), (2, [signal.SIGINT, signal.SIGINT])):
        process = start_torchrun(run, f"--attempt={attempt}", "--resume=auto")

        def has_trained(attempt=attempt):
            """the attempt has trained some steps"""
            lines = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
            return lines.count(f'"attempt": {attempt}, "train/loss"') > 2

        wait_until(has_trained)
        for number in signals:
            process.send_signal(number)
            # The second signal must arrive while the first one is handled.
            time.sleep(0.2)
        process.wait(timeout=240)
        assert "forcefully exiting" not in (run / "output.log").read_text(), "torchrun has killed a rank"
        result = load(run / "result.json")
        assert (result["status"], result["kind"], result["attempt"]) == ("stopped", "signal", attempt)
        newest = checkpoints(run)[-1]
        assert steps_of(clone, run, newest["name"]) == [newest["step"]] == [result["step"]]
        steps.append(result["step"])
    assert steps[1] > steps[0]
    (resume,) = events(run, "resume")
    assert resume["step"] == steps[0]


def test_sigkill_during_saves_keeps_a_complete_checkpoint_and_a_damaged_one_is_skipped(clone, plan_run, start_torchrun):
    """Whichever process is killed when, the newest complete checkpoint is used; a truncated one is refused by name."""
    run = plan_run("CHECKPOINT_INTERVAL=1")
    process = start_torchrun(run, "--attempt=1")

    def is_saving():
        """there are several checkpoints, and one is being written"""
        return len(checkpoints(run)) >= 3 and list((run / "checkpoints").glob(".step_*.partial"))

    wait_until(is_saving)
    kill_tree(process)
    present = checkpoints(run)
    assert steps_of(clone, run, *(item["name"] for item in present)) == [item["step"] for item in present]

    last, before = present[-1], present[-2]
    path = run / "checkpoints" / last["name"]
    path.write_bytes(path.read_bytes()[: last["bytes"] // 2])
    process = start_torchrun(run, "--attempt=2", "--resume=latest")
    wait_until(lambda: events(run, "resume"))
    process.terminate()
    process.wait(timeout=240)
    (refused,) = events(run, "checkpoint refused")
    assert last["name"] in refused["text"]
    (resume,) = events(run, "resume")
    assert resume["step"] == before["step"]
    assert f"checkpoint refused: {path}" in (run / "output.log").read_text()
    assert path.with_name(f"{path.name}.damaged").exists()
    assert not list((run / "checkpoints").glob(".step_*.partial"))
