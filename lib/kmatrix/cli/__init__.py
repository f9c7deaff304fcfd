"""One command for each make target: finds it, reads its arguments, prints its errors, returns its status.

The one place that catches KmatrixError. Heavy modules are imported by the command that needs them.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from kmatrix.cli.arguments import COMMANDS, Arguments, Command, find_command, from_makeflags, parse
from kmatrix.errors import KmatrixError, is_full

REFUSED, BUG, INTERRUPTED = 2, 70, 130


def main(argv: Sequence[str]) -> int:
    """Run `COMMAND [NAME=value ...]` and return the exit status.

    `--make TARGET`, which only the Makefile passes, takes the assignments from MAKEFLAGS.
    """
    try:
        if not argv or argv[0] in ("help", "-h", "--help"):
            print(usage())
            return 0
        if argv[0] == "--make":
            words = from_makeflags(os.environ.get("MAKEFLAGS", ""))
            command, arguments = parse(argv[1], words, from_make=True)
        else:
            command, arguments = parse(argv[0], argv[1:])
        return _call(command, arguments)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `make test-matrix-dry-run | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> int:
    """Tell of an error that no command foresaw, a full disk or a bug, and return the exit status."""
    if is_full(error):
        print(f"error: a disk is full: {error}\n  fix: make room there, then run it again", file=sys.stderr)
        return REFUSED
    traceback.print_exception(error)
    print("error: this is a bug in kmatrix: please report it with the lines above", file=sys.stderr)
    return BUG


def usage() -> str:
    """Return the text of `kmatrix help`."""
    width = max(len(name) for name in COMMANDS) + 2
    lines = [f"  {name:{width}}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kmatrix COMMAND [NAME=value ...]",
            "",
            *lines,
            "",
            "make help lists the make targets; docs/ explains them.",
        ]
    )


def _call(command: Command, arguments: Arguments) -> int:
    module, _, function = command.handler.partition(":")
    return int(getattr(importlib.import_module(module), function)(arguments) or 0)


__all__ = ["find_command", "main", "usage"]
