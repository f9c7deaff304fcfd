"""Use the configuration targets in a fresh clone, with the real make and its own .venv."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

FLAGSHIP = "defconfig-gpt2-finewebedu-a10gx4"
INTENDED = {
    "GPT2_NUM_GPUS": "4",
    "GPT2_MODEL_124M": "y",
    "GPT2_DATASET_FINEWEBEDU": "y",
    "GPT2_BATCH_SIZE": "12",
    "GPT2_GRADIENT_ACCUMULATION": "8",
    "GPT2_BLOCK_SIZE": "1024",
    "GPT2_MAX_ITERS": "50000",
    "GPT2_LEARNING_RATE": '"6e-4"',
    "GPT2_MIN_LR": '"6e-5"',
    "GPT2_WARMUP_STEPS": "2000",
    "GPT2_EVAL_INTERVAL": "500",
    "GPT2_EVAL_SAMPLES": "200",
    "GPT2_DTYPE_BF16": "y",
    "GPT2_CHECKPOINT_INTERVAL": "1000",
    "GPT2_DDP_BACKEND": '"nccl"',
    "GPT2_USE_DDP": "y",
}
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "-1"}


def runs(completed):
    assert completed.returncode == 0, completed.stderr
    return [line for line in completed.stdout.splitlines() if line.startswith("run ")]


def test_the_flagship_applies_every_intended_value(clone):
    completed = clone.make(FLAGSHIP)
    lines = clone.config.read_text(encoding="utf-8").splitlines()

    assert completed.returncode == 0, completed.stderr
    assert [name for name, text in INTENDED.items() if f"CONFIG_{name}={text}" not in lines] == []


def test_the_flagship_lists_its_runs_and_refuses_to_start_without_gpus(clone):
    before = set(clone.root.glob("test_matrix_results_*"))  # other tests use this clone, too
    clone.make(FLAGSHIP)

    listed = runs(clone.make("test-matrix-dry-run", **NO_GPUS))
    refused = clone.kmatrix("test-matrix", **NO_GPUS)

    assert [line.split()[2] for line in listed] == ["gpt2_adamw_4gpu", "gpt2_muon_4gpu"]
    assert all("global batch 384 sequences" in line for line in listed)
    assert refused.returncode == 2
    assert "no run of this matrix can run on this machine: the smallest needs 4 GPUs" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert set(clone.root.glob("test_matrix_results_*")) == before


@pytest.mark.parametrize("defconfig", [FLAGSHIP, "defconfig-gpt2-cpu-quick"])
def test_overrides_give_exactly_two_runs_and_leave_the_configuration_alone(clone, defconfig):
    clone.make(defconfig)
    before = clone.config.read_bytes()

    listed = runs(clone.make("test-matrix-dry-run", "MAX_ITERS=20", "OPTIMIZER=sgd,adamw", "NUM_GPUS=1"))
    refused = clone.make("test-matrix", "MAX_ITER=20")

    assert [re.search(r"optimizer=(\w+)", line)[1] for line in listed] == ["sgd", "adamw"]
    assert refused.returncode == 2
    assert "did you mean MAX_ITERS" in refused.stderr
    assert clone.config.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("CONFIG_GPT2_BACH_SIZE=4", "unknown symbol GPT2_BACH_SIZE"),
        ("CONFIG_GPT2_BATCH_SIZE=0", "out of range: [1, 65536]"),
        ("CONFIG_GPT2_BATCH_SIZE = 4", "cannot read"),
        ("CONFIG_GPT2_MUON_NS_STEPS=3", "depends on GPT2_OPTIMIZER_MUON"),
        ('CONFIG_GPT2_LEARNING_RATE="nan"', "expected a number in"),
    ],
)
@pytest.mark.parametrize("target", ["olddefconfig", "test-matrix-dry-run", "test-matrix", "train"])
def test_an_invalid_configuration_stops_every_target(clone, line, message, target):
    clone.config.write_text(f"{line}\n", encoding="utf-8")

    completed = clone.kmatrix(target)

    assert completed.returncode == 2
    assert message in completed.stderr
    assert ".config:1" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert clone.config.read_text(encoding="utf-8") == f"{line}\n"


def test_the_environment_is_never_an_override(clone):
    clone.make("defconfig-gpt2-cpu-quick")

    plain = clone.make("test-matrix-dry-run")
    same = clone.make("test-matrix-dry-run", MAX_ITERS="5", OPTIMIZER="sgd")

    assert runs(same) == runs(plain)


def test_configuration_targets_chain_and_round_trip(clone, tmp_path):
    saved = tmp_path / "saved"

    assert clone.make("gpt2-cpu-quick_defconfig", "olddefconfig").returncode == 0
    text = clone.config.read_text(encoding="utf-8")
    assert clone.make("savedefconfig", f"DEFCONFIG={saved}").returncode == 0
    assert clone.make("defconfig").returncode == 0
    assert clone.make("defconfig", f"DEFCONFIG={saved}").returncode == 0

    assert clone.config.read_text(encoding="utf-8").partition("\n#\n")[2] == text.partition("\n#\n")[2]
    assert "GPT2_MAX_ITERS" in clone.make("diffconfig").stdout


def test_menuconfig_without_a_terminal_is_refused(clone):
    completed = clone.make("menuconfig")

    assert completed.returncode == 2
    assert "menuconfig needs a terminal" in completed.stderr


def test_make_alone_prints_help_and_needs_nothing(bare_clone):
    completed = bare_clone.make()

    assert completed.stdout.startswith("usage: make TARGET")
    assert not (bare_clone.root / ".venv").exists()
