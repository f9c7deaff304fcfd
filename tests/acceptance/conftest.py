"""Make clones of the project, as users have them, with one .venv for the whole session.

KMATRIX_ACCEPT_WORKTREE=1 copies the files of the working tree over each clone, to test uncommitted changes.
KMATRIX_ACCEPT_VENV=<a .venv from `make setup setup-trackers setup-kubernetes`> skips the installation.
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
from instant import instant_program
from once import session_folder
from programs import Program
from story import kill, processes_below

SETUP_TIMEOUT_S = 1200  # make setup may have to download torch


@pytest.fixture(scope="session")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a .venv with everything, made once for all xdist workers."""
    if installed := os.environ.get("KMATRIX_ACCEPT_VENV"):
        return Path(installed).resolve()
    shared = session_folder(tmp_path_factory)
    root, ready = shared / "installed" / "kmatrix", shared / "installed.ready"
    # The first worker installs; the others wait for the lock and find the marker.
    with (shared / "installed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            shutil.rmtree(root, ignore_errors=True)
            completed = Clone(make_clone(root)).make(
                "setup", "setup-trackers", "setup-kubernetes", timeout=SETUP_TIMEOUT_S
            )
            assert completed.returncode == 0, (
                f"make setup failed:\n{completed.stdout[-3000:]}\n{completed.stderr[-3000:]}"
            )
            ready.touch()
    return root / ".venv"


def clone_with(venv: Path, root: Path) -> Clone:
    """Make a clone that shares an installed .venv. Its paths are relative, so the clone runs its own code."""
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
    """A clone for one test, which may change its files."""
    return clone_with(venv, tmp_path / "kmatrix")


@pytest.fixture
def bare_clone(tmp_path: Path) -> Clone:
    """A clone for one test, without a .venv."""
    return Clone(make_clone(tmp_path / "kmatrix"))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return kmatrix in this process, with an engine that finishes each run at once."""
    return instant_program(tmp_path, monkeypatch)


@pytest.fixture
def background(clone: Clone, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `kmatrix ...` in its own session, with output in tmp_path/output_<n>.txt; kill leftovers after the test."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"output_{len(running)}.txt").open("wb") as output:
            process = subprocess.Popen(
                [clone.python, "-m", "kmatrix", *arguments],
                cwd=clone.root,
                env=clone.environment | variables,
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
    kill(processes_below(tmp_path))
