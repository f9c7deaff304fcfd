"""Clones of the project, as users have them, with one .venv for the whole session.

KMATRIX_ACCEPT_WORKTREE=1 copies the working tree's files over each clone, to test what is not committed yet.
KMATRIX_ACCEPT_VENV=<.venv that make setup setup-trackers made> saves its installation.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clones import Clone, make_clone
from story import processes_below

SET_UP = 1200  # seconds for make setup: torch may have to be downloaded


@pytest.fixture(scope="session")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a .venv with trainer and trackers, made once by `make setup setup-trackers` for all xdist workers."""
    if given := os.environ.get("KMATRIX_ACCEPT_VENV"):
        return Path(given).resolve()
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    root, ready = shared / "installed" / "kmatrix", shared / "installed.ready"
    with (shared / "installed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            shutil.rmtree(root, ignore_errors=True)
            done = Clone(make_clone(root)).make("setup", "setup-trackers", timeout=SET_UP)
            assert done.returncode == 0, f"make setup failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            ready.touch()
    return root / ".venv"


def clone_with(venv: Path, root: Path) -> Clone:
    """Make a clone that shares an installed .venv: its paths are relative, so the clone runs its own code."""
    clone = Clone(make_clone(root))
    (root / ".venv").symlink_to(venv)
    return clone


@pytest.fixture(scope="session")
def session_clone(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return clone_with(venv, tmp_path_factory.mktemp("clone") / "kmatrix")


@pytest.fixture
def clone(session_clone: Clone) -> Clone:
    """The clone of this worker, without a configuration."""
    for name in (".config", ".config.old", "defconfig"):
        (session_clone.root / name).unlink(missing_ok=True)
    return session_clone


@pytest.fixture
def fresh_clone(venv: Path, tmp_path: Path) -> Clone:
    """A clone for this test alone, to change its files."""
    return clone_with(venv, tmp_path / "kmatrix")


@pytest.fixture
def bare_clone(tmp_path: Path) -> Clone:
    """A clone for this test alone, without a .venv."""
    return Clone(make_clone(tmp_path / "kmatrix"))


@pytest.fixture
def background(clone: Clone, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `kmatrix ...` in a session of its own, its words in output_<n>.txt of tmp_path; kill what is left."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **more: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"output_{len(running)}.txt").open("wb") as output:
            process = subprocess.Popen(
                [clone.python, "-m", "kmatrix", *words],
                cwd=clone.root,
                env=clone.environment | more,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()
    for left in processes_below(tmp_path):
        left.kill()
