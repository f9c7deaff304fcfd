"""Ask a program of the trainer, which has torch and the libraries for data."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from kmatrix.errors import DataError, LaunchError
from kmatrix.records.paths import ROOT, program_environment


def need_torch() -> None:
    """Raise LaunchError if torch is missing, before anything is made."""
    if find_spec("torch") is None:  # found, not imported: that takes seconds
        raise LaunchError(
            "torch is not installed", hint="run `make setup`, or pass PYTHON=<interpreter with all packages>"
        )


def ask(module: str, *arguments: str) -> Any:
    """Return the answer of a program: the last line of its stdout, as JSON; None without one. stderr is the terminal.

    Raises DataError with the error that it answers, and KeyboardInterrupt if Ctrl+C ended it.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=program_environment(ROOT),
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode == 130:  # Ctrl+C, which the terminal sends to both processes
        raise KeyboardInterrupt
    lines = done.stdout.strip().splitlines() or ([] if done.returncode else ["null"])
    try:
        answer = json.loads(lines[-1])  # libraries may print warnings before
    except (ValueError, IndexError):
        raise DataError(f"{module} ended without an answer", why=f"exit code {done.returncode}, see above") from None
    if done.returncode:
        raise DataError(answer["what"], why=answer["why"], hint=answer["hint"])
    return answer
