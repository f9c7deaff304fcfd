"""Fixtures of a job's tests."""

import pytest

from share_job import fast, share  # noqa: F401  (fixtures)


@pytest.fixture(autouse=True)
def _fast(fast):  # noqa: F811
    """Short waits in all tests."""
