"""Shard optimizer states over the ranks of a run: the same numbers, half of the states, any number of ranks later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from slow_training import SlowTraining
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

OPTIMIZERS = ("adamw", "muon")
STEPS, HALF = 12, 6
ARGUMENTS = (
    *("DEVICE=cpu", "NUM_GPUS=2", "MODEL=tiny", "BLOCK_SIZE=64", "BATCH_SIZE=2", "GLOBAL_BATCH=8", "CPU_THREADS=1"),
    *(f"MAX_ITERS={STEPS}", f"CHECKPOINT_INTERVAL={HALF}", "LOG_INTERVAL=1", "EVAL_SAMPLES=8", "GPU_MONITOR=n"),
    *("OPTIMIZER=" + ",".join(OPTIMIZERS), "ZERO_STAGE=0,1"),
)
COMPARE = """
import sys, torch
sys.path.insert(0, {root!r})

def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b

one, two = (torch.load(path, weights_only=True) for path in sys.argv[1:])
print(*(part for part in ("model", "optimizer") if not equal(one[part], two[part])))
"""


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def losses(run: Path) -> list[float]:
    return load(run / "training_metrics.json")["train_losses"]


def differing_parts(clone, one: Path, two: Path) -> list[str]:
    """Return which of weights and optimizer states differ in a bit at the end of two runs, using torch only."""
    ends = [str(run / "checkpoints" / "final.pt") for run in (one, two)]
    completed = clone.run(clone.python, "-c", COMPARE.format(root=str(clone.root)), *ends)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.split()


def copied(run: Path, name: str, ranks: int = 2) -> Path:
    """Return a copy of a planned run without its results, for another number of ranks."""
    folder = run.with_name(name)
    folder.mkdir()
    value = load(run / "run.json")
    accumulation = 8 // (2 * ranks)
    value["train"] |= {"num_gpus": ranks, "batch_size": 2, "gradient_accumulation": accumulation}
    (folder / "run.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def start(clone, run: Path, *arguments: str, ranks: int = 2, **variables: str) -> subprocess.Popen[bytes]:
    """Start torchrun on a run, as the local engine does."""
    path = os.pathsep.join([*filter(None, [variables.get("PYTHONPATH")]), str(clone.root), str(clone.root / "lib")])
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "gpt2.train")
    return subprocess.Popen(
        [clone.python, *torchrun, str(run), *arguments],
        cwd=clone.root,
        env=clone.environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        stdout=(run / "output.log").open("ab"),
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[bytes], run: Path) -> None:
    assert process.wait(timeout=600) == 0, (run / "output.log").read_text()[-3000:]


@pytest.fixture(scope="module")
def matrix(session_clone, tmp_path_factory) -> dict[tuple[str, int], Path]:
    """Return the finished runs of two ranks by optimizer and ZERO_STAGE."""
    clone, results = session_clone, tmp_path_factory.mktemp("results")
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    completed = clone.make("test-matrix", *ARGUMENTS, f"RESULTS_DIR={results}")
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    runs = [path.parent for path in results.glob("test_matrix_results_*/*/run.json")]
    fields = [load(run / "run.json")["train"] for run in runs]
    return {(train["optimizer"], train["zero_stage"]): run for train, run in zip(fields, runs, strict=True)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_with_sharded_states_give_the_same_bits_and_hold_half_of_the_states(clone, matrix, optimizer):
    plain, sharded = (matrix[optimizer, stage] for stage in (0, 1))
    assert losses(sharded) == losses(plain)
    assert len(losses(plain)) == STEPS
    assert differing_parts(clone, plain, sharded) == []
    whole, parts = (load(run / "result.json")["optimizer_state_mib"] for run in (plain, sharded))
    assert whole[0] == whole[1] > 1
    assert all(0.49 <= part / whole[0] <= 0.51 for part in parts), (whole, parts)
    assert "Optimizer states: sharded over 2 ranks" in (sharded / "output.log").read_text()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_with_sharded_states_that_is_killed_continues_bit_for_bit(clone, matrix, tmp_path, optimizer):
    run = copied(matrix[optimizer, 1], f"killed-{optimizer}")
    slow = SlowTraining(tmp_path / "slow", f"inf if step > {HALF + 1} else 0")
    process = start(clone, run, "--attempt=1", **slow.environment)

    def is_saved():
        """the checkpoint of the middle is complete"""
        index = run / "checkpoints" / "index.json"
        return index.exists() and any(entry["step"] == HALF for entry in load(index)["checkpoints"])

    try:
        wait_until(lambda: is_saved() and (run / f"checkpoints/step_{HALF:08d}.pt").exists(), "a checkpoint", 600)
    finally:  # torchrun last: a rank that sees its end would save a checkpoint
        process.send_signal(signal.SIGSTOP)
        ranks = psutil.Process(process.pid).children(recursive=True)
        for rank in ranks:
            rank.kill()
        process.kill()
        process.wait()
        psutil.wait_procs(ranks)
    assert not (run / "result.json").exists()
    finish(start(clone, run, "--attempt=2", "--resume=latest"), run)
    assert load(run / "result.json")["attempt"] == 2
    assert losses(run) == losses(matrix[optimizer, 1])
    assert differing_parts(clone, run, matrix[optimizer, 1]) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_another_number_of_ranks_continues_as_exactly_as_with_unsharded_states(clone, matrix, optimizer, ranks):
    """The checkpoint is of two ranks. DDP itself adds the gradients of more ranks in another order."""
    straight = matrix[optimizer, 1]
    middle = straight / "checkpoints" / f"step_{HALF:08d}.pt"
    runs = []
    for stage in (0, 1):
        run = copied(matrix[optimizer, stage], f"from-half-{optimizer}-{stage}-on-{ranks}", ranks)
        finish(start(clone, run, "--attempt=1", f"--resume={middle}", ranks=ranks), run)
        runs.append(run)
    assert losses(runs[1]) == losses(runs[0])
    assert differing_parts(clone, *runs) == []
    assert losses(runs[0]) == pytest.approx(losses(straight), abs=1e-4)
    shutil.rmtree(runs[0])
    states = load(runs[1] / "result.json")["optimizer_state_mib"]
    whole = load(matrix[optimizer, 0] / "result.json")["optimizer_state_mib"][0]
    assert all(part == pytest.approx(whole / ranks, rel=0.06) for part in states)
    assert len(states) == ranks


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("OPTIMIZER=adamwprune",), "adamwprune ranks all weights by their optimizer states"),
        (("OPTIMIZER=schedulefree", "SCHEDULE=constant"), "schedulefree is evaluated at an average of its weights"),
    ],
)
def test_an_optimizer_whose_states_cannot_be_sharded_is_refused_with_the_reason(clone, arguments, reason):
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    refused = clone.make("test-matrix-dry-run", "NUM_GPUS=2", "ZERO_STAGE=1", *arguments)
    assert refused.returncode == 2
    assert reason in " ".join((refused.stdout + refused.stderr).split())
    assert "Traceback" not in refused.stdout + refused.stderr


def test_the_plan_and_the_dry_run_count_the_states_of_one_rank(clone):
    """86,039,808 parameters: weights and gradients of 328 MiB each, and twice as much for AdamW's states.

    Biases and gains are on both ranks.
    """
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    texts = []
    for command in ("plan", "test-matrix-dry-run"):
        for stage in (0, 1):
            arguments = ("NUM_GPUS=2", "MODEL=124M", "OPTIMIZER=adamw", f"ZERO_STAGE={stage}", "ALLOW_RISK=y")
            completed = clone.make(command, *arguments)
            assert completed.returncode == 0, completed.stdout + completed.stderr
            texts.append(completed.stdout)
    assert "optimizer 656 MiB, activations" in texts[0]
    assert "optimizer 329 MiB, exchange of weights 64.0 MiB, activations" in texts[1]
    assert "memory over 1.3 GiB" in texts[2]
    assert "memory over 985 MiB" in texts[3]
