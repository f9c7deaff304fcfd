"""The tests of the CUDA path need torch's CUDA build, in the version that the double of CUDA was written for."""

from __future__ import annotations

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    """End a run of this folder before its first test if torch is another one. Workers of xdist do not report."""
    import fake_cuda

    if not hasattr(session.config, "workerinput") and (why := fake_cuda.unsuitable()):
        pytest.exit(f"error: {why}", returncode=2)


@pytest.fixture(scope="session", autouse=True)
def _suitable_torch():
    """Skip these tests in a run of all folders, which does not get to the hook above."""
    import fake_cuda

    if why := fake_cuda.unsuitable():
        pytest.skip(why)
