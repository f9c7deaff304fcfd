"""A matrix that survives: kills, stops, reruns and reuse, as a user meets them through make, with the real trainer.

KMATRIX_KILLS=30 makes the test of random kills as long as the promise; by default it is shorter.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("KMATRIX_KILLS", "6"))
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


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def matrices(folder: Path) -> list[Path]:
    return sorted(folder.glob("test_matrix_results_*"))


def only(found):
    (one,) = found
    return one


def lines_of(path: Path) -> list[dict]:
    """The whole lines of a log; a last one that is cut short is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line.strip()]


def processes_of(folder: Path) -> dict[str, list[psutil.Process]]:
    """Every process whose command line names the folder, by what it is."""
    found: dict[str, list[psutil.Process]] = {victim: [] for victim in (*VICTIMS, "guard")}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] == psutil.STATUS_ZOMBIE or not any(str(folder) in word for word in words):
            continue
        text = " ".join(words)
        kinds = (
            ("guard", "guard.py"),
            ("recorder", "kmatrix.gpu.recorder"),
            ("trainer", "torch.distributed.run"),
            ("rank", "gpt2.train"),
            ("runner", "-m kmatrix"),
        )
        kind = next((kind for kind, mark in kinds if mark in text), None)
        if kind:
            found[kind].append(process)
    return found


