"""Make a clone of the project, as a user has it, and run commands in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
REMOVED_VARIABLES = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHONPATH", "VIRTUAL_ENV", "KCONFIG_CONFIG")
TIMEOUT_S = 900  # far above any command of a test; make setup has its own, because it may download torch


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a user's shell, without the variables of the make and the tests that run this."""
    removed = {name for name in os.environ if name in REMOVED_VARIABLES or name.startswith("KMATRIX_ACCEPT_")}
    return {name: text for name, text in os.environ.items() if name not in removed} | variables


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
        return environment()

    def make(self, *arguments: str, timeout: float = TIMEOUT_S, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run make in the clone."""
        return self.run("make", "--no-print-directory", *arguments, timeout=timeout, **variables)

    def kmatrix(
        self, *arguments: str, timeout: float = TIMEOUT_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the kmatrix program of the clone's .venv."""
        return self.run(str(self.root / ".venv" / "bin" / "kmatrix"), *arguments, timeout=timeout, **variables)

    def run(self, *command: str, timeout: float = TIMEOUT_S, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone. variables: added to its environment."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=environment(**variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )


def make_clone(root: Path) -> Path:
    """Clone the last commit; with KMATRIX_ACCEPT_WORKTREE=1, copy the files of the working tree over it."""
    subprocess.run(
        ["git", "clone", "--quiet", "--no-hardlinks", str(PROJECT), str(root)], check=True, env=environment()
    )
    if os.environ.get("KMATRIX_ACCEPT_WORKTREE") == "1":
        _copy_working_tree(root)
    return root


def _copy_working_tree(root: Path) -> None:
    """Copy every file that git tracks or does not ignore, and remove deleted files."""
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
