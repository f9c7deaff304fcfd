"""`kmatrix COMMAND [NAME=value ...]`, also `python -m kmatrix`."""

from __future__ import annotations

import importlib
import sys

if sys.version_info < (3, 11):  # noqa: UP036 (`make help` runs with the system's python3, whatever its version)
    found = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"error: kmatrix needs Python 3.11 or newer, python3 is {found}\n  hint: make help PYTHON=python3.11")

from kmatrix.cli.commands import main as command_line
from kmatrix.output import run_program

# Programs that commands and jobs start -> their modules.
PROGRAMS = {"run": "kmatrix.runner.program", "last": "kmatrix.runner.last", "runner": "kmatrix.runner.background"}


def main() -> None:
    """Run one command, or the program of a job, and exit with its status."""
    sys.exit(_status(sys.argv[1:]))


def _status(words: list[str]) -> int:
    if len(words) > 1 and words[0] in PROGRAMS:
        return int(importlib.import_module(PROGRAMS[words[0]]).main(words[1:]))
    return run_program(lambda: command_line(words))


if __name__ == "__main__":
    main()
