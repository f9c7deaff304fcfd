"""The errors that users see (what is wrong, why, and a hint), and the damaged files that a command has ignored."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})  # the disk is full, or the quota of this user


class KmatrixError(Exception):
    """An error that the user can fix. The command line prints it and exits with status 2.

    what: one line that names the problem, with file and line number if known.
    why: the cause.  hint: what to type or change.
    """

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        self.what, self.why, self.hint = what, why, hint
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class ConfigError(KmatrixError):
    """A configuration or an assignment that cannot be applied."""


class DataError(KmatrixError):
    """A dataset that is missing, damaged or of the wrong format."""


class RecordError(KmatrixError):
    """A file of a matrix or a run that is missing, damaged or too new."""


class LaunchError(KmatrixError):
    """A matrix that cannot start on this machine."""


def reason_of(error: Exception) -> str:
    """Return the reason of an error as a user reads it, without its number: "Read-only file system"."""
    return getattr(error, "strerror", None) or str(error)


def path_problem(error: Exception) -> str:
    """Return the problem of a path that this user cannot use or no file can have, "" for another error."""
    if isinstance(error, OSError) and error.filename is not None and error.errno not in NO_SPACE:
        return f"{error.strerror}: {error.filename}"
    # pathlib of Python 3.11 raises these as plain RuntimeErrors: an unknown ~user, and a link to itself.
    if isinstance(error, RuntimeError) and str(error).startswith(("Could not determine home", "Symlink loop")):
        return str(error).rstrip(".")
    return ""


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or an error that caused it, is due to a full disk."""
    # A full disk is often reported by a library in an exception of its own, so the whole chain is searched.
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return True
        error = error.__cause__ or error.__context__
    return False


_damaged: dict[Path, str] = {}  # of this process


def note_damage(path: Path, why: str) -> None:
    """Remember that a damaged file was ignored. Each file is remembered once."""
    _damaged[path] = f"{path} is damaged and was ignored: {why}"


def note_lines(path: Path, skipped: int, lines: int) -> None:
    """Remember that some lines of a log were skipped."""
    _damaged[path] = f"{path}: {skipped} of {lines} lines are damaged and were skipped"


def take_damage() -> dict[Path, str]:
    """Return one sentence per damaged file that was ignored, in whole or in part, since the last call."""
    found = dict(_damaged)
    _damaged.clear()
    return found


def add_damage(found: Mapping[Path, str]) -> None:
    """Remember what another process took."""
    _damaged.update(found)


def damaged_files() -> list[str]:
    """Return the sentences of `take_damage`."""
    return list(take_damage().values())
