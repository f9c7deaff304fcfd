"""Fixtures of every test of the recorder and of what it records from."""

from recordings import library, run_dir, start  # noqa: F401
