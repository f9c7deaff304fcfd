"""One fresh clone a session, with its own .venv made by make, as a user has it; each test finds no .config in it.

KMATRIX_ACCEPT_WORKTREE=1 copies the working tree's files over the clone, to develop against what is not committed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from story import processes_below

PROJECT = Path(__file__).resolve().parents[2]
OURS = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHONPATH", "VIRTUAL_ENV", "KCONFIG_CONFIG")
SET_UP = 1200  # seconds for make setup: torch may have to be downloaded
LONGEST = 900  # seconds for any other command


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user's shell: nothing of the make or the tests that run us."""
    return {name: text for name, text in os.environ.items() if name not in OURS} | more


@dataclass(frozen=True, slots=True)
class Clone:
    """A clone of the project. root: its folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / ".config"

    @property
    def python(self) -> str:
        """The interpreter of its .venv."""
        return str(self.root / ".venv" / "bin" / "python")

    @property
    def environment(self) -> dict[str, str]:
        return environment()

    def make(self, *words: str, timeout: float = LONGEST, **more: str) -> subprocess.CompletedProcess[str]:
        """Run make in the clone."""
        return self.run("make", "--no-print-directory", *words, timeout=timeout, **more)

    def kmatrix(self, *words: str, timeout: float = LONGEST, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the program that is installed in the clone's .venv."""
        return self.run(str(self.root / ".venv" / "bin" / "kmatrix"), *words, timeout=timeout, **more)

    def run(self, *command: str, timeout: float = LONGEST, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone. more: variables of its environment."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=environment(**more),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )


@pytest.fixture(scope="session")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clone the project, and make its .venv with `make setup`."""
    root = make_clone(tmp_path_factory.mktemp("clone") / "kmatrix")
    done = subprocess.run(
        ["make", "setup"],
        cwd=root,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=SET_UP,
    )
    assert done.returncode == 0, f"make setup failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return root


@pytest.fixture
def clone(cloned: Path) -> Clone:
    """The session's clone, without a configuration."""
    for name in (".config", ".config.old", "defconfig"):
        (cloned / name).unlink(missing_ok=True)
    return Clone(cloned)


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


@pytest.fixture
def fresh_clone(tmp_path: Path) -> Clone:
    """A clone of its own in which nothing was made yet."""
    return Clone(make_clone(tmp_path / "kmatrix"))


def make_clone(root: Path) -> Path:
    """Clone what is committed; where KMATRIX_ACCEPT_WORKTREE=1, with the working tree's files laid over it."""
    subprocess.run(
        ["git", "clone", "--quiet", "--no-hardlinks", str(PROJECT), str(root)], check=True, env=environment()
    )
    if os.environ.get("KMATRIX_ACCEPT_WORKTREE") == "1":
        _copy_working_tree(root)
    return root


def _copy_working_tree(root: Path) -> None:
    """Copy every file that git knows or does not ignore, and remove what is gone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = PROJECT / name, root / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        else:
            target.unlink(missing_ok=True)
