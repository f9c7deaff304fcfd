"""`python -m kmatrix.gpu.simulate [--gpus N] [--scenario FILE] -- COMMAND ...`: run a command with simulated GPUs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.gpu.simulate import SCENARIOS, build, environment

REFUSED = 2


def main(argv: Sequence[str]) -> int:
    """Become the command. Returns only where that is refused."""
    try:
        own, command = _split(argv)
        asked = _parser().parse_args(own)
        if not command:
            raise LaunchError("simulated GPUs for no command", fix="name one behind two dashes: -- COMMAND")
        added = environment(build(asked.library), _scenario(asked.scenario), asked.gpus)
        _become(command, os.environ | added)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands before and behind the first `--`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:place]), list(argv[place + 1 :])


def _parser() -> argparse.ArgumentParser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kmatrix" / "simulate"
    shipped = ", ".join(_shipped())
    parser = argparse.ArgumentParser(prog="python -m kmatrix.gpu.simulate", usage="%(prog)s [options] -- COMMAND ...")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs (default: as the scenario says)")
    parser.add_argument(
        "--scenario", default="calm", metavar="FILE", help=f"a file, or one of {shipped} (default: calm)"
    )
    parser.add_argument(
        "--library", type=Path, default=cache, metavar="FOLDER", help=f"where to build (default: {cache})"
    )
    return parser


def _shipped() -> list[str]:
    return sorted(path.stem for path in SCENARIOS.glob("*.scn"))


def _scenario(asked: str) -> Path:
    return SCENARIOS / f"{asked}.scn" if asked in _shipped() else Path(asked)


def _become(command: list[str], environ: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started", why=error.strerror or str(error)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
