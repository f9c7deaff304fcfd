"""Signatures of this user: whether they wrote a command in a record, or it came with a folder of somebody else."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from pathlib import Path

KEY_BYTES = 32


def sign(text: str, *about: str) -> str:
    """Return the signature of a text, "" if this user has no directory for the key.

    about: what it was written for. It is signed with the text, so that the signature is worth nothing elsewhere.
    """
    key = _key(make=True)
    return _signature(key, text, about) if key else ""


def is_signed(text: str, signature: str, *about: str) -> bool:
    """Return whether this user signed the text for this, on this machine or on another one with the same home."""
    key = _key(make=False)
    # As bytes: the signature comes from a file, and compare_digest refuses texts that are not ASCII.
    return bool(key) and hmac.compare_digest(_signature(key, text, about).encode(), _bytes(signature))


def matrix_identity(name: str, created: float | None) -> tuple[str, str]:
    """Return what a command in a matrix is signed with. created: Unix seconds.

    Not the path: a matrix that was moved or copied stays the user's.
    """
    return "matrix", f"{name} {created!r}"


def _signature(key: bytes, text: str, about: Sequence[str]) -> str:
    # As JSON, so that no two lists of texts have the same bytes.
    return hmac.new(key, json.dumps([text, *about]).encode(), hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # JSON may hold half a surrogate pair


def _key(*, make: bool) -> bytes:
    """Return the key of this user, which is made at the first use; b"" if there is none."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.environ.get("HOME") or "/nowhere", ".config")  # noqa: PTH118
    path = Path(home) / "kmatrix" / "key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written in one piece under another name: of two processes at once, the second finds a complete key.
            temporary = path.with_name(f".key.{os.getpid()}")
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(os.urandom(KEY_BYTES))
            try:
                os.link(temporary, path)  # unlike a rename, it fails if the other one was faster
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        found = path.read_bytes()
    except OSError:
        return b""
    return found if len(found) == KEY_BYTES else b""
