"""Fixtures of `make check-gpu`."""

from __future__ import annotations

from typing import Any

import pytest

import on_gpu_runs
from check_gpu import missing
from factories import make_data
from kmatrix.gpu.nvml.detect import detect
from on_gpu_runs import Place


@pytest.fixture(scope="session")
def device() -> Place:
    """The device of the tests: a GPU, or the CPU with ON=cpu. Without either, the session ends."""
    found = on_gpu_runs.place()
    if found.is_gpu and (why := missing(detect())):
        pytest.exit(f"error: {why}", returncode=2)
    return found


@pytest.fixture(scope="session")
def small(device: Place, tmp_path_factory: Any) -> dict[str, Any]:
    """The fields of a small model with its data; on the CPU of the size that it trains for 20 steps in seconds."""
    folder = tmp_path_factory.mktemp("small") / "data"
    data = {"data_path": folder, "data_sha256": make_data(folder, train=200_000)}
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 8, "vocab_multiple": 64}
    return data | sizes | ({} if device.is_gpu else {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64})


@pytest.fixture
def on_gpu(device: Place) -> None:
    """Skip a test that needs the device itself."""
    if not device.is_gpu:
        pytest.skip("needs a GPU itself")
