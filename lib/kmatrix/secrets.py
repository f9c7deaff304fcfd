"""Keys of other services: how they are known, refused where they do not belong, and taken out of a text."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping

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


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text with every key taken out: the values of the environment's key variables, and known forms.

    environment: this process's where it is None.
    """
    variables = os.environ if environment is None else environment
    held = {value for name, value in variables.items() if is_key_name(name) and len(value) >= SHORTEST}
    for value in sorted(held, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _KEY.sub(HIDDEN, text)
    text = _NAMED.sub(lambda match: match[1] + HIDDEN, text)
    return _OLD_KEY.sub(lambda match: match[1] + HIDDEN, text)


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
