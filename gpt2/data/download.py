"""Download a file atomically; an interrupted download resumes."""

from __future__ import annotations

import hashlib
import http.client
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

TIMEOUT_S = float(os.environ.get("KMATRIX_DOWNLOAD_TIMEOUT") or 30.0)  # without any byte, not for the whole file
ATTEMPTS = 5  # consecutive attempts without new bytes
FIRST_PAUSE_S = 0.5  # doubled after each attempt
CHUNK_BYTES = 1 << 20


class UnavailableError(DataError):
    """A server that does not answer now: a later attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a file."""

    url: str
    secret: Mapping[str, str] = field(default_factory=dict)  # headers that are not sent on after a redirect


def fetch(url: str, path: Path, *, sha256: str, received: Callable[[int], None] | None = None) -> Path:
    """Return the path of a file with this hash, downloaded unless it exists.

    Partial downloads are kept in a .part file, also if this process is killed. Raises DataError if the server does not
    respond, or sends another file.  received: called with the bytes as they arrive.
    """
    if path.is_file() and file_sha256(path) == sha256:
        return path
    part = part_of(path)
    receive(lambda: Address(url), part, name=url, received=received)
    found = file_sha256(part)
    if found != sha256:
        part.unlink()
        raise DataError(
            f"{url} has changed",
            why=f"SHA-256 {found[:12]}..., expected {sha256[:12]}...",
            hint=f"put the original file at {path}",
        )
    return part.replace(path)


def part_of(path: Path) -> Path:
    """Return the path of the partial download of a file. Its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.part")


def receive(
    address: Callable[[], Address], part: Path, *, name: str, received: Callable[[int], None] | None = None
) -> None:
    """Download a file, continuing at the end of `part`. Broken connections are retried after a pause.

    address: called before each attempt, because addresses expire.  received: called with the bytes as they arrive.
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
            if is_final(refused.code):
                break
        # HTTPException: a response that breaks in a chunk or is not HTTP.  ValueError: an address without a scheme.
        except (OSError, http.client.HTTPException, ValueError) as broken:
            error = broken
            if isinstance(getattr(broken, "reason", None), (socket.gaierror, ConnectionRefusedError)):
                break  # no network or no such server: retrying would not help
        # A slow connection that breaks often still finishes: only attempts without a new byte count.
        idle = 0 if part.exists() and part.stat().st_size > before else idle + 1
        if idle < ATTEMPTS:
            time.sleep(FIRST_PAUSE_S * 2**idle)
    kind = DataError if isinstance(error, urllib.error.HTTPError) and is_final(error.code) else UnavailableError
    raise kind(
        f"cannot download {name}",
        why=str(error or "the connection broke repeatedly"),
        hint="run it again with network access: the partial download is kept",
    )


def is_final(status: int) -> bool:
    """Return whether an HTTP error stays the same however often a file is requested."""
    # 403: an expired address, and the next attempt asks for a new one; 408 and 429: the server asks to retry.
    return status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in (403, 408, 429)


def _attempt(address: Address, part: Path, offset: int, received: Callable[[int], None] | None) -> bool:
    """Request the bytes from `offset` on, once. Return whether the download is complete."""
    request = urllib.request.Request(address.url, headers={"Range": f"bytes={offset}-"} if offset else {})
    for header, text in address.secret.items():  # a redirect leads to a content server, which must not see the token
        request.add_unredirected_header(header, text)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as refused:
        if refused.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and offset:
            return True  # nothing is missing; the caller verifies the hash
        raise
    length = response.headers.get("Content-Length")
    remaining = int(length) if length else None
    # A server that ignores the range sends the whole file with 200: start again instead of appending.
    with response, part.open("ab" if response.status == HTTPStatus.PARTIAL_CONTENT else "wb") as file:
        # read1 returns what has arrived; read would keep up to a chunk in memory that a kill loses.
        while remaining != 0 and (chunk := response.read1(CHUNK_BYTES)):
            file.write(chunk)
            remaining = None if remaining is None else remaining - len(chunk)
            if received:
                received(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    return not remaining  # without Content-Length, the caller's hash decides


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
