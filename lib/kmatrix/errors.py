"""The errors that users meet: what is wrong, why, and how to mend it."""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})  # the disk is full, or what this user may have of it


class KmatrixError(Exception):
    """Something that the user can mend. The command line prints it and exits 2.

    what: one line that names the thing, with file and line where there is one.
    why: the cause.  fix: what to type or change.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class ConfigError(KmatrixError):
    """A configuration, or an assignment to it, that cannot be put in force."""


class DataError(KmatrixError):
    """Data that are missing, damaged or of the wrong kind."""


class RecordError(KmatrixError):
    """A file of a matrix or a run that is missing, damaged or too new."""


class SchemaError(RecordError):
    """A file that a newer kmatrix wrote."""


class FullError(RecordError):
    """A file that there is no room for."""


class LaunchError(KmatrixError):
    """A matrix that cannot be started here."""


def is_full(error: BaseException | None) -> bool:
    """Whether an error comes from a full disk, itself or by what it arose from."""
    while error is not None:
        if isinstance(error, FullError) or (isinstance(error, OSError) and error.errno in NO_ROOM):
            return True
        error = error.__cause__ or error.__context__
    return False
