"""Keys of other services: how they are known, refused where they do not belong, and taken out of a text."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

HIDDEN = "<hidden>"
SHORTEST = 8  # letters of a variable's value that is worth hiding: shorter ones are words

# Forms that nothing but a key has: Hugging Face's, W&B's of today, and W&B's former 40 hexadecimal digits with the
# prefix of a server of one's own. 40 digits alone may be a commit.
_KEY = re.compile(r"\bhf_[A-Za-z0-9]{30,}|\bwandb_v\d_[A-Za-z0-9_-]{20,}|\blocal-[0-9a-f]{40}\b")
_NAMED = re.compile(r"""(?i)((?:api[_-]?key|token|secret|password)["']?\s*[=:]\s*["']?)([^\s"'&,;]{8,})""")
_OLD_KEY = re.compile(r"(?i)((?:key|token)\W{0,4})\b[0-9a-f]{40}\b")
_NAME = re.compile(r"(?i)(?:^|_)(?:api_?)?(?:key|token|secret|password|passwd)$")


def is_key_name(name: str) -> bool:
    """Whether a variable of this name holds a key: WANDB_API_KEY, HF_TOKEN, DB_PASSWORD."""
    return _NAME.search(name) is not None


def is_key(text: str) -> bool:
    """Whether a text is, or holds, a key of a known form."""
    return _KEY.search(text) is not None or re.fullmatch(r"[0-9a-f]{40}", text.strip()) is not None


def holds_key(text: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a text holds a value of the environment's key variables, or a key of a known form, for certain."""
    return _KEY.search(text) is not None or any(value in text for value in _held(environment))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text with every key taken out: the values of the environment's key variables, and known forms.

    environment: this process's where it is None.
    """
    for value in sorted(_held(environment), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _KEY.sub(HIDDEN, text)
    text = _NAMED.sub(lambda match: match[1] + HIDDEN, text)
    return _OLD_KEY.sub(lambda match: match[1] + HIDDEN, text)


def _held(environment: Mapping[str, str] | None) -> set[str]:
    """Return the keys that are in the environment."""
    variables = os.environ if environment is None else environment
    return {value for name, value in variables.items() if is_key_name(name) and len(value) >= SHORTEST}


def redact_files(paths: Iterable[Path]) -> None:
    """Take the keys out of text files. One that holds none, or that cannot be written, stays as it is."""
    for path in paths:
        with contextlib.suppress(OSError):
            before = path.read_bytes().decode(errors="surrogateescape")
            if (after := redact(before)) != before:
                partial = path.with_name(f".{path.name}.{os.getpid()}")
                partial.write_bytes(after.encode(errors="surrogateescape"))
                partial.replace(path)


class _Redacting(io.TextIOWrapper):
    """A stream that writes no key."""

    def write(self, text: str) -> int:
        super().write(redact(text))
        return len(text)


def redact_output() -> None:
    """Let no key pass through this process's print and sys.stderr from now on. What others write to the file passes."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout = _Redacting(sys.stdout.buffer, encoding="utf-8", errors="replace", line_buffering=True)
    sys.stderr = _Redacting(sys.stderr.buffer, encoding="utf-8", errors="replace", line_buffering=True)
