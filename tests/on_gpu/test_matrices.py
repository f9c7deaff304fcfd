"""Matrices through the runner: runs of one GPU are packed, and one that is out of memory finishes in smaller parts."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import pytest

from factories import make_data
from kmatrix.plan.feasibility import OVERHEAD
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.paths import MatrixDir
from on_gpu_matrices import Runner, attempts
from on_gpu_runs import ended, losses

pytestmark = pytest.mark.gpu
COMMON = (
    *("DEVICE=cuda", "NUM_GPUS=1", "OPTIMIZER=adamw", "DATASET=shards", "TOKENIZER=byte", "GPU_MONITOR=n"),
    *("WARMUP_STEPS=1", "CPU_THREADS=1", "REUSE=n"),
    "GPU_BUSY_MEMORY=0",  # the process of the tests may have memory on the first GPU
)
SMALL = (
    *("MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=64", "BLOCK_SIZE=64", "BATCH_SIZE=4", "PARALLEL_BATCH_SIZE=4"),
    *("MAX_ITERS=6", "EVAL_INTERVAL=6", "LOG_INTERVAL=1", "DETERMINISTIC=y"),
)
# The micro-batch that does not fit. On the CPU, attention without a fused kernel plans much memory for little work.
LARGE = {
    "cuda": ("MODEL=124m", "BLOCK_SIZE=1024", "DTYPE=bf16"),
    "cpu": (
        *("MODEL=custom", "N_LAYER=1", "N_HEAD=16", "N_EMBD=32", "BLOCK_SIZE=256", "DROPOUT=0.1"),
        "FLASH_ATTENTION=n",
    ),
}
BLOCK = {"cuda": 1024, "cpu": 256}
BEYOND = 1.5  # times the memory of the GPU: the plan refuses a run from 1.15 times
# The advised micro-batch as a share of the largest: with more, an error of the plan could be out of memory again.
ADVISED = (0.5, 0.85)


@pytest.fixture(scope="module")
def runner(device, tmp_path_factory):
    return Runner(device, tmp_path_factory.mktemp("runner"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the folder of the tokens that the runs of a small model read."""
    folder = tmp_path_factory.mktemp("matrices") / "data"
    make_data(folder)
    return folder


def trained(runner, data, number, *arguments):
    """Train a matrix of runs that differ in the samples of their evaluations alone; return it and its attempts."""
    samples = ",".join(str(2 + at) for at in range(number))
    printed = runner.check("test-matrix", *COMMON, *SMALL, f"DATA_PATH={data}", f"EVAL_SAMPLES={samples}", *arguments)
    matrix = runner.matrix(printed)
    return MatrixDir(matrix), attempts(matrix)


@pytest.fixture(scope="module")
def alone(runner, data):
    """Return the attempts of two runs of which the runner may use the last GPU only."""
    _, found = trained(runner, data, 2, f"GPUS={runner.gpus[-1]}")
    return found


def test_on_one_gpu_one_run_follows_the_other(runner, alone):
    first, second = alone
    assert first.given == first.used == second.given == second.used == (runner.gpus[-1],)
    assert first.ended <= second.started
    assert losses(first.run) == losses(second.run)


def test_runs_of_one_gpu_share_the_machine_and_never_a_gpu(runner, data, alone):
    """One more run than GPUs, so that one of them gets its second run."""
    gpus = runner.gpus
    matrix, found = trained(runner, data, len(gpus) + 1)
    assert [ended(attempt.run)[0] for attempt in found] == ["finished"] * len(found)
    assert all(len(attempt.given) == 1 for attempt in found)
    assert [attempt.used for attempt in found] == [attempt.given for attempt in found]
    begun = [line["event"] for line in read_jsonl(matrix.journal) if line["event"].startswith("run ")]
    assert begun[: len(gpus) + 1] == ["run started"] * len(gpus) + ["run ended"]
    assert {attempt.given[0] for attempt in found[: len(gpus)]} == set(gpus)
    for gpu in gpus:
        spans = [(attempt.started, attempt.ended) for attempt in found if attempt.given == (gpu,)]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    expected = losses(alone[0].run)
    assert len(expected) == 6
    assert [losses(attempt.run) for attempt in found] == [expected] * len(found)


