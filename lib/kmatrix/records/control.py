"""What users ask: the files in control/ of a matrix. Whoever trains a run of it reads them with each pulse.

`stop` stops everything, requests.json holds runs and orders attempts. A folder of three names, because a list of it is
fresh on network storage, and costs as much with 10,000 runs as with one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kmatrix import locks
from kmatrix.records import files
from kmatrix.records.decode import Count, Record, UnixTime, as_json, decode, field
from kmatrix.records.files import names, write_bytes, write_json

CONTROL, STOP, REQUESTS = "control", "stop", "requests.json"
ASKED = "asked by user"


class Request(Record, frozen=True, kw_only=True):
    """A run that is not to start, until it is released."""

    skip: str = ""  # why it cannot run here, which the next `make continue` looks at again; empty: its user holds it
    time: UnixTime = 0.0


class Again(Record, frozen=True, kw_only=True):
    """One more attempt, after the attempt with this number: void as soon as a later one exists."""

    after: Count
    resume: str = "auto"
    micro_batch: Count | None = None  # sequences


class Requests(Record, frozen=True, kw_only=True):
    """control/requests.json."""

    runs: dict[str, Request] = field(default_factory=dict)
    again: dict[str, Again] = field(default_factory=dict)
    # Of the last command that started runs: GPUS, HOSTS, SIMULATE, CODE, RUN
    settings: dict[str, str] = field(default_factory=dict)


def requests_of(matrix: Path) -> Requests:
    """Return what users want of single runs. Raises RecordError if the file is damaged: a held run must not start."""
    if REQUESTS not in names(matrix / CONTROL):
        return Requests()
    return decode(matrix / CONTROL / REQUESTS, Requests)


def stop_of(matrix: Path) -> str | None:
    """Return why a matrix is stopped, None if it is not."""
    if STOP not in names(matrix / CONTROL):
        return None
    try:
        return (matrix / CONTROL / STOP).read_text(encoding="utf-8", errors="replace").strip() or ASKED
    except FileNotFoundError:
        return None


def stop(matrix: Path, why: str = ASKED) -> None:
    """Stop a matrix: its jobs see the file with their next pulse, and those that start later, at once."""
    write_bytes(matrix / CONTROL / STOP, f"{why}\n".encode())


def allow(matrix: Path) -> None:
    """Take a stop back."""
    files.before("unlink", matrix / CONTROL / STOP)
    (matrix / CONTROL / STOP).unlink(missing_ok=True)


def change(matrix: Path, how: Callable[[Requests], Requests]) -> None:
    """Change the requests; two commands at once do it one after the other."""
    (matrix / CONTROL).mkdir(exist_ok=True)
    with locks.locked(matrix / CONTROL / ".lock"):
        write_json(matrix / CONTROL / REQUESTS, as_json(how(requests_of(matrix))))
