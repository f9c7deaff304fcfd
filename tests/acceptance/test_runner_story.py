"""Kill, stop, rerun and reuse runs through make, with the real trainer.

Each kill costs seconds; KMATRIX_KILLS=30 kills more often.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from slow_training import SlowTraining
from story import complete_lines, kill, load_json, matrices, only, processes_of
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("KMATRIX_KILLS", "9"))
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=4", "EVAL_SAMPLES=8", "EVAL_INTERVAL=20", "LOG_INTERVAL=1", "REUSE=n"),
)
VICTIMS = ("runner", "trainer", "rank", "recorder")
FAULTS = '''
"""A trainer of seed 2 fails in its third step; one of seed 3 has no memory for more than one sequence at a time."""
import json, sys
words = sys.orig_argv
if "gpt2.train" in words and "torch.distributed.run" not in words:
    import torch
    with open(words[words.index("gpt2.train") + 1] + "/run.json") as file:
        train = json.load(file)["train"]
    batch = int(words[words.index("--micro-batch") + 1]) if "--micro-batch" in words else train["batch_size"]
    backward, steps = torch.Tensor.backward, 0

    def faulty(self, *args, **more):
        global steps
        steps += 1
        if train["seed"] == 2 and steps > 2:
            raise RuntimeError("the cable was pulled")
        if train["seed"] == 3 and batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return backward(self, *args, **more)

    torch.Tensor.backward = faulty
'''


def configure(clone) -> None:
    completed = clone.make("defconfig-gpt2-cpu-quick")
    assert completed.returncode == 0, completed.stderr


# Random kills


def newest_attempt(matrix: Path) -> tuple[str, int] | None:
    """Return the run that trains now and its attempt, once it has logged a step."""
    for path in matrix.glob("*/status.json"):
        status = load_json(path)
        if status["status"] == "running" and any(
            line.get("attempt") == status["attempt"] and "train/loss" in line
            for line in complete_lines(path.parent / "metrics.jsonl")
        ):
            return path.parent.name, status["attempt"]
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
    processes = [psutil.Process(runner.pid)] if victim == "runner" else processes_of(run)[victim]
    if not processes or newest_attempt(run.parent) != (run.name, attempt):
        return False
    return bool(kill([dice.choice(processes)]))


def kill_at_random(matrix: Path, runner: subprocess.Popen, go_on, slow: SlowTraining, dice: random.Random) -> list[str]:
    """Kill processes one after the other at random times, and continue the matrix each time its runner exits.

    slow: holds each attempt until it is killed, and is freed after the last kill.

    Return what was killed. Plain `continue` must resume everything, because a killed run has not failed.
    """
    victims = [*dice.sample(VICTIMS, len(VICTIMS)), *dice.choices(VICTIMS, k=KILLS)][:KILLS]  # each kind at least once
    killed: list[str] = []
    while len(killed) < KILLS:
        training = wait_for_a_run(matrix, runner, None)
        if training is None:
            statuses = {path.parent.name: load_json(path) for path in matrix.glob("*/status.json")}
            failures = [
                f"{name}: {status['kind']}, {status['reason']}"
                for name, status in statuses.items()
                if failed_by_itself(status)
            ]
            assert not failures, f"not killed, but failed: {failures}"
            assert any(status["status"] != "finished" for status in statuses.values()), (
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


def failed_by_itself(status: dict) -> bool:
    return status["status"] == "failed" and status["kind"] != "killed"


def numbers_of(run: Path) -> dict:
    """Return the losses of every step and the hash of the weights of a run."""
    import torch

    steps: dict[int, dict] = {}
    for line in complete_lines(run / "metrics.jsonl"):
        if line.get("resumed"):  # steps after the checkpoint are trained again
            steps = {step: values for step, values in steps.items() if step <= line["step"]}
        values = steps.setdefault(line["step"], {})
        values |= {key: line[key] for key in ("train/loss", "val/loss", "train/lr", "grad/norm") if key in line}
    weights = torch.load(run / "checkpoints" / "final.pt", weights_only=True)["model"]
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    result = load_json(run / "result.json")
    return {
        "weights": digest.hexdigest(),
        "final": result["final_val_loss"],
        "best": result["best_val_loss"],
        "tokens": result["tokens"],
        "steps": dict(sorted(steps.items())),
    }


def test_random_kills_and_continue_give_the_same_bits_as_an_undisturbed_matrix(clone, background, tmp_path):
    """kill -9 runner, trainer, rank or recorder, then `make continue`: all six runs finish as if undisturbed."""
    configure(clone)
    arguments = (*TINY, "OPTIMIZER=adamw,muon,sgd", "NUM_GPUS=1,2", "CHECKPOINT_INTERVAL=4", "DROPOUT=0.1")
    arguments = (*arguments, f"MAX_ITERS={2 * KILLS}")
    undisturbed_dir, killed_dir = tmp_path / "calm", tmp_path / "rough"
    completed = clone.make("test-matrix", *arguments, f"RESULTS_DIR={undisturbed_dir}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    undisturbed = {
        run.parent.name: numbers_of(run.parent) for run in only(matrices(undisturbed_dir)).glob("*/result.json")
    }
    assert len(undisturbed) == 6

    slow = SlowTraining(tmp_path / "slow", "0.05 if steps < 8 else inf")  # no run can end before its kills
    runner = background("test-matrix", *arguments, f"RESULTS_DIR={killed_dir}", **slow.environment)
    matrix = only(wait_until(lambda: matrices(killed_dir)))
    go_on = partial(background, "continue", f"TARGET={matrix}", **slow.environment)
    killed = kill_at_random(matrix, runner, go_on, slow, random.Random(20261120))
    print(f"killed: {', '.join(killed)}")

    completed = clone.make("summary", f"TARGET={matrix}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    completed = clone.make("continue", f"TARGET={matrix}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert not any(processes_of(matrix).values())
    assert {run.parent.name: numbers_of(run.parent) for run in matrix.glob("*/result.json")} == undisturbed
    attempts = [len(load_json(path)["attempts"]) for path in matrix.glob("*/status.json")]
    assert sum(attempts) > 6
    finished = {path: path.read_bytes() for path in matrix.glob("*/result.json")}
    assert "nothing to run" in clone.make("continue", f"TARGET={matrix}").stdout
    assert {path: path.read_bytes() for path in matrix.glob("*/result.json")} == finished


# Each kind of end, reported correctly everywhere


def test_failed_out_of_memory_and_skipped_runs_are_reported_correctly(clone, tmp_path):
    """In `make status`, its JSON, the summary and the exit status; the run without memory recovers automatically."""
    configure(clone)
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(FAULTS, encoding="utf-8")
    arguments = (*TINY[1:], "OPTIMIZER=adamw", "NUM_GPUS=1", "MAX_ITERS=6", "GPU_MONITOR=n")
    axes = ("SEED=1,2,3", "DEVICE=cpu,cuda", "DDP_BACKEND=gloo", f"RESULTS_DIR={tmp_path}")
    completed = clone.kmatrix("test-matrix", *arguments, *axes, PYTHONPATH=str(faults), CUDA_VISIBLE_DEVICES="")
    assert completed.returncode == 1, completed.stdout + completed.stderr
    matrix = only(matrices(tmp_path))
    view = json.loads(clone.kmatrix("status", f"TARGET={matrix}", "JSON=1").stdout)
    by_seed = {
        load_json(matrix / run["name"] / "run.json")["train"]["seed"]: run for run in view["runs"] if run["attempt"]
    }
    assert view["counts"] == {"finished": 2, "failed": 1, "skipped": 3}
    assert view["status"] == "failed"
    assert (by_seed[1]["status"], by_seed[1]["step"], by_seed[1]["attempt"]) == ("finished", 6, 1)
    assert (by_seed[2]["status"], by_seed[2]["kind"]) == ("failed", "error")
    assert "the cable was pulled" in by_seed[2]["reason"]
    assert (by_seed[3]["status"], by_seed[3]["attempt"], by_seed[3]["micro_batch"]) == ("finished", 2, 1)
    first, second = load_json(matrix / by_seed[3]["name"] / "status.json")["attempts"]
    assert (first["kind"], first["status"], second["micro_batch"]) == ("oom", "failed", 1)
    used = load_json(matrix / by_seed[3]["name"] / "run_used.json")
    assert (used["train"]["batch_size"], used["train"]["gradient_accumulation"], used["train"]["global_batch"]) == (
        *(1, 4),
        4,
    )
    status_output = clone.make("status", f"TARGET={matrix}").stdout
    summary = (matrix / "summary_report.txt").read_text()
    for text in (status_output, summary):
        assert "the cable was pulled" in text
        assert "needs 1 GPU" in text
        assert "micro-batch 1" in text
    assert "\x1b" not in status_output
    assert completed.stdout.count("; retrying with micro-batch 1") == 1


# Archived and reused results


def test_a_rerun_archives_the_old_result_and_a_finished_run_is_not_trained_twice(clone, tmp_path):
    configure(clone)
    arguments = (*TINY[:-1], "NUM_GPUS=1", "MAX_ITERS=6", f"RESULTS_DIR={tmp_path}")
    completed = clone.make("test-matrix", *arguments, "OPTIMIZER=adamw,sgd")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    first = only(matrices(tmp_path))
    names = sorted(path.parent.name for path in first.glob("*/result.json"))
    old = {name: load_json(first / name / "result.json") for name in names}

    completed = clone.make("test-rerun", f"TARGET={first}", "OPTIMIZER=sgd")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    sgd = only(name for name in names if "sgd" in name)
    archived, new = load_json(first / sgd / "archive" / "1" / "result.json"), load_json(first / sgd / "result.json")
    assert archived == old[sgd]
    assert (new["attempt"], new["final_val_loss"], new["ended"] > archived["ended"]) == (
        2,
        archived["final_val_loss"],
        True,
    )
    assert all(load_json(first / name / "result.json") == old[name] for name in names if name != sgd)
    reported = {run["name"]: run for run in load_json(first / "results.json")["runs"]}
    assert set(reported) == set(names)
    assert reported[sgd]["ended"] == new["ended"]
    assert clone.kmatrix("test-rerun", f"RESULTS_DIR={tmp_path}").returncode == 2

    completed = clone.make("test-matrix", *arguments, "OPTIMIZER=adamw,muon")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    second = matrices(tmp_path)[-1]
    adamw = only(path for path in second.glob("*adamw*"))
    source = f"{first.name}/{only(name for name in names if 'adamw' in name)}"
    assert f"reused from {source}" in completed.stdout
    assert load_json(adamw / "status.json")["reused_from"] == load_json(adamw / "run.json")["reused_from"] == source
    assert f"from {source}" in (second / "summary_report.txt").read_text()
    assert (
        only(run["reused_from"] for run in load_json(second / "results.json")["runs"] if "adamw" in run["name"])
        == source
    )
    assert len(complete_lines(second / "journal.jsonl")) == len([1, 2, 3, 4])  # only muon was started


# Other terminals, and no terminal


def test_a_detached_matrix_can_be_watched_survives_sighup_and_can_be_stopped_and_continued(clone, background, tmp_path):
    configure(clone)
    arguments = (*TINY, "OPTIMIZER=adamw", "NUM_GPUS=2", "SEED=1,2", "MAX_ITERS=100000", "CHECKPOINT_INTERVAL=50")
    slow = SlowTraining(tmp_path / "slow", "0")
    completed = clone.make("test-matrix", *arguments, f"RESULTS_DIR={tmp_path}", "DETACH=1", **slow.environment)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "make stop TARGET=" in completed.stdout
    matrix = only(matrices(tmp_path))
    wait_until(lambda: newest_attempt(matrix))
    runner = only(processes_of(matrix)["runner"])
    runner.send_signal(signal.SIGHUP)
    follower = background("logs", f"TARGET={matrix}")
    status_output = clone.make("status", f"RESULTS_DIR={tmp_path}").stdout
    assert "1 planned, 1 running" in status_output
    assert runner.is_running()
    assert clone.kmatrix("continue", f"TARGET={matrix}").returncode == 2

    slow.hold()  # else the run may end before `stop` looks at it
    stopping, output = background("stop", f"RESULTS_DIR={tmp_path}"), tmp_path / "output_1.txt"
    wait_until(lambda: "waiting for" in output.read_text(), "it waits for the run")
    slow.unhold()
    assert stopping.wait(600) == 0, output.read_text()
    assert not any(processes_of(matrix)[kind] for kind in ("trainer", "rank", "recorder", "guard"))
    statuses = sorted(load_json(path)["status"] for path in matrix.glob("*/status.json"))
    assert statuses == ["planned", "stopped"]
    run = only(path.parent for path in matrix.glob("*/status.json") if load_json(path)["status"] == "stopped")
    assert list((run / "checkpoints").glob("*.pt"))
    assert follower.wait(600) == 0
    log = (tmp_path / "output_0.txt").read_text()
    assert log.startswith(f"==> {run.name}")
    assert re.search(r"^Iter \d+ \| ", log, re.MULTILINE)
    assert "\x1b" not in (matrix / "runner.log").read_text()
    assert "terminal lost" in [line["event"] for line in complete_lines(matrix / "journal.jsonl")]

    (clone.root / ".config").write_text("CONFIG_GPT2_MAX_ITERS=7\n")  # must not change anything
    step = load_json(run / "result.json")["step"]
    second = background("continue", f"TARGET={matrix}", f"RUN={run.name}")
    assert wait_until(lambda: newest_attempt(matrix)) == (run.name, 2)
    assert clone.make("stop", f"TARGET={matrix}").returncode == 0
    assert second.wait(600) == 130
    assert load_json(run / "run_used.json")["train"]["max_iters"] == 100000
    result = load_json(run / "result.json")
    assert (result["attempt"], result["status"], result["step"] > step) == (2, "stopped", True)
    begun = [
        line["step"] for line in complete_lines(run / "metrics.jsonl") if line["attempt"] == 2 and "train/loss" in line
    ]
    assert begun[0] == step
    assert sorted(load_json(path)["status"] for path in matrix.glob("*/status.json")) == ["planned", "stopped"]


def test_single_runs_are_skipped_held_and_released_while_a_detached_matrix_goes_on(clone, tmp_path):
    """Three runs that differ in nothing that changes a number: the third one, undisturbed, has the result of all."""
    configure(clone)
    settings = dict(word.split("=") for word in TINY) | {"EVAL_INTERVAL": "100,101,102", "OPTIMIZER": "adamw"}
    settings |= {"NUM_GPUS": "1", "MAX_ITERS": "60", "CHECKPOINT_INTERVAL": "100", "DROPOUT": "0.1"}
    settings |= {"GPU_MONITOR": "n", "AUTO_GENERATE_GRAPHS": "n", "RESULTS_DIR": str(tmp_path)}
    slow = SlowTraining(tmp_path / "slow", "0.05 if steps < 8 else inf")
    words = [f"{name}={text}" for name, text in settings.items()]
    started = clone.make("test-matrix", *words, "DETACH=1", **slow.environment)
    assert started.returncode == 0, started.stdout + started.stderr
    matrix = only(matrices(tmp_path))
    held, other, waiting = names = sorted(path.parent.name for path in matrix.glob("*/run.json"))

    def ask(command: str, name: str) -> str:
        completed = clone.make(command, f"RESULTS_DIR={tmp_path}", f"RUN={name}")
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    def facts() -> dict[str, tuple[str, str]]:
        shown = clone.make("status", f"RESULTS_DIR={tmp_path}", "JSON=1").stdout
        return {run["name"]: (run["status"], run["reason"].partition(",")[0]) for run in json.loads(shown)["runs"]}

    # A waiting run is held; the running one stops with a checkpoint, and the next one starts.
    wait_until(lambda: newest_attempt(matrix) == (held, 1), "the first run trains")
    assert ask("hold", waiting) == f"{waiting}: held, the runner follows within a second\n"
    assert ask("hold", "1") == f"{held}: held, the runner follows within a second\n"
    wait_until(lambda: newest_attempt(matrix) == (other, 1), "the next run trains")
    assert facts() == {
        held: ("stopped", "held by user"),
        other: ("running", ""),
        waiting: ("planned", "held by user"),
    }
    stopped_at = load_json(matrix / held / "result.json")["step"]
    assert 0 < stopped_at < 60
    assert list((matrix / held / "checkpoints").glob("*.pt"))

    # Released, it resumes in the same matrix; the other one is left out to the end, and by `continue`.
    assert ask("release", held) == f"{held}: released, the runner follows within a second\n"
    slow.free()
    wait_until(lambda: (matrix / "summary_report.txt").exists() and not processes_of(matrix)["runner"], "the end")
    assert {name: status for name, (status, _) in facts().items()} == {
        held: "finished",
        other: "finished",
        waiting: "planned",
    }
    resumed = [line for line in complete_lines(matrix / held / "events.jsonl") if line["event"] == "resume"]
    assert [line["step"] for line in resumed] == [stopped_at]
    assert "held by user" in (matrix / "summary_report.txt").read_text()
    assert f"Held: {waiting}" in (matrix / "runner.log").read_text()
    left_out = clone.make("continue", f"RESULTS_DIR={tmp_path}")
    assert left_out.returncode == 2  # make's status of a command that exits with 1
    assert f"{matrix.name}: nothing to run" in left_out.stdout
    assert f"{waiting}: held by user" in left_out.stdout

    assert f"continue: make continue TARGET={matrix}" in ask("release", waiting)
    assert clone.make("continue", f"RESULTS_DIR={tmp_path}").returncode == 0
    undisturbed, *others = (numbers_of(matrix / name) for name in reversed(names))
    assert [one == undisturbed for one in others] == [True, True]