def too_many(largest, least):
    """Return the smallest micro-batch from `least` on with a divisor well within the largest that fits."""
    low, high = (share * largest for share in ADVISED)
    return next(batch for batch in itertools.count(least) if low <= _divisor(batch, largest) <= high)


def _divisor(batch, largest):
    return next(size for size in range(largest, 0, -1) if batch % size == 0)


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A run whose micro-batch does not fit on the GPU."""

    settings: tuple[str, ...]
    batch: int  # sequences


@pytest.fixture(scope="module")
def too_large(runner, device, tmp_path_factory):
    data = tmp_path_factory.mktemp("large") / "data"
    settings = (*COMMON, *LARGE[device.kind], "MAX_ITERS=2", "EVAL_INTERVAL=2", "EVAL_SAMPLES=2", "LOG_INTERVAL=1")
    settings += (f"DATA_PATH={data}",)
    make_data(data)
    planned = runner.check("plan", *settings, "BATCH_SIZE=1", "PARALLEL_BATCH_SIZE=1")
    largest = int(re.search(r" of [\d.]+ [GM]iB +(?:fits|tight|does not fit) +(\d+) ", planned)[1])
    batch = too_many(largest, math.ceil(BEYOND * largest * runner.memory / (runner.memory - OVERHEAD)))
    make_data(data, train=3 * batch * BLOCK[device.kind])
    return TooLarge((*settings, f"BATCH_SIZE={batch}", f"PARALLEL_BATCH_SIZE={batch}"), batch)


def out_of_memory(batch):
    """Return the expression for the reason of a run out of memory."""
    return rf"out of memory with micro-batches of {batch}: .*Tried to allocate [\d.]+ [GM]iB"


def finished_with(run, micro_batch, batch):
    """Return whether a run has finished with a micro-batch and its global batch."""
    used = read_json(run.run_used)["train"]
    found = (used["batch_size"], used["gradient_accumulation"], used["global_batch"])
    return ended(run) == ("finished", None, "max_iters") and found == (micro_batch, batch // micro_batch, batch)


def test_a_run_out_of_memory_is_refused_with_advice_and_finishes_with_the_advised_micro_batch(runner, too_large):
    settings, batch = too_large.settings, too_large.batch
    refused = runner("test-matrix", *settings)
    assert refused.returncode == 2, refused.stdout
    assert re.search(r"needs [\d.]+ GiB, .+ has [\d.]+ GiB", refused.stderr), refused.stderr
    advice = re.search(r"pass BATCH_SIZE=(\d+) PARALLEL_BATCH_SIZE=(\d+)", refused.stderr)
    assert advice, refused.stderr
    fits = int(advice[1])
    assert (batch % fits, int(advice[2])) == (0, batch)
    advised = [f"BATCH_SIZE={fits}" if word.startswith("BATCH_SIZE=") else word for word in settings]
    (run,) = MatrixDir(runner.matrix(runner.check("test-matrix", *advised))).runs()
    assert finished_with(run, fits, batch)


def test_by_default_the_runner_itself_retries_with_at_most_half_the_micro_batch(runner, too_large):
    printed = runner.check("test-matrix", *too_large.settings, "ALLOW_RISK=y", STAND_IN_OOM="1")
    retry = re.search(out_of_memory(too_large.batch) + r".*; retrying with micro-batch (\d+)", printed)
    assert retry, printed
    (run,) = MatrixDir(runner.matrix(printed)).runs()
    _, *retries = read_json(run.status)["attempts"]
    assert retries[0]["micro_batch"] == int(retry[1]) <= too_large.batch // 2
    assert finished_with(run, retries[-1]["micro_batch"], too_large.batch)
