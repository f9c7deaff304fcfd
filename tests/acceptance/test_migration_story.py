"""A defconfig of the original project becomes one of kmatrix, with the table that refuses it."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(600)]

# Names and values of gpt2/defconfigs/gpt2-finewebedu-a10gx4 of mcgrof/AdamWPrune at commit e3d79680.
FLAGSHIP = """
MODEL_MODE_SINGLE=y MODEL_SELECT_GPT2=y MODEL="gpt2" TEST_MODELS="gpt2" GPT2_MODEL_SIZE="124M" COMPILE_MODEL=y
TEST_MATRIX_MODE=y OPTIMIZER_MODE_MULTIPLE=y OPTIMIZER_ENABLE_ADAMWSPAM=y OPTIMIZER_ENABLE_ADAMWPRUNE=y
TEST_OPTIMIZER_ENABLED_ADAMWSPAM=y TEST_OPTIMIZER_ENABLED_ADAMWPRUNE=y OPTIMIZER_ENABLE_SGD=n
OPTIMIZER_ENABLE_ADAM=n OPTIMIZER_ENABLE_ADAMW=n OPTIMIZER_ENABLE_ADAMWADV=n ADAMWPRUNE_BASE_ADAMWSPAM=y
ADAMWPRUNE_ENABLE_PRUNING=y ADAMWPRUNE_TARGET_SPARSITY="0.5" ADAMWPRUNE_FREQUENCY=100 ADAMWPRUNE_WARMUP_STEPS=1000
ADAMWPRUNE_BETA1="0.9" ADAMWPRUNE_BETA2="0.95" ADAMWPRUNE_WEIGHT_DECAY="0.1" ADAMWPRUNE_AMSGRAD=n SPAM_ENABLE_CLIP=y
SPAM_SPIKE_THRESHOLD="2.0" SPAM_THETA="50.0" SPAM_WARMUP=y SPAM_WARMUP_STEPS=1000 SPAM_INTERVAL=1000
SPAM_PERIODIC_RESET=y PRUNING_MODE_MULTIPLE=y PRUNING_ENABLE_MAGNITUDE=y PRUNING_ENABLE_MOVEMENT=y
PRUNING_ENABLE_STATE=y PRUNING_ENABLE_NONE=n PRUNING_ENABLED_MAGNITUDE=y PRUNING_ENABLED_MOVEMENT=y
PRUNING_ENABLED_STATE=y TEST_PRUNING_MAGNITUDE=y TEST_PRUNING_MOVEMENT=y TEST_PRUNING_NONE=n
TEST_PRUNING_METHODS="magnitude,movement" TARGET_SPARSITY="0.5" SPARSITY_ENABLE_50=y SPARSITY_ENABLE_70=n
SPARSITY_ENABLE_90=n SPARSITY_ENABLE_95=n SPARSITY_ENABLE_99=n TEST_SPARSITY_50=y TEST_SPARSITY_70=n
TEST_SPARSITY_90=n GPT2_USE_DDP=y GPT2_DDP_NUM_GPUS=4 GPT2_DDP_BACKEND="nccl" GPT2_DDP_FIND_UNUSED_PARAMS=n
BATCH_SIZE=12 GPT2_GRADIENT_ACCUMULATION=8 NUM_EPOCHS=10 GPT2_MAX_ITERS=50000 GPT2_EVAL_INTERVAL=500
GPT2_EVAL_SAMPLES=200 GPT2_LOG_INTERVAL=10 LEARNING_RATE="6e-4" GPT2_MIN_LR="6e-5" GPT2_WARMUP_STEPS=2000
GPT2_DECAY_LR=y DATA_DIR="./gpt2/data" GPT2_DATASET_FINEWEBEDU=y GPT2_DATASET="finewebedu" GPT2_BLOCK_SIZE=1024
NUM_WORKERS=12 PIN_MEMORY=y PERSISTENT_WORKERS=y PREFETCH_FACTOR=4 MIXED_PRECISION=y GPT2_AMP_DTYPE="bfloat16"
GPT2_CUDNN_BENCHMARK=y GPT2_TF32_ALLOWED=y GPU_WARMUP=y PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
SAVE_CHECKPOINT=y CHECKPOINT_INTERVAL=1000 OUTPUT_DIR="./results/gpt2-adamwspam-vs-adamwprune-50"
GPT2_TRACKER="none"
"""
VALID_HERE = frozenset(
    re.findall(
        r"\w+",
        """
