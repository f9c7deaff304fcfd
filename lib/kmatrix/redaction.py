"""Find API keys and passwords in texts, and replace them in everything that is written.

A key is recognized by its value, if a variable of the environment or the user's .netrc file holds it, or by its form.
"""

from __future__ import annotations

import base64
import json
import netrc
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

HIDDEN = "<hidden>"
SHORTEST = 8  # characters; a shorter value is an ordinary word and is not redacted
SHORTEST_ENCODED = 10  # characters of base64 that identify a value
SETTINGS = frozenset({"symbols", "train"})  # keys of run.json: the trainer uses these texts as they are

# Formats that only keys have. 40 hexadecimal digits alone may be a commit id; with W&B's prefix of a private server
# they are a key. Sources: the documentation of each service, and the detectors of detect-secrets and gitleaks.
FORMS: Mapping[str, re.Pattern[str]] = {
    "Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "W&B key": re.compile(r"\bwandb_v\d_[A-Za-z0-9_-]{20,}|\blocal-[0-9a-f]{40}\b"),
    "GitHub token": re.compile(r"\bgh[opsur]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{40,}"),
    "GitLab token": re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}"),
    "OpenAI or Anthropic key": re.compile(r"\bsk-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}"),
    "AWS access key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "Google API key": re.compile(r"\bAIza[0-9A-Za-z_-]{35}"),
    "Slack token": re.compile(r"\bxox[a-z]-[A-Za-z0-9-]{10,}"),
    "Slack webhook": re.compile(r"https://hooks\.slack\.com/(?:services|workflows|triggers)/[\w/+-]+"),
    "JSON Web Token": re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"),
    "private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----)?"),
}
# The part after the first group is the key.
LOGIN_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@'\"]*:)([^\s/@'\"]+)(?=@)", re.IGNORECASE)
AUTHORIZATION = re.compile(r"(\bauthorization\W{1,6}(?:basic|bearer|digest|token)\s+)([^\s\"',;]{8,})", re.IGNORECASE)
BEARER = re.compile(r"(\bbearer\s+)((?=[\w.~+/-]*\d)[\w.~+/-]{16,}=*)", re.IGNORECASE)
NETRC = re.compile(r"(\blogin\s+\S+\s+password\s+)(\S+)")
# name=value with a name that announces a secret, also in JSON and YAML; not a number, such as bytes_per_token=4.25.
NAMED = re.compile(
    r"((?:api[_-]?key|(?:access|account|private)[_-]?key|token|secret|passw(?:or)?d)[\"']?\]?\s*[=:]\s*[\"']?)"
    r"(?![\d.eE+-]+(?:[\s,;}\]]|$))([^\s\"'&,;]{8,})",
    re.IGNORECASE,
)
# 40 hexadecimal digits are an old W&B key only if "key" or "token" stands right before them.
OLD_KEY = re.compile(r"((?:key|token)\W{0,4})(\b[0-9a-f]{40}\b)", re.IGNORECASE)
_AFTER_NAME = {
    "password in a URL": LOGIN_IN_URL,
    "Authorization header": AUTHORIZATION,
    "bearer token": BEARER,
    "netrc entry": NETRC,
    "W&B key": OLD_KEY,
}

_NAME = re.compile(r"(?:^|_)(?:api_?)?(?:key|token|secret|password|passwd)$", re.IGNORECASE)
# Words of the name of a variable that announce a secret, and last words that announce something else.
_SECRET_WORD = re.compile(
    r"(?:^|_)(?:\w*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)|PASS|PWD|CREDENTIALS?|AUTH|PAT|DSN)(?=_|$)"
)
_OTHER_LAST_WORD = re.compile(r"_(?:FILE|PATH|DIR|SOCK|HOST|PORT|USER|NAME|MODE|TYPE|INDEX|PARALLELISM)$")
_NOT_SECRET = frozenset({"PWD", "OLDPWD"})
_PLAIN_WORD = re.compile(r"[A-Za-z]+|\d+")


def is_key_name(name: str) -> bool:
    """Return whether a variable of this name holds a key, such as WANDB_API_KEY, HF_TOKEN or DB_PASSWORD."""
    return _NAME.search(name) is not None


def is_key(text: str) -> bool:
    """Return whether a text is or contains a key of a known format."""
    return next(_forms(text), None) is not None or re.fullmatch(r"[0-9a-f]{40}", text.strip()) is not None


