"""The user's command for the end of a matrix (ON_FINISH): never through a shell, and never a reason to fail."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping

from kmatrix.errors import ConfigError, RecordError
from kmatrix.records import MatrixDir, Status, read_json

LIMIT_S = 60.0


def command_of(text: str) -> list[str]:
    """Return the words of ON_FINISH, [] for none. Raises ConfigError where it could not be run in the end."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"ON_FINISH={text} is no command", why=str(error), fix="close what is quoted") from None
    if words and shutil.which(words[0]) is None:
        raise ConfigError(
            f"ON_FINISH={text}: there is no program {words[0]}",
            why="it is looked for now, so that a matrix does not end in silence",
            fix='name one that can be run, or pass ON_FINISH=""',
        )
    return words


def finish(matrix: MatrixDir, text: str) -> str:
    """Run the command behind the end of a matrix; return what went wrong, in words, "" for nothing."""
    try:
        words = command_of(text)
        if not words:
            return ""
        subprocess.run(
            words, env={**os.environ, **_about(matrix)}, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=True
        )
    except ConfigError as error:
        return error.what
    except subprocess.TimeoutExpired:
        return f"ON_FINISH={text} took longer than {LIMIT_S:g} s and was ended"
    except subprocess.CalledProcessError as error:
        return f"ON_FINISH={text} ended with status {error.returncode}"
    except OSError as error:
        return f"ON_FINISH={text} could not be run: {error.strerror}"
    return ""


def _about(matrix: MatrixDir) -> Mapping[str, str]:
    """Return what the command is told in its environment."""
    try:
        status = read_json(matrix.status)
    except RecordError:
        status = {}
    counts = status.get("counts") or {}
    return {
        "KMATRIX_MATRIX": str(matrix.path.resolve()),
        "KMATRIX_STATUS": str(status.get("status") or ""),
        "KMATRIX_FINISHED": str(counts.get(Status.FINISHED, 0)),
        "KMATRIX_FAILED": str(counts.get(Status.FAILED, 0)),
    }