GPT2_USE_DDP GPT2_DDP_BACKEND GPT2_DDP_FIND_UNUSED_PARAMS GPT2_GRADIENT_ACCUMULATION GPT2_MAX_ITERS GPT2_EVAL_INTERVAL
GPT2_EVAL_SAMPLES GPT2_LOG_INTERVAL GPT2_MIN_LR GPT2_WARMUP_STEPS DATA_DIR GPT2_DATASET_FINEWEBEDU GPT2_BLOCK_SIZE
""",
    )
)
ROW = re.compile(r"  flagship:(\d+): CONFIG_(\w+)=(\S*) +(\S.*)")


def flagship(folder) -> list[str]:
    """Write the flagship as a file with comments between its lines, and return its lines."""
    lines = []
    for item in FLAGSHIP.split():
        lines += ["# as there", f"CONFIG_{item}"] if item.startswith("GPT2_USE_DDP") else [f"CONFIG_{item}"]
    (folder / "flagship").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def test_the_original_flagship_is_answered_with_a_row_for_every_symbol_that_is_refused(clone):
    """The exit status is 2, nothing is written, and each of the 73 lines has its equivalent or a reason."""
    lines = flagship(clone.root)
    completed = clone.make("defconfig", "DEFCONFIG=flagship")
    assert completed.returncode == 2
    assert not (clone.root / ".config").exists()
    assert "Traceback" not in completed.stdout + completed.stderr
    assert completed.stderr.count("error: ") == 1
    assert completed.stderr.startswith("error: flagship has 73 symbols of the original project (mcgrof/AdamWPrune):\n")

    rows = [ROW.fullmatch(line) for line in completed.stderr.splitlines() if line.startswith("  flagship:")]
    assert None not in rows
    expected = [
        (number, name, value.strip('"'))
        for number, line in enumerate(lines, 1)
        if line.startswith("CONFIG_")
        for name, _, value in [line.removeprefix("CONFIG_").partition("=")]
        if name not in VALID_HERE
    ]
    assert [(int(row[1]), row[2], row[3]) for row in rows] == expected
    assert len(expected) == 73
    assert all(re.match(r"CONFIG_\w+=|none: .{10}|nothing to set$", row[4]) for row in rows)
    assert (clone.root / "docs" / "migration.md").is_file()
    assert "docs/migration.md" in completed.stderr


def test_the_rows_make_the_matrix_of_the_original(clone):
    """The equivalents, each once, with the 13 lines that are valid here, plan its three configurations."""
    lines = flagship(clone.root)
    refused = clone.make("defconfig", "DEFCONFIG=flagship").stderr
    rows = [ROW.fullmatch(line) for line in refused.splitlines() if line.startswith("  flagship:")]
    theirs = [line for line in lines if line.removeprefix("CONFIG_").partition("=")[0] in VALID_HERE]
    ours = [line for row in rows if row[4].startswith("CONFIG_") for line in row[4].split(", ")]
    (clone.root / "ours").write_text("\n".join(dict.fromkeys([*theirs, *ours])) + "\n", encoding="utf-8")

    completed = clone.make("defconfig", "DEFCONFIG=ours")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    dry = clone.make("test-matrix-dry-run")
    assert dry.returncode == 0, dry.stdout + dry.stderr
    assert [line.split()[2] for line in dry.stdout.splitlines() if line.startswith("run ")] == [
        "gpt2_adamwspam_pruningmagnitude_4gpu",
        "gpt2_adamwspam_pruningmovement_4gpu",
        "gpt2_adamwprune_pruningstate_4gpu",
    ]
    assert "4 gpus, global batch 384 sequences" in dry.stdout
