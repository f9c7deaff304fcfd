"""Use `make plan` and `make doctor` before a run: memory, duration, feasibility and the state of the machine."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

pytestmark = pytest.mark.accept

DEPTH = ("MODEL=depth", "HEAD_DIM=128", "BIAS=n", "WEIGHT_TYING=n", "DTYPE=bf16", "BLOCK_SIZE=2048")


def test_the_plan_prints_a_verdict_for_each_claim(clone):
    before = set(clone.root.glob("test_matrix_results_*"))  # other tests use this clone, too
    assert clone.make("defconfig").returncode == 0
    two_gpus = clone.make(
        *("plan", "GPU=H100", "NUM_GPUS=2", "DEPTH=16", "TOKENIZER=bpe", "BPE_VOCAB_SIZE=65536", "BATCH_SIZE=8"),
        *("PARALLEL_BATCH_SIZE=256", "MAX_ITERS=12800", "TOKENS_PER_SECOND=430600", *DEPTH),
    )
    assert "335,544,320 parameters" in two_gpus.stdout, two_gpus.stderr
    assert "MFU 43.8 %: possible" in two_gpus.stdout
    deep = clone.make(
        *("plan", "GPU=H100 PCIe", "NUM_GPUS=8", "DEPTH=64", "BATCH_SIZE=4", "MAX_ITERS=35541"),
        *("SECONDS_PER_STEP=4.9315", "GPU_HOUR_PRICE=4", *DEPTH),
    )
    assert "does not fit on H100 PCIe" in deep.stdout, deep.stderr
    assert "2d01h" in deep.stdout
    fast = clone.make(
        *("plan", "GPU=A100", "NUM_GPUS=8", "MODEL=1558m", "TOKENIZER=gpt2", "BLOCK_SIZE=2048", "BATCH_SIZE=4"),
        *("DTYPE=bf16", "MAX_TOKENS=100000000000", "TOKENS_PER_SECOND=400000"),
    )
    assert "impossible" in fast.stdout, fast.stderr
    assert set(clone.root.glob("test_matrix_results_*")) == before


def test_the_doctor_describes_this_machine(clone):
    completed = clone.make("doctor")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert clone.python in completed.stdout
    assert "PyTorch" in completed.stdout
    value = json.loads(clone.kmatrix("doctor", "JSON=1").stdout)
    version = next(check["said"] for check in value["checks"] if check["name"] == "Python")
    assert version.startswith(".".join(map(str, sys.version_info[:3])))


def test_the_doctor_works_without_torch(bare_clone):
    """`make doctor` installs only the core packages into .venv."""
    completed = bare_clone.make("doctor")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert re.search(r"^warning +PyTorch ", completed.stdout, re.MULTILINE), completed.stdout
    assert "not installed" in completed.stdout


@pytest.fixture
def broken_torch(clone):
    """A torch package that fails to import, before the real one on the path."""
    folder = clone.root / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('libcudart.so: cannot open')", encoding="utf-8")
    yield
    shutil.rmtree(folder)


@pytest.mark.usefixtures("broken_torch")
def test_a_torch_that_fails_to_import_is_reported_with_its_error(clone):
    completed = clone.kmatrix("doctor")
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert re.search(r"^broken +PyTorch ", completed.stdout, re.MULTILINE), completed.stdout
    assert "libcudart.so" in completed.stdout
