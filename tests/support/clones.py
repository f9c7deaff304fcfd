"""A clone of the project, as a user has it, and commands that run in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
OURS = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHONPATH", "VIRTUAL_ENV", "KCONFIG_CONFIG")
LONGEST = 900  # seconds for any other command


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user's shell: nothing of the make or the tests that run us."""
    ours = {name for name in os.environ if name in OURS or name.startswith("KMATRIX_ACCEPT_")}
    return {name: text for name, text in os.environ.items() if name not in ours} | more


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
