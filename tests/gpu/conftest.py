"""Fixtures for tests of the recorder and its sources."""

from recordings import library, run_dir, start_recorder  # noqa: F401