def wait_for(what, seconds: float = 240.0):
    """Return what the function finds as soon as it finds something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s in vain for {what.__doc__ or what.__name__}")


@pytest.fixture
def background(clone, tmp_path):
    """Start `kmatrix ...` in the background, in a session of its own; kill what is left at the end."""
    running: list[subprocess.Popen] = []

    def start(*words: str, **more: str) -> subprocess.Popen:
        output = (tmp_path / f"output_{len(running)}.txt").open("w")
        process = subprocess.Popen(
            [clone.python, "-m", "kmatrix", *words],
            cwd=clone.root,
            env=clone.environment | more,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()
    for processes in processes_of(tmp_path).values():
        for process in processes:
            process.kill()


def configure(clone) -> None:
    done = clone.make("defconfig-gpt2-cpu-quick")
    assert done.returncode == 0, done.stderr


# Must 1: random kills


def newest_attempt(matrix: Path) -> tuple[str, int] | None:
    """The run that trains now, and its attempt: one that has logged a step in it."""
    for path in matrix.glob("*/status.json"):
        status = load(path)
        if status["status"] == "running" and any(
            line.get("attempt") == status["attempt"] and "train/loss" in line
            for line in lines_of(path.parent / "metrics.jsonl")
        ):
            return path.parent.name, status["attempt"]
    return None


def wait_for_a_run(matrix: Path, runner: subprocess.Popen, but: tuple[str, int] | None) -> tuple[str, int] | None:
    """Return the attempt that trains as soon as another one than `but` does; None when the runner has ended."""

    def found():
        """a run to train, or the runner to end"""
        now = newest_attempt(matrix)
        return ("ended", 0) if runner.poll() is not None else now if now != but else None

    attempt = wait_for(found)
    return None if attempt == ("ended", 0) else attempt


def numbers_of(run: Path) -> dict:
    """Everything that a run came to: losses of every step, and the hash of its weights."""
    import torch

    steps: dict[int, dict] = {}
    for line in lines_of(run / "metrics.jsonl"):
        if line.get("resumed"):  # what came behind the checkpoint is trained again
            steps = {step: known for step, known in steps.items() if step <= line["step"]}
        known = steps.setdefault(line["step"], {})
        known |= {key: line[key] for key in ("train/loss", "val/loss", "train/lr", "grad/norm") if key in line}
    weights = torch.load(run / "checkpoints" / "final.pt", weights_only=True)["model"]
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    result = load(run / "result.json")
    return {
        "weights": whole.hexdigest(),
        "final": result["final_val_loss"],
        "best": result["best_val_loss"],
        "tokens": result["tokens"],
        "steps": dict(sorted(steps.items())),
    }


def test_random_kills_and_continue_end_bit_for_bit_where_an_undisturbed_matrix_ends(clone, background, tmp_path):
    """kill -9 of runner, trainer, rank or recorder, then `make continue`: all six finish as if alone."""
    configure(clone)
    words = (*TINY, "OPTIMIZER=adamw,muon,sgd", "NUM_GPUS=1,2", "MAX_ITERS=40", "CHECKPOINT_INTERVAL=4", "DROPOUT=0.1")
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    done = clone.make("test-matrix", *words, f"RESULTS_DIR={calm}")
    assert done.returncode == 0, done.stdout + done.stderr
    undisturbed = {run.parent.name: numbers_of(run.parent) for run in only(matrices(calm)).glob("*/result.json")}
    assert len(undisturbed) == 6

    dice = random.Random(20261120)
    victims = [*dice.sample(VICTIMS, len(VICTIMS)), *dice.choices(VICTIMS, k=KILLS)][:KILLS]  # each kind at least once
    runner = background("test-matrix", *words, f"RESULTS_DIR={rough}")
    matrix = only(wait_for(lambda: matrices(rough)))
    killed: list[str] = []
    while len(killed) < KILLS:
        trains = wait_for_a_run(matrix, runner, None)
        if trains is None:
            assert any(load(path)["status"] != "finished" for path in matrix.glob("*/status.json")), "too few kills"
            runner = background("continue", f"TARGET={matrix}", "RETRY_FAILED=1")
            continue
        time.sleep(dice.uniform(0.0, 0.5))
        victim = victims[len(killed)]
        if found := processes_of(matrix)[victim]:
            dice.choice(found).kill()
            killed.append(victim)
        if victim == "runner":
            runner.wait()
        if found and victim != "recorder":
            wait_for_a_run(matrix, runner, trains)
    print(f"killed: {', '.join(killed)}")
    assert len(killed) == KILLS
    if runner.poll() is None:
        runner.wait(600)

    done = clone.make("continue", f"TARGET={matrix}", "RETRY_FAILED=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any(processes_of(matrix).values())
    assert {run.parent.name: numbers_of(run.parent) for run in matrix.glob("*/result.json")} == undisturbed
    attempts = [len(load(path)["attempts"]) for path in matrix.glob("*/status.json")]
    assert sum(attempts) > 6
    finished = {path: path.read_bytes() for path in matrix.glob("*/result.json")}
    assert "nothing to run" in clone.make("continue", f"TARGET={matrix}").stdout
    assert {path: path.read_bytes() for path in matrix.glob("*/result.json")} == finished


# Must 2: each kind of end, reported rightly everywhere


def test_a_failing_an_out_of_memory_and_a_skipped_run_are_reported_rightly(clone, tmp_path):
    """In `make status`, as JSON, in the summary and by the exit status; the run without memory recovers by itself."""
    configure(clone)
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(FAULTS, encoding="utf-8")
    words = (*TINY[1:], "OPTIMIZER=adamw", "NUM_GPUS=1", "MAX_ITERS=6", "GPU_MONITOR=n")
    axes = ("SEED=1,2,3", "DEVICE=cpu,cuda", "DDP_BACKEND=gloo", f"RESULTS_DIR={tmp_path}")
    done = clone.kmatrix("test-matrix", *words, *axes, PYTHONPATH=str(faults), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    matrix = only(matrices(tmp_path))
    view = json.loads(clone.kmatrix("status", f"TARGET={matrix}", "JSON=1").stdout)
    by_seed = {load(matrix / run["name"] / "run.json")["train"]["seed"]: run for run in view["runs"] if run["attempt"]}
    assert view["counts"] == {"finished": 2, "failed": 1, "skipped": 3}
    assert view["status"] == "failed"
    assert (by_seed[1]["status"], by_seed[1]["step"], by_seed[1]["attempt"]) == ("finished", 6, 1)
    assert (by_seed[2]["status"], by_seed[2]["kind"]) == ("failed", "error")
    assert "the cable was pulled" in by_seed[2]["reason"]
    assert (by_seed[3]["status"], by_seed[3]["attempt"], by_seed[3]["micro_batch"]) == ("finished", 2, 1)
    first, second = load(matrix / by_seed[3]["name"] / "status.json")["attempts"]
    assert (first["kind"], first["status"], second["micro_batch"]) == ("oom", "failed", 1)
    used = load(matrix / by_seed[3]["name"] / "run_used.json")
    assert (used["train"]["batch_size"], used["train"]["gradient_accumulation"], used["train"]["global_batch"]) == (
        *(1, 4),
        4,
    )
    shown = clone.make("status", f"TARGET={matrix}").stdout
    summary = (matrix / "summary_report.txt").read_text()
    for text in (shown, summary):
        assert "the cable was pulled" in text
        assert "needs 1 GPU" in text
        assert "micro-batch 1" in text
    assert "\x1b" not in shown
    assert done.stdout.count("again with a micro-batch of 1") == 1


# Must 6: results that are replaced, and results that are reused


def test_a_rerun_replaces_keeps_the_old_aside_and_a_finished_run_is_not_trained_twice(clone, tmp_path):
    configure(clone)
    again = (*TINY[:-1], "NUM_GPUS=1", "MAX_ITERS=6", f"RESULTS_DIR={tmp_path}")
    done = clone.make("test-matrix", *again, "OPTIMIZER=adamw,sgd")
    assert done.returncode == 0, done.stdout + done.stderr
    first = only(matrices(tmp_path))
    names = sorted(path.parent.name for path in first.glob("*/result.json"))
    old = {name: load(first / name / "result.json") for name in names}

    done = clone.make("test-rerun", f"TARGET={first}", "OPTIMIZER=sgd")
    assert done.returncode == 0, done.stdout + done.stderr
    sgd = only(name for name in names if "sgd" in name)
    kept, new = load(first / sgd / "former" / "1" / "result.json"), load(first / sgd / "result.json")
    assert kept == old[sgd]
    assert (new["attempt"], new["final_val_loss"], new["ended"] > kept["ended"]) == (2, kept["final_val_loss"], True)
    assert all(load(first / name / "result.json") == old[name] for name in names if name != sgd)
    told = {run["name"]: run for run in load(first / "results.json")["runs"]}
    assert set(told) == set(names)
    assert told[sgd]["ended"] == new["ended"]
    assert clone.kmatrix("test-rerun", f"RESULTS_DIR={tmp_path}").returncode == 2

    done = clone.make("test-matrix", *again, "OPTIMIZER=adamw,muon")
    assert done.returncode == 0, done.stdout + done.stderr
    second = matrices(tmp_path)[-1]
    adamw = only(path for path in second.glob("*adamw*"))
    source = f"{first.name}/{only(name for name in names if 'adamw' in name)}"
    assert f"taken over from {source}" in done.stdout
    assert load(adamw / "status.json")["reused_from"] == load(adamw / "run.json")["reused_from"] == source
    assert f"from {source}" in (second / "summary_report.txt").read_text()
    assert only(run["reused_from"] for run in load(second / "results.json")["runs"] if "adamw" in run["name"]) == source
    assert len(lines_of(second / "journal.jsonl")) == len([1, 2, 3, 4])  # one run was started: muon


# Must 7: other terminals, and none


def test_a_detached_matrix_is_watched_hung_up_on_stopped_from_elsewhere_and_continued(clone, background, tmp_path):
    configure(clone)
    words = (*TINY, "OPTIMIZER=adamw", "NUM_GPUS=2", "SEED=1,2", "MAX_ITERS=100000", "CHECKPOINT_INTERVAL=50")
    done = clone.make("test-matrix", *words, f"RESULTS_DIR={tmp_path}", "DETACH=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "make stop TARGET=" in done.stdout
    matrix = only(matrices(tmp_path))
    wait_for(lambda: newest_attempt(matrix))
    runner = only(processes_of(matrix)["runner"])
    runner.send_signal(signal.SIGHUP)
    follower = background("logs", f"TARGET={matrix}")
    shown = clone.make("status", f"RESULTS_DIR={tmp_path}").stdout
    assert "1 planned, 1 running" in shown
    assert runner.is_running()
    assert clone.kmatrix("continue", f"TARGET={matrix}").returncode == 2

    stopped = clone.make("stop", f"RESULTS_DIR={tmp_path}")
    assert stopped.returncode == 0, stopped.stderr
    assert "waiting for" in stopped.stdout
    assert not any(processes_of(matrix)[kind] for kind in ("trainer", "rank", "recorder", "guard"))
    statuses = sorted(load(path)["status"] for path in matrix.glob("*/status.json"))
    assert statuses == ["planned", "stopped"]
    run = only(path.parent for path in matrix.glob("*/status.json") if load(path)["status"] == "stopped")
    assert list((run / "checkpoints").glob("*.pt"))
    assert follower.wait(60) == 0
    log = (tmp_path / "output_0.txt").read_text()
    assert log.startswith(f"==> {run.name}")
    assert "Iter 0 | " in log
    assert "\x1b" not in (matrix / "runner.log").read_text()
    assert "terminal lost" in [line["event"] for line in lines_of(matrix / "journal.jsonl")]

    (clone.root / ".config").write_text("CONFIG_GPT2_MAX_ITERS=7\n")  # changes nothing of it
    at = load(run / "result.json")["step"]
    second = background("continue", f"TARGET={matrix}", f"RUN={run.name}")
    assert wait_for(lambda: newest_attempt(matrix)) == (run.name, 2)
    assert clone.make("stop", f"TARGET={matrix}").returncode == 0
    assert second.wait(60) == 130
    assert load(run / "run_used.json")["train"]["max_iters"] == 100000
    result = load(run / "result.json")
    assert (result["attempt"], result["status"], result["step"] > at) == (2, "stopped", True)
    begun = [line["step"] for line in lines_of(run / "metrics.jsonl") if line["attempt"] == 2 and "train/loss" in line]
    assert begun[0] == at
    assert sorted(load(path)["status"] for path in matrix.glob("*/status.json")) == ["planned", "stopped"]
