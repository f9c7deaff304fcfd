"""Find API keys and passwords in texts, and replace them in output and logs."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping

HIDDEN = "<hidden>"
SHORTEST = 8  # characters; a shorter value is an ordinary word and is not redacted


# Formats that only keys have: Hugging Face, W&B (wandb_v1_...), and W&B's 40 hexadecimal digits with the prefix of a
# private server. 40 digits alone may be a commit id.
_KEY = re.compile(r"\bhf_[A-Za-z0-9]{30,}|\bwandb_v\d_[A-Za-z0-9_-]{20,}|\blocal-[0-9a-f]{40}\b")
# name=value with a name that announces a secret, also in JSON and YAML. The limit of 8 characters is SHORTEST.
_NAMED = re.compile(r"""(?i)((?:api[_-]?key|token|secret|password)["']?\s*[=:]\s*["']?)([^\s"'&,;]{8,})""")
# 40 hexadecimal digits are an old W&B key only if "key" or "token" stands right before them.
_OLD_KEY = re.compile(r"(?i)((?:key|token)\W{0,4})\b[0-9a-f]{40}\b")
_NAME = re.compile(r"(?i)(?:^|_)(?:api_?)?(?:key|token|secret|password|passwd)$")


def is_key_name(name: str) -> bool:
    """Return whether a variable of this name holds a key, such as WANDB_API_KEY, HF_TOKEN or DB_PASSWORD."""
    return _NAME.search(name) is not None


def is_key(text: str) -> bool:
    """Return whether a text is or contains a key of a known format."""
    return _KEY.search(text) is not None or re.fullmatch(r"[0-9a-f]{40}", text.strip()) is not None


def holds_key(text: str, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a text contains a key of a known format, or the value of a key variable of the environment."""
    return _KEY.search(text) is not None or any(value in text for value in _held(environment))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text with its keys replaced: values of key variables of the environment, and keys of known formats.

    environment: that of this process if None.
    """
    # The longest first: a key that contains another one would otherwise keep a readable part.
    for value in sorted(_held(environment), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _KEY.sub(HIDDEN, text)
    text = _NAMED.sub(lambda match: match[1] + HIDDEN, text)
    return _OLD_KEY.sub(lambda match: match[1] + HIDDEN, text)


def _held(environment: Mapping[str, str] | None) -> set[str]:
    """Return the values of the key variables of the environment."""
    variables = os.environ if environment is None else environment
    return {value for name, value in variables.items() if is_key_name(name) and len(value) >= SHORTEST}


class _Redacting(io.TextIOWrapper):
    """A text stream that redacts what it writes."""

    def write(self, text: str) -> int:
        super().write(redact(text))
        return len(text)  # callers compare it with what they passed, not with the redacted length


def redact_output() -> None:
    """Redact sys.stdout and sys.stderr of this process. What other processes write to the same file is not redacted."""
    # The old streams share the buffers below them: text that is still in the old ones would come out later.
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout = _Redacting(sys.stdout.buffer, encoding="utf-8", errors="replace", line_buffering=True)
    sys.stderr = _Redacting(sys.stderr.buffer, encoding="utf-8", errors="replace", line_buffering=True)
