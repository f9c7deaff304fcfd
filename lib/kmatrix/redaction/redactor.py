"""Find API keys and passwords in texts, and replace them in everything that is written.

A key is recognized by its value, if a variable of the environment or the user's .netrc file holds it, or by its form.
"""

from __future__ import annotations

import base64
import json
import math
import netrc
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from kmatrix.redaction.forms import (
    HIDDEN,
    KEY_IN_URL,
    LOGIN_IN_URL,
    NAMED,
    forms_in,
    hide_forms,
    hide_forms_in_name,
    keys_of,
)
from kmatrix.text import ESCAPES

SHORTEST = 8  # characters; a shorter value is an ordinary word and is not redacted
SHORTEST_ENCODED = 10  # characters of base64 that identify a value
LOOKS_RANDOM = 3.0  # bits per character; sha1 in hexadecimal has 3.7, identifiers of 8 to 20 letters up to 3.5
SETTINGS = frozenset({"symbols", "train"})  # keys of run.json: the trainer uses these texts as they are
ESCAPE = "\x1b"
LONGEST_JSON = 1 << 16  # characters of a variable that are searched for passwords in JSON

# Words of the name of a variable that announce a secret, and last words that announce something else.
_SECRET_WORD = re.compile(
    r"(?:^|_)(?:\w*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)S?|(?:SSH|PG)?PASS|PW|PWD|CRED(?:ENTIAL)?S?|AUTH|PAT"
    r"|JWT|BEARER|DSN|SAS|COOKIE|(?:WEB)?HOOK|CONNECTION_STRING)\d{0,4}(?=_|$)"
)
_OTHER_LAST_WORD = re.compile(
    r"_(?:FILE|PATH|DIR|DIRECTORY|SOCK|HOST|PORT|USER|NAME|MODE|METHOD|TYPE|FORMAT|INDEX|PARALLELISM|VERSION|REGION|TTL)$"
)
_NUMBERED, _NUMBERS = re.compile("(?:KEY|TOKEN)S"), re.compile(r"[\d.,:eEkKmMgGbBtT_+-]*")  # MAX_TOKENS=100M,200M
_NOT_SECRET = frozenset({"PWD", "OLDPWD"})
_OF_MAKE = frozenset({"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES"})  # the arguments of make, which are variables, too
_PLAIN_WORD = re.compile(r"[A-Za-z]{1,15}|\d{1,15}")  # a longer password is not the name of anything


def is_key(text: str) -> bool:
    """Return whether a text is or contains a key of a known format."""
    return next(forms_in(text), None) is not None or re.fullmatch(r"[0-9a-f]{40}", text.strip()) is not None


def named_keys(text: str) -> list[str]:
    """Return the values in a text whose names announce a key, such as password=..., without placeholders."""
    return keys_of(NAMED, text)


