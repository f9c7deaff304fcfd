"""`kmatrix COMMAND [NAME=value ...]`, also `python -m kmatrix`."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (`make help` runs with the system's python3, whatever its version)
    found = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"error: kmatrix needs Python 3.11 or newer, python3 is {found}\n  hint: make help PYTHON=python3.11")

from kmatrix.cli.commands import main as command_line
from kmatrix.output import run_program


def main() -> None:
    """Run one command, or the program of a job, and exit with its status."""
    if sys.argv[1:2] == ["run"]:
        from kmatrix.runner.program import main as program

        sys.exit(program(sys.argv[2:]))
    if sys.argv[1:2] == ["last"]:
        from kmatrix.runner.last import main as last

        sys.exit(last(sys.argv[2:]))
    if sys.argv[1:2] == ["runner"]:
        from kmatrix.runner.background import main as runner

        sys.exit(runner(sys.argv[2:]))
    sys.exit(run_program(lambda: command_line(sys.argv[1:])))


if __name__ == "__main__":
    main()
