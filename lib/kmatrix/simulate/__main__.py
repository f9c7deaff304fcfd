"""`python -m kmatrix.simulate [--gpus N] [--scenario FILE] -- COMMAND ...`: run a command with simulated GPUs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.simulate.library import SCENARIOS, build, environment

REFUSED = 2


def main(argv: Sequence[str]) -> int:
    """Replace this process by the command. Return only after an error."""
    try:
        # Split before argparse, which would take options of the command for its own.
        own, command = _split(argv)
        asked = _parser().parse_args(own)
        if not command:
            raise LaunchError("no command to run with simulated GPUs", hint="add it after two dashes: -- COMMAND")
        added = environment(build(asked.library), _scenario(asked.scenario), asked.gpus)
        _execute(command, os.environ | added)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after the first `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kmatrix" / "simulate"
    shipped = ", ".join(_shipped())
    parser = argparse.ArgumentParser(prog="python -m kmatrix.simulate", usage="%(prog)s [options] -- COMMAND ...")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: from the scenario)")
    parser.add_argument(
        "--scenario", default="calm", metavar="FILE", help=f"a file, or one of {shipped} (default: calm)"
    )
    parser.add_argument(
        "--library", type=Path, default=cache, metavar="FOLDER", help=f"build directory (default: {cache})"
    )
    return parser


def _shipped() -> list[str]:
    return sorted(path.stem for path in SCENARIOS.glob("*.scn"))


def _scenario(asked: str) -> Path:
    return SCENARIOS / f"{asked}.scn" if asked in _shipped() else Path(asked)


def _execute(command: list[str], environ: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}", why=error.strerror or str(error)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