def looks_random(value: str) -> bool:
    """Return whether a value without quotes is a key rather than an expression."""
    if not re.fullmatch(r"[A-Za-z0-9+/_=~.-]{8,}", value) or not re.search(r"\d", value) or "." in value.strip("."):
        return False
    if re.fullmatch(r"[A-Za-z_]+\d{0,3}", value):  # a name, such as logits2
        return False
    entropy = -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())
    return entropy >= LOOKS_RANDOM or len(value) < 12


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

    Settings are never changed, because the trainer reads them: keys in them are refused when the run is planned.
    Names and paths are read by programs, too: in texts without a blank, and in paths, only values are replaced that no
    name can contain. A password that is an ordinary word would otherwise change a status.
    """
    found = redactor(environment)

    def key(name: Any) -> Any:
        # The names of files. All others are words of this program, and there are many.
        return found.redact_name(name) if isinstance(name, str) and "/" in name else name

    def clean(part: Any) -> Any:
        if isinstance(part, str):
            is_name = " " not in part or part.startswith("/")
            return found.redact_name(part) if is_name else found.redact(part)
        if isinstance(part, Mapping):
            return {key(name): inner if name in SETTINGS else clean(inner) for name, inner in part.items()}
        if isinstance(part, list | tuple):  # curves have thousands of numbers
            return [inner if isinstance(inner, float | int) else clean(inner) for inner in part]
        return part

    return clean(value)


def redactor(environment: Mapping[str, str] | None = None) -> Redactor:
    """Return the redactor for an environment, that of this process if None.

    Reading the environment takes 0.1 ms: who redacts thousands of lines asks once.
    """
    return _redactor_of(os.environ if environment is None else environment)


def _redactor_of(variables: Mapping[str, str]) -> Redactor:
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
        self.longest = max(
            (len(spelling.encode(errors="surrogateescape")) for spelling, _ in self._spellings), default=0
        )  # bytes

    def keys_in(self, text: str) -> list[str]:
        """Return the kinds of the keys in a text, without the keys."""
        plain = [ESCAPES.sub("", text)] if ESCAPE in text else []
        return list(dict.fromkeys(kind for part in [text, *plain] for kind in (*self.known_in(part), *forms_in(part))))

    def known_in(self, text: str) -> list[str]:
        """Return the origins of the known keys in a text: "value of the variable HF_TOKEN"."""
        return list(
            dict.fromkeys(f"value of {origin}" for part, origin in (*self._spellings, *self._encoded) if part in text)
        )

    def redact(self, text: str) -> str:
        """Return a text without keys. A line with a key that colours interrupt loses its colours."""
        text = self._redacted(text)
        if ESCAPE not in text:
            return text
        return "".join(self._plain(line) if ESCAPE in line else line for line in re.split(r"(?<=\n)", text))

    def without_beginning(self, text: str) -> str:
        """Return a text without the beginning of a known key at its end."""
        for spelling, _ in self._spellings:
            for size in range(len(spelling) - 1, SHORTEST - 1, -1):
                if text.endswith(spelling[:size]):
                    return text[:-size] + HIDDEN
        return text

    def _redacted(self, text: str) -> str:
        return hide_forms(self._without_known(text, self._spellings))

    def _plain(self, line: str) -> str:
        """Return a redacted line as it is, or without escape sequences if those interrupt a key."""
        plain = ESCAPES.sub("", line)
        clean = self._redacted(plain)
        return line if clean == plain else clean

    def redact_name(self, text: str) -> str:
        """Return a name or a path without keys: values that are ordinary words stay."""
        spellings = [one for one in self._spellings if not _PLAIN_WORD.fullmatch(one[0])]
        return hide_forms_in_name(self._without_known(text, spellings))

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
    if len(text) < SHORTEST or name in _OF_MAKE or (_NUMBERED.search(name.upper()) and _NUMBERS.fullmatch(text)):
        return False
    return "://" in text or _is_secret_name(name)


def _is_secret_name(name: str) -> bool:
    upper = name.upper()
    return bool(_SECRET_WORD.search(upper)) and upper not in _NOT_SECRET and not _OTHER_LAST_WORD.search(upper)


def _values(name: str, text: str) -> Iterator[str]:
    """Yield the keys in the value of a variable: the value itself, its parts, the passwords of URLs and in JSON."""
    in_url = [*LOGIN_IN_URL.keys(text), *KEY_IN_URL.keys(text)]
    yield from (spelling for found in in_url for spelling in (found, unquote(found)))
    if not _is_secret_name(name) or (text.startswith("/") and os.path.exists(text)):  # noqa: PTH110 (any text)
        return
    yield text
    yield text.strip().strip("\"'")
    if "\n" in text:  # a log has one line at a time
        yield from (line.strip() for line in text.splitlines() if not line.startswith("-----"))
    if "://" not in text and text.count(":") == 1:  # user:password
        yield text.partition(":")[2]
    if text.lstrip().startswith("{") and len(text) <= LONGEST_JSON:
        yield from _passwords_in_json(text)


def _passwords_in_json(text: str) -> Iterator[str]:
    """Yield the values of a JSON object whose names announce a key, as in the key file of a service account."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    pending = [found]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending += part.values()
            yield from (value for name, value in part.items() if isinstance(value, str) and _is_secret_name(str(name)))
        elif isinstance(part, list):
            pending += part


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
    """Return a value as it stands in texts, in URLs, in JSON, in HTML, in a shell, in repr() and in hexadecimal."""
    data = value.encode(errors="surrogateescape")  # a variable may have any bytes
    in_urls = {quote(data), quote(data, safe=""), quote_plus(data)}
    html = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {
        value,
        *in_urls,
        *(re.sub(r"%[0-9A-F]{2}", lambda match: match[0].lower(), text) for text in in_urls),
        *_in_json(value),
        *(part for text in _in_json(value) for part in (*_in_json(text), text.replace("/", "\\/"))),  # JSON in JSON
        *(html, html.replace('"', "&quot;").replace("'", "&#x27;"), html.replace('"', "&#34;").replace("'", "&#39;")),
        *(value.replace("'", "'\"'\"'"), value.replace("'", "''")),  # shells, YAML and SQL
        *(repr(value)[1:-1], ascii(value)[1:-1], repr(repr(value))[2:-2], repr(data)[2:-1]),
        *(data.hex(), data.hex().upper()),
    }


def _in_json(text: str) -> tuple[str, str]:
    return json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]


def _base64_parts(value: str) -> set[str]:
    """Return the texts of which base64 contains one if it encodes a text with this value.

    Base64 encodes three bytes as four letters, so there are three, for the positions of the value. The letters at their
    ends depend on the text around it and are left out.
    """
    data, found = value.encode(errors="surrogateescape"), set()
    for before in range(3):
        first = -(-8 * before // 6)
        encoded = base64.b64encode(bytes(before) + data).decode()[first : 8 * (before + len(data)) // 6]
        found |= {encoded, encoded.replace("+", "-").replace("/", "_")}
    return {text for text in found if len(text) >= SHORTEST_ENCODED}
