"""Download a file of a known hash."""

from __future__ import annotations

import hashlib
import http.client
import urllib.request
from collections.abc import Callable
from pathlib import Path

from kmatrix.errors import DataError

TIMEOUT_S = 30.0  # without any byte, not for the whole file
CHUNK_BYTES = 1 << 20


def fetch(url: str, path: Path, *, sha256: str, received: Callable[[int], None] | None = None) -> Path:
    """Return the path of a file with this hash, downloaded unless it exists.

    Raises DataError if the server does not respond, or sends another file.  received: called with the bytes as they
    arrive.
    """
    if path.is_file() and file_sha256(path) == sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, part.open("wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                if received:
                    received(len(chunk))
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {url}", why=str(error), hint="run it again with network access") from None
    found = file_sha256(part)
    if found != sha256:
        part.unlink()
        raise DataError(
            f"{url} has changed",
            why=f"SHA-256 {found[:12]}..., expected {sha256[:12]}...",
            hint=f"put the original file at {path}",
        )
    return part.replace(path)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
