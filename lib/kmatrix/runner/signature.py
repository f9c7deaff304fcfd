"""Signatures of this user: whether they wrote a command in a record, or it came with a folder of somebody else."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

KEY_BYTES = 32


def sign(text: str) -> str:
    """Return the signature of a text, "" if this user has no directory for the key."""
    key = _key(make=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest() if key else ""


def is_signed(text: str, signature: str) -> bool:
    """Return whether this user signed the text, on this machine or on another one with the same home directory."""
    key = _key(make=False)
    return bool(key) and hmac.compare_digest(hmac.new(key, text.encode(), hashlib.sha256).hexdigest(), signature)


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
