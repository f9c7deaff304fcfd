"""Kill, stop, rerun and reuse runs through make, with the real trainer.

Each kill costs seconds; KMATRIX_KILLS=30 kills more often.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from held_training import HeldTraining
from kmatrix.records.runs import Status
from kmatrix.status.look import look
from story import complete_lines, kill, matrices, numbers_of, only, processes_of
from waiting import wait_until

pytestmark = pytest.mark.nightly

KILLS = int(os.environ.get("KMATRIX_KILLS", "9"))
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "EVAL_INTERVAL=20", "LOG_INTERVAL=1", "REUSE=n"),
)
VICTIMS = ("runner", "program", "rank", "recorder")


def newest_attempt(matrix: Path) -> tuple[str, int] | None:
    """Return the run that trains now and its attempt, once it has logged a step."""
    for run, state in look(matrix).states.items():
        if state.status is Status.RUNNING and any(
            line.get("attempt") == state.number and "train/loss" in line
            for line in complete_lines(matrix / run / "metrics.jsonl")
        ):
            return run, state.number
    return None


def wait_for_a_run(matrix: Path, runner: subprocess.Popen, previous: tuple[str, int] | None) -> tuple[str, int] | None:
    """Return the next attempt that trains, other than `previous`; None after the runner has exited."""

    def training_or_ended():
        """a run trains, or the runner exits"""
        now = newest_attempt(matrix)
        return ("ended", 0) if runner.poll() is not None else now if now != previous else None

    attempt = wait_until(training_or_ended)
    return None if attempt == ("ended", 0) else attempt


def kill_one(run: Path, attempt: int, victim: str, runner: subprocess.Popen, dice: random.Random) -> bool:
    """Send SIGKILL to one process of an attempt or to its runner. Return False if it has exited meanwhile."""
    processes = processes_of(run.parent)["runner"] if victim == "runner" else processes_of(run)[victim]
    if not processes or newest_attempt(run.parent) != (run.name, attempt):
        return False
    return bool(kill([dice.choice(processes)]))


def kill_at_random(matrix: Path, runner: subprocess.Popen, go_on, slow: HeldTraining, dice: random.Random) -> list[str]:
    """Kill processes one after the other at random times, and continue the matrix each time its runner exits.

    slow: holds each attempt until it is killed, and is freed after the last kill.

    Return what was killed. Plain `continue` must resume everything, because a killed run has not failed.
    """
    victims = [*dice.sample(VICTIMS, len(VICTIMS)), *dice.choices(VICTIMS, k=KILLS)][:KILLS]  # each kind at least once
    killed: list[str] = []
    while len(killed) < KILLS:
        training = wait_for_a_run(matrix, runner, None)
        if training is None:
            states = look(matrix).states
            failed = {run: state for run, state in states.items() if state.status is Status.FAILED}
            failures = [f"{run}: {state.reason}" for run, state in failed.items() if state.kind != "killed"]
            assert not failures, f"not killed, but failed: {failures}"
            assert any(state.status is not Status.FINISHED for state in states.values()), (
                f"all finished after {len(killed)} kills"
            )
            runner = go_on()
            continue
        time.sleep(dice.uniform(0.0, 0.5))
        victim = victims[len(killed)]
        if not kill_one(matrix / training[0], training[1], victim, runner, dice):
            continue
        killed.append(victim)
        if victim == "runner":
            runner.wait()
        if victim != "recorder":
            wait_for_a_run(matrix, runner, training)
    slow.free()
    runner.wait(600)
    return killed


def test_random_kills_and_continue_give_the_same_bits_as_an_undisturbed_matrix(clone, background, tmp_path):
    """kill -9 runner, program, rank or recorder, then `make continue`: all six runs finish as if undisturbed."""
    clone.check("defconfig-gpt2-cpu-quick")
    arguments = (*TINY, "OPTIMIZER=adamw,muon,sgd", "NUM_GPUS=1,2", "CHECKPOINT_INTERVAL=4", "DROPOUT=0.1")
    arguments = (*arguments, f"MAX_ITERS={2 * KILLS}")
    undisturbed_dir, killed_dir = tmp_path / "calm", tmp_path / "rough"
    completed = clone.make("test-matrix", *arguments, f"RESULTS_DIR={undisturbed_dir}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    undisturbed = {
        run.parent.name: numbers_of(run.parent) for run in only(matrices(undisturbed_dir)).glob("*/result.json")
    }
    assert len(undisturbed) == 6

    slow = HeldTraining(tmp_path / "held", "steps >= 8")  # no run can end before its kills
    runner = background("test-matrix", *arguments, f"RESULTS_DIR={killed_dir}", **slow.environment)
    matrix = only(wait_until(lambda: matrices(killed_dir)))
    go_on = partial(background, "continue", f"TARGET={matrix}", **slow.environment)
    killed = kill_at_random(matrix, runner, go_on, slow, random.Random(20261120))
    print(f"killed: {', '.join(killed)}")

    completed = clone.make("summary", f"TARGET={matrix}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    completed = clone.make("continue", f"TARGET={matrix}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    wait_until(lambda: not any(processes_of(matrix).values()), "a runner that has let go ends soon")
    assert {run.parent.name: numbers_of(run.parent) for run in matrix.glob("*/result.json")} == undisturbed
    assert sum(len(state.attempts) for state in look(matrix).states.values()) > 6
    finished = {path: path.read_bytes() for path in matrix.glob("*/result.json")}
    assert "nothing to run" in clone.make("continue", f"TARGET={matrix}").stdout
    assert {path: path.read_bytes() for path in matrix.glob("*/result.json")} == finished
