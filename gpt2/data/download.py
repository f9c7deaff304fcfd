"""Download a file of a known hash."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import urllib.request
from pathlib import Path

from kmatrix.errors import DataError

TIMEOUT_S = 30.0  # without any byte, not for the whole file


def fetch(url: str, path: Path, *, sha256: str) -> Path:
    """Return the path of a file, which is downloaded unless it is there.

    Raises DataError if the server does not respond, or sends another file.
    """
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, part.open("wb") as file:
            shutil.copyfileobj(response, file)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {url}", why=str(error), hint="run it again with network access") from None
    found = hashlib.sha256(part.read_bytes()).hexdigest()
    if found != sha256:
        why = f"SHA-256 {found[:12]}..., expected {sha256[:12]}..."
        raise DataError(f"{url} has changed", why=why, hint=f"put the original file at {path}")
    return part.replace(path)
