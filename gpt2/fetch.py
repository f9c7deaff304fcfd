"""One file from an address, whole or not at all: an interrupted download goes on where it stopped."""

from __future__ import annotations

import hashlib
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from kmatrix.errors import DataError

TIMEOUT_S = 30.0
ATTEMPTS = 5  # in a row that bring nothing
FIRST_PAUSE_S = 0.5  # doubled with each
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """Where a file is. secret: headers for this server alone, which are never sent on to another."""

    url: str
    secret: Mapping[str, str] = field(default_factory=dict)


def fetch(url: str, path: Path, *, sha256: str) -> Path:
    """Return the path of a file with this hash: as it lies there, or fetched.

    What was received is kept beside it (.part), also when this process is killed. Raises DataError where the
    address does not answer, or answers with another file.
    """
    if path.is_file() and file_sha256(path) == sha256:
        return path
    part = part_of(path)
    receive(lambda: Address(url), part, name=url)
    found = file_sha256(part)
    if found != sha256:
        part.unlink()
        raise DataError(
            f"{url} is not the file that it was",
            why=f"its SHA-256 is {found[:12]}..., and {sha256[:12]}... is expected",
            fix=f"put the right file at {path}",
        )
    return part.replace(path)


def part_of(path: Path) -> Path:
    """Return where the beginning of a file is kept while the rest is fetched; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.part")


def receive(
    address: Callable[[], Address], part: Path, *, name: str, received: Callable[[int], None] | None = None
) -> None:
    """Receive a file, from where `part` ends. Broken connections are taken up again, with a pause.

    address: asked before each attempt, since addresses expire.  received: told the bytes as they come.
    """
    error: Exception | None = None
    idle = 0
    while idle < ATTEMPTS:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _attempt(address(), part, before, received):
                return
            error = None
        except urllib.error.HTTPError as refused:
            error = refused
            if refused.code < HTTPStatus.INTERNAL_SERVER_ERROR and refused.code not in (403, 408, 429):
                break
        except (OSError, ValueError) as broken:
            error = broken
            if isinstance(getattr(broken, "reason", None), (socket.gaierror, ConnectionRefusedError)):
                break  # no network, or no such server: waiting would not help
        idle = 0 if part.exists() and part.stat().st_size > before else idle + 1
        if idle < ATTEMPTS:
            time.sleep(FIRST_PAUSE_S * 2**idle)
    raise DataError(
        f"cannot fetch {name}",
        why=str(error or "the connection broke each time"),
        fix="run it again where there is a network: what has come is kept",
    )


def _attempt(address: Address, part: Path, have: int, received: Callable[[int], None] | None) -> bool:
    """Ask once for what is missing. Returns whether all has come."""
    request = urllib.request.Request(address.url, headers={"Range": f"bytes={have}-"} if have else {})
    for header, text in address.secret.items():
        request.add_unredirected_header(header, text)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as refused:
        if refused.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return True  # nothing is left to send: the hash says whether it is the file
        raise
    promised = answer.headers.get("Content-Length")
    left = int(promised) if promised else None
    with answer, part.open("ab" if answer.status == HTTPStatus.PARTIAL_CONTENT else "wb") as file:
        while left != 0 and (chunk := answer.read1(CHUNK_BYTES)):
            file.write(chunk)
            left = None if left is None else left - len(chunk)
            if received:
                received(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    return not left  # where nothing was promised, the hash says whether it is all


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
