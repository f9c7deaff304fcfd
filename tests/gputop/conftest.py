"""Fixtures for tests that show what a recorder writes."""

from recordings import library, run_dir, start_recorder  # noqa: F401
