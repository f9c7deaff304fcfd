"""Make clones of the project, as a user has them, and run commands in them.

A clone has the files of the working tree, and a .venv with the packages of the Python that runs the tests: nothing is
installed. Test modules of stories import these fixtures through their conftest.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from instant import instant_program
from once import make_once
from programs import Program
from story import kill, processes_below

PROJECT = Path(__file__).resolve().parents[2]
REMOVED_VARIABLES = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHONPATH", "VIRTUAL_ENV", "KCONFIG_CONFIG")
STAGES = ("core", "train", "trackers", "dev")  # of .venv: the Makefile installs those that have no mark
TIMEOUT_S = 900  # far above any command of a test


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a user's shell, without the variables of the make and the tests that run this."""
    return {name: text for name, text in os.environ.items() if name not in REMOVED_VARIABLES} | variables


@dataclass(frozen=True, slots=True)
class Clone:
    """A clone of the project in the directory `root`."""

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
        """The environment of a user's shell, and the code of this clone for `python -m kmatrix` and gpt2."""
        return environment(PYTHONPATH=f"{self.root / 'lib'}:{self.root}")

    def make(self, *arguments: str, timeout: float = TIMEOUT_S, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run make in the clone."""
        return self.run("make", "--no-print-directory", *arguments, timeout=timeout, **variables)

    def check(self, *arguments: str, **variables: str) -> str:
        """Run make, which must succeed; return what it printed."""
        completed = self.make(*arguments, **variables)
        assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-5000:]
        return completed.stdout

    def refused(self, *arguments: str, **variables: str) -> str:
        """Run make, whose command must refuse: status 2, an error, no traceback. Return the error."""
        completed = self.make(*arguments, **variables)
        assert completed.returncode == 2, completed.stdout + completed.stderr
        assert "error: " in completed.stderr
        assert "Traceback" not in completed.stderr
        return completed.stderr

    def kmatrix(
        self, *arguments: str, timeout: float = TIMEOUT_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run kmatrix as make does. Its exit status is not that of make, which is 2 for each failure."""
        path = os.pathsep.join(filter(None, [variables.pop("PYTHONPATH", ""), self.environment["PYTHONPATH"]]))
        return self.run(self.python, "-m", "kmatrix", *arguments, timeout=timeout, PYTHONPATH=path, **variables)

    def run(self, *command: str, timeout: float = TIMEOUT_S, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone. variables: added to its environment."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )


def make_clone(root: Path, *, with_venv: bool = True) -> Clone:
    """Clone the last commit, and copy the files of the working tree over it: those that git tracks or would track."""
    subprocess.run(
        ["git", "clone", "--quiet", "--no-hardlinks", str(PROJECT), str(root)], check=True, env=environment()
    )
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
    if with_venv:
        make_venv(root / ".venv")
    return Clone(root)


def make_venv(folder: Path) -> None:
    """Make a .venv in which all is installed: its entries are links to those of the environment that runs the tests."""
    folder.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for stage in STAGES:
        (folder / f".{stage}").touch()


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of which all others of this session are copies. Its code is compiled."""

    def make(folder: Path) -> None:
        clone = make_clone(folder / "kmatrix")
        clone.run(clone.python, "-m", "compileall", "-q", "lib", "gpt2", "scripts")

    return make_once(tmp_path_factory, "pristine", make)[0] / "kmatrix"


def copied(pristine: Path, root: Path) -> Clone:
    """Copy a clone, with its times: else Python would compile it again, and make would install."""
    root.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(pristine), str(root)], check=True)
    return Clone(root)


@pytest.fixture
def clone(pristine: Path, tmp_path: Path) -> Clone:
    """A clone for one test, without a configuration and without results."""
    return copied(pristine, tmp_path / "clone" / "kmatrix")


@pytest.fixture(scope="module")
def module_clone(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone for what the tests of a module share."""
    return copied(pristine, tmp_path_factory.mktemp("clone") / "kmatrix")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return kmatrix in this process, with an engine that finishes each run at once."""
    return instant_program(tmp_path, monkeypatch)


@pytest.fixture
def background(clone: Clone, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `kmatrix ...` in its own session, with output in tmp_path/output_<n>.txt; kill leftovers after the test."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [variables.pop("PYTHONPATH", ""), clone.environment["PYTHONPATH"]]))
        with (tmp_path / f"output_{len(running)}.txt").open("wb") as output:
            process = subprocess.Popen(
                [clone.python, "-m", "kmatrix", *arguments],
                cwd=clone.root,
                env=clone.environment | variables | {"PYTHONPATH": path},
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
