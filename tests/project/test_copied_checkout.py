"""A copied checkout runs its own code, although its .venv was made for the original."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from clones import PROJECT, environment
from skips import require_program


@pytest.fixture
def copy(tmp_path):
    """A copied checkout whose interpreter finds the code of the original by default."""
    for name in ("Makefile", "Kconfig", "pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT / name, tmp_path)
    for name in ("lib", "gpt2", "defconfigs", "scripts"):
        shutil.copytree(PROJECT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{PROJECT / "lib"}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / ".core").touch()
    with (tmp_path / "lib" / "kmatrix" / "cli" / "commands.py").open("a") as file:
        file.write('\nprint("code of the copy")\n')
    return tmp_path


def make(root, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(require_program("make")), "--no-print-directory", *arguments]
    return subprocess.run(
        command, cwd=root, env=environment(**variables), capture_output=True, text=True, check=False, timeout=120
    )


def test_make_in_a_copy_runs_the_code_of_the_copy(copy):
    completed = make(copy, "list-defconfigs")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("code of the copy\n")


def test_the_pythonpath_of_the_user_is_kept(copy, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text('print("code of the user")\n')
    completed = make(copy, "list-defconfigs", PYTHONPATH=os.fspath(tmp_path / "mine"))
    assert completed.stdout.startswith("code of the user\ncode of the copy\n"), completed.stderr
