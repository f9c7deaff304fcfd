"""The tests of the CUDA path need torch's CUDA build, in the version that the double of CUDA was written for."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _suitable_torch():
    import fake_cuda

    if why := fake_cuda.unsuitable():
        pytest.exit(f"error: {why}", returncode=2)
