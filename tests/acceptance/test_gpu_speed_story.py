"""The means of speed on GPUs as a user meets them without one: configured, planned, trained on the CPU, refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from skips import require_program
from story import only

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

STEPS = 6
RUN = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=64", "BATCH_SIZE=2", "GLOBAL_BATCH=8", "CPU_THREADS=1", "SEED=1"),
    "OPTIMIZER=adamw",
    *(
        f"MAX_ITERS={STEPS}",
        "LOG_INTERVAL=1",
        "EVAL_INTERVAL=3",
        "EVAL_SAMPLES=5",
        "GPU_MONITOR=n",
        "SAVE_CHECKPOINT=n",
    ),
)


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _configured(clone):
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0


@pytest.fixture
def runs(clone):
    """Return a function that trains a matrix and returns its runs by the fields of "train" that are named."""

    def train(name: str, *arguments: str, by: tuple[str, ...], ranks: int = 1) -> dict[tuple, Path]:
        where = (f"RESULTS_DIR=results-{name}", f"NUM_GPUS={ranks}")
        completed = clone.make("test-matrix", *where, *RUN, *arguments)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        matrix = only((clone.root / f"results-{name}").glob("test_matrix_results_*"))
        found = [path.parent for path in matrix.glob("*/result.json")]
        return {tuple(load(run / "run.json")["train"][field] for field in by): run for run in found}

    return train


def losses(run: Path) -> list[float]:
    return load(run / "training_metrics.json")["train_losses"]


def test_bfloat16_streams_and_fp8_are_axes_and_train_nearly_the_same(runs):
    trained = runs("precision", "DTYPE=bf16", "BF16_STREAM=y,n", "FP8=y,n", by=("bf16_stream", "fp8"))
    assert len(trained) == 4
    reference = losses(trained[False, False])
    for key, run in trained.items():
        assert load(run / "result.json")["status"] == "finished"
        assert losses(run) == pytest.approx(reference, abs=0.02), key
        assert (losses(run) == reference) == (key == (False, False)), key
        assert load(run / "run_used.json")["attention"].keys() == {"causal"}


def test_a_compiled_run_with_all_means_has_the_losses_of_a_plain_one(runs):
    require_program("g++")
    plain = only(runs("plain", by=("compile",)).values())
    means = ("COMPILE=y", "LOSS_CHUNK=128", "RECOMPUTE=y", "RECOMPUTE_SCOPE=elementwise", "DETERMINISTIC=y")
    trained = runs("compiled", *means, "COMPILE_MODE=default,reduce-overhead", by=("compile_mode",))
    assert set(trained) == {("default",), ("reduce_overhead",)}
    for run in trained.values():
        assert losses(run) == pytest.approx(losses(plain), abs=1e-4)
        final = [load(each / "result.json")["final_val_loss"] for each in (run, plain)]
        assert final[0] == pytest.approx(final[1], abs=1e-4)


def test_two_ranks_average_in_float32_and_in_bfloat16(runs):
    require_program("g++")
    trained = runs("ranks", "COMPILE=y", "DDP_BF16_GRADIENTS=y,n", by=("ddp_bf16_gradients",), ranks=2)
    assert losses(trained[True,]) == pytest.approx(losses(trained[False,]), abs=5e-3)
    assert losses(trained[True,]) != losses(trained[False,])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("DTYPE=fp32", "FP8=y"), "FP8"),
        (("DTYPE=fp32", "BF16_STREAM=y"), "BF16_STREAM"),
        (("RECOMPUTE_SCOPE=elementwise",), "RECOMPUTE"),
        (("COMPILE_MODE=max-autotune",), "COMPILE"),
        (("ATTENTION_KERNEL=flash5",), "flash5"),
        (("LOSS_CHUNK=-2",), "LOSS_CHUNK"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(clone, arguments, reason):
    refused = clone.make("test-matrix-dry-run", *RUN, *arguments)
    said = refused.stdout + refused.stderr
    assert refused.returncode == 2, said
    assert reason in said
    assert "hint:" in said or "why:" in said
    assert "Traceback" not in said


def test_the_plan_of_a_compiled_run_is_near_the_traced_peaks(clone):
    """tests/fixtures/gpu_memory.json: 15.0 and 13.9 GiB for 124M at a micro-batch of 32 on an H100."""
    gpu = ("GPU=H100", "DEVICE=cuda", "NUM_GPUS=1", "MODEL=124M", "TOKENIZER=gpt2", "DTYPE=bf16", "BATCH_SIZE=32")
    run = (*gpu, "BLOCK_SIZE=1024", "GLOBAL_BATCH=0", "MAX_ITERS=10", "DATASET=finewebedu")
    for arguments, traced in ((("COMPILE=y",), 15.02), (("COMPILE=y", "BF16_STREAM=y"), 13.86)):
        completed = clone.make("plan", *run, *arguments)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        peak = float(re.search(r"peak ([\d.]+) GiB", completed.stdout)[1])
        assert peak == pytest.approx(traced, rel=0.10)