def keys_in(text: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the kinds of the keys in a text, without the keys: the names of variables, and of known formats.

    environment: that of this process if None.
    """
    return redactor(environment).keys_in(text)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text with its keys replaced: values of key variables and of .netrc, and keys of known formats.

    environment: that of this process if None.
    """
    return redactor(environment).redact(text)


def redact_json(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Return a JSON value whose texts contain no keys.

    Names, settings and paths are read by programs: in texts without a blank, in paths, and below SETTINGS, only values
    are replaced that no name can contain. A password that is an ordinary word would otherwise change a status.
    """
    found = redactor(environment)

    def clean(part: Any, *, setting: bool = False) -> Any:
        if isinstance(part, str):
            is_name = setting or " " not in part or part.startswith("/")
            return found.redact_name(part) if is_name else found.redact(part)
        if isinstance(part, Mapping):
            return {name: clean(inner, setting=setting or name in SETTINGS) for name, inner in part.items()}
        if isinstance(part, list | tuple):  # curves have thousands of numbers
            return [inner if isinstance(inner, float | int) else clean(inner, setting=setting) for inner in part]
        return part

    return clean(value)


def redactor(environment: Mapping[str, str] | None = None) -> Redactor:
    """Return the redactor for an environment, that of this process if None.

    Reading the environment takes 0.1 ms: who redacts thousands of lines asks once.
    """
    variables = os.environ if environment is None else environment
    held = tuple((name, text) for name, text in variables.items() if _may_hold_key(name, text))
    files = tuple((str(path), found.st_mtime_ns) for path in netrc_files(variables) if (found := _stat(path)))
    return _makeredactor(held, files)


def netrc_files(environment: Mapping[str, str]) -> list[Path]:
    """Return the files in which `wandb login` and other programs store passwords."""
    if environment.get("NETRC"):
        return [Path(environment["NETRC"]).expanduser()]
    home = environment.get("HOME")
    # W&B reads both names.
    return [Path(home) / ".netrc", Path(home) / "_netrc"] if home else []


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key whose value is known."""

    value: str
    origin: str  # "the variable WANDB_API_KEY", "~/.netrc"


class Redactor:
    """Replaces keys with known values, in any encoding, and keys of known formats."""

    def __init__(self, keys: Iterable[KnownKey]) -> None:
        spellings = [(spelling, key.origin) for key in keys for spelling in _spellings(key.value)]
        # The longest first: a key that contains another one would otherwise keep a readable part.
        self._spellings = sorted(set(spellings), key=lambda pair: (-len(pair[0]), pair))
        encoded = {part: key.origin for key in keys for part in _base64_parts(key.value)}
        self._encoded = sorted(encoded.items())

    def keys_in(self, text: str) -> list[str]:
        """Return the kinds of the keys in a text, without the keys."""
        known = (f"value of {origin}" for part, origin in [*self._spellings, *self._encoded] if part in text)
        return list(dict.fromkeys([*known, *_forms(text)]))

    def redact(self, text: str) -> str:
        """Return a text without keys."""
        text = self._without_known(text, self._spellings)
        for form in FORMS.values():
            text = form.sub(HIDDEN, text)
        for form in (*_AFTER_NAME.values(), NAMED):
            text = form.sub(lambda match: match[1] + HIDDEN, text)
        return text

    def redact_name(self, text: str) -> str:
        """Return a name or a path without keys: values that are ordinary words stay."""
        text = self._without_known(text, [one for one in self._spellings if not _PLAIN_WORD.fullmatch(one[0])])
        for form in FORMS.values():
            text = form.sub(HIDDEN, text)
        return LOGIN_IN_URL.sub(lambda match: match[1] + HIDDEN, text)

    def _without_known(self, text: str, spellings: Iterable[tuple[str, str]]) -> str:
        for spelling, _ in spellings:
            text = text.replace(spelling, HIDDEN)
        for part, _ in self._encoded:
            if part in text:
                # The whole word of base64: what is left of it could be decoded to a part of the key.
                text = re.sub(rf"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]*{re.escape(part)}[A-Za-z0-9+/=_-]*", HIDDEN, text)
                text = text.replace(part, HIDDEN)
        return text


@lru_cache(maxsize=8)  # a log line every few ms asks with the same environment
def _makeredactor(variables: tuple[tuple[str, str], ...], files: tuple[tuple[str, int], ...]) -> Redactor:
    found = [KnownKey(value, f"the variable {name}") for name, text in variables for value in _values(name, text)]
    found += [KnownKey(value, f"the file {path}") for path, _ in files for value in _passwords(Path(path))]
    return Redactor([key for key in found if len(key.value) >= SHORTEST])


def _may_hold_key(name: str, text: str) -> bool:
    return len(text) >= SHORTEST and (_is_secret_name(name) or "://" in text)


def _is_secret_name(name: str) -> bool:
    upper = name.upper()
    return bool(_SECRET_WORD.search(upper)) and upper not in _NOT_SECRET and not _OTHER_LAST_WORD.search(upper)


def _values(name: str, text: str) -> Iterator[str]:
    """Yield the keys in the value of a variable: the value itself, each line of it, the passwords of URLs."""
    yield from (match[2] for match in LOGIN_IN_URL.finditer(text))
    if not _is_secret_name(name) or (text.startswith("/") and os.path.exists(text)):  # noqa: PTH110 (any text)
        return
    yield text
    if "\n" in text:  # a log has one line at a time
        yield from (line.strip() for line in text.splitlines() if not line.startswith("-----"))


def _passwords(path: Path) -> Iterator[str]:
    try:
        hosts = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        # A damaged file still holds its passwords.
        try:
            yield from re.findall(r"\bpassword\s+(\S+)", path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return
        return
    yield from (password for _, _, password in hosts.values() if password)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _spellings(value: str) -> set[str]:
    """Return a value as it stands in texts, in URLs, and in JSON."""
    return {
        value,
        quote(value),
        quote(value, safe=""),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
    }


def _base64_parts(value: str) -> set[str]:
    """Return the texts of which base64 contains one if it encodes a text with this value.

    Base64 encodes three bytes as four letters, so there are three, for the positions of the value. The letters at their
    ends depend on the text around it and are left out.
    """
    data, found = value.encode(), set()
    for before in range(3):
        first = -(-8 * before // 6)
        encoded = base64.b64encode(bytes(before) + data).decode()[first : 8 * (before + len(data)) // 6]
        found |= {encoded, encoded.replace("+", "-").replace("/", "_")}
    return {text for text in found if len(text) >= SHORTEST_ENCODED}


def _forms(text: str) -> Iterator[str]:
    """Yield the kinds of the keys of known formats in a text."""
    for kind, form in (*FORMS.items(), *_AFTER_NAME.items()):
        if form.search(text):
            yield kind
