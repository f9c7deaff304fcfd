"""One file from an address, whole or not at all: an interrupted download goes on where it stopped."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path

from kmatrix.errors import DataError

TIMEOUT_S = 30.0
ATTEMPTS = 5
CHUNK_BYTES = 1 << 20


def fetch(url: str, path: Path, *, sha256: str) -> Path:
    """Return the path of a file with this hash: as it lies there, or fetched.

    What was received is kept beside it (.part), also when this process is killed. Raises DataError where the
    address does not answer, or answers with another file.
    """
    if path.is_file() and file_sha256(path) == sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    _receive(url, part)
    found = file_sha256(part)
    if found != sha256:
        part.unlink()
        raise DataError(
            f"{url} is not the file that it was",
            why=f"its SHA-256 is {found[:12]}..., and {sha256[:12]}... is expected",
            fix=f"put the right file at {path}",
        )
    return part.replace(path)


def _receive(url: str, part: Path) -> None:
    """Receive a file, from where `part` ends; a broken connection is taken up again."""
    error: Exception | None = None
    for _ in range(ATTEMPTS):
        have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # https, or a server of the user's own
                with part.open("ab" if answer.status == 206 else "wb") as file:
                    while chunk := answer.read(CHUNK_BYTES):
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                if not answer.length:  # what Content-Length promised and did not come
                    return
                error = None
        except urllib.error.HTTPError as refused:
            if refused.code == 416 and have:  # nothing is left to send: the hash says whether it is the file
                return
            error = refused
            if refused.code < 500:
                break
        except (OSError, ValueError) as broken:
            error = broken
    raise DataError(
        f"cannot fetch {url}",
        why=str(error or "the connection broke each time"),
        fix="run it again where there is a network: what has come is kept",
    )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
