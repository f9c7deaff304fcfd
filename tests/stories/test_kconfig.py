"""Configure through make in a fresh clone: defconfigs, targets in a chain, overrides, mistakes."""

from __future__ import annotations

import re

import pytest

from story import matrices

pytestmark = pytest.mark.story

FLAGSHIP = "defconfig-gpt2-finewebedu-a10gx4"
INTENDED = {
    **{"GPT2_NUM_GPUS": "4", "GPT2_MODEL_124M": "y", "GPT2_DATASET_FINEWEBEDU": "y", "GPT2_BATCH_SIZE": "12"},
    **{"GPT2_GRADIENT_ACCUMULATION": "8", "GPT2_BLOCK_SIZE": "1024", "GPT2_MAX_ITERS": "50000"},
    **{"GPT2_LEARNING_RATE": '"6e-4"', "GPT2_MIN_LR": '"6e-5"', "GPT2_WARMUP_STEPS": "2000"},
    **{"GPT2_EVAL_INTERVAL": "500", "GPT2_DTYPE_BF16": "y", "GPT2_CHECKPOINT_INTERVAL": "1000"},
}


def runs(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("run ")]


def test_the_flagship_is_configured_overridden_and_refused_without_gpus(clone):
    clone.check(FLAGSHIP)
    lines = clone.config.read_text(encoding="utf-8").splitlines()
    assert [name for name, text in INTENDED.items() if f"CONFIG_{name}={text}" not in lines] == []
    before = clone.config.read_bytes()

    no_gpus = {"CUDA_VISIBLE_DEVICES": "-1", "MAX_ITERS": "5"}  # the environment is never an override
    listed = runs(clone.check("test-matrix-dry-run", **no_gpus))
    assert [line.split()[2] for line in listed] == ["gpt2_adamw_4gpu", "gpt2_muon_4gpu"]
    assert all("global batch 384 sequences" in line for line in listed)
    assert listed == runs(clone.check("test-matrix-dry-run"))
    assert "the smallest needs 4 GPUs" in clone.refused("test-matrix", **no_gpus)

    listed = runs(clone.check("test-matrix-dry-run", "MAX_ITERS=20", "OPTIMIZER=sgd,adamw", "NUM_GPUS=1"))
    assert [re.search(r"optimizer=(\w+)", line)[1] for line in listed] == ["sgd", "adamw"]
    assert "did you mean MAX_ITERS" in clone.refused("test-matrix", "MAX_ITER=20")
    assert "menuconfig needs a terminal" in clone.refused("menuconfig")
    assert clone.config.read_bytes() == before
    assert matrices(clone.root) == []


def test_targets_chain_and_round_trip_and_a_mistake_stops_them(clone, tmp_path):
    saved = tmp_path / "saved"
    clone.check("gpt2-cpu-quick_defconfig", "olddefconfig")
    text = clone.config.read_text(encoding="utf-8")
    clone.check("savedefconfig", f"DEFCONFIG={saved}")
    clone.check("defconfig")
    clone.check("defconfig", f"DEFCONFIG={saved}")
    assert clone.config.read_text(encoding="utf-8").partition("\n#\n")[2] == text.partition("\n#\n")[2]
    assert "GPT2_MAX_ITERS" in clone.check("diffconfig")

    mistake = "CONFIG_GPT2_BACH_SIZE=4\n"
    clone.config.write_text(mistake, encoding="utf-8")
    refused = clone.refused("olddefconfig", "test-matrix")
    assert "unknown symbol GPT2_BACH_SIZE" in refused
    assert ".config:1" in refused
    assert clone.config.read_text(encoding="utf-8") == mistake
    assert matrices(clone.root) == []
