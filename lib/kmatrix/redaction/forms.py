"""The forms of keys: formats that only keys have, texts that announce a key, and the lines of private keys.

Every pattern takes linear time on any text: each repetition has an upper bound, or is possessive and comes last.
The anchors of a form are looked for before its pattern, because that is much faster.
Sources: the documentation of each service, and the detectors of detect-secrets and gitleaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

HIDDEN = "<hidden>"
LONGEST_KEY = 400  # lines of a private key; without its last line, the rest of the log would be searched for more

# Before a key: no letter or digit, an escaped line end or character, as in repr() and in URLs, or the end of a colour.
START = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2})|(?<=\\x[0-9a-f]{2})|(?<=\\u[0-9a-f]{4})"
    r"|(?<=[\d;[]m)|(?<=\[K))"
)
KEY_NAME = re.compile(r"(?:^|_)(?:api_?)?(?:key|token|secret|password|passwd)$", re.IGNORECASE)
WORD, URL_WORD = "[A-Za-z0-9]", "[A-Za-z0-9_-]"


class KeyForm(NamedTuple):
    """One form of keys. A match has the key after its first group, if it has a group, else as a whole."""

    kind: str
    anchors: tuple[str, ...]  # texts in lower case, one of which every match contains
    regex: str
    flags: int = 0

    @property
    def pattern(self) -> re.Pattern[str]:
        """The compiled regex. It is compiled when it is used first: all of them would take 30 ms of each command."""
        return _compiled(self.regex, self.flags)

    def hide(self, text: str) -> str:
        """Return a text without the keys of this form."""
        return self.pattern.sub(_hidden, text)

    def keys(self, text: str) -> Iterator[str]:
        """Yield the keys of this form in a text."""
        for match in self.pattern.finditer(text):
            yield match[0][len(match[1]) :] if self.pattern.groups else match[0]


@cache
def _compiled(regex: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(regex, flags)


def _hidden(match: re.Match[str]) -> str:
    return (match[1] if match.re.groups else "") + HIDDEN


def _token(kind: str, *anchors: str, alphabet: str = WORD, least: int, prefix: str = "") -> KeyForm:
    """Return the form of keys with a fixed beginning. prefix: its pattern, by default the anchors themselves."""
    start = prefix or "|".join(map(re.escape, anchors))
    return KeyForm(kind, tuple(anchor.lower() for anchor in anchors), f"{START}(?:{start}){alphabet}{{{least},}}+")


def _form(kind: str, anchors: str, pattern: str, flags: int = 0) -> KeyForm:
    """Return a form with any pattern. anchors: separated by blanks."""
    return KeyForm(kind, tuple(anchors.split()), pattern, flags)


_GITLAB = ("pat", "oas", "dt", "rt", "cbt", "ptt", "ft", "imt", "agent", "soat")
# 40 hexadecimal digits alone may be a commit id; with W&B's prefix of a private server they are a key.
FORMS: tuple[KeyForm, ...] = (
    _token("Hugging Face token", "hf_", "api_org_", least=30),
    _token("W&B key", "wandb_v", prefix=r"wandb_v\d_", alphabet=URL_WORD, least=20),
    _form("W&B key", "local-", rf"{START}local-[0-9a-f]{{40}}\b"),
    _token("GitHub token", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", least=30),
    _token("GitHub token", "github_pat_", alphabet=r"\w", least=40),
    _token("GitLab token", *(f"gl{kind}-" for kind in _GITLAB), alphabet=r"[\w.-]", least=20),
    _form("OpenAI or Anthropic key", "sk-", rf"{START}sk-(?=[A-Za-z_-]{{0,200}}\d)[\w-]{{20,}}+"),
    _token("AWS access key", "akia", "asia", "abia", prefix="AKIA|ASIA|ABIA", alphabet="[0-9A-Z]", least=16),
    _token("Google API key", "AIza", alphabet=URL_WORD, least=35),
    _token("Google OAuth token", "ya29.", "GOCSPX-", "1//0", alphabet=URL_WORD, least=20),
    _form("Slack token", "xox xapp-", rf"{START}(?:xox[a-z]|xapp)-[A-Za-z0-9-]{{10,}}+"),
    _form("Slack webhook", "hooks.slack.com", r"https://hooks\.slack\.com/(?:services|workflows|triggers)/[\w/+-]++"),
    _form("JSON Web Token", "eyj", rf"{START}eyJ[\w-]{{8,2048}}\.[\w-]{{8,}}+(?:\.[\w-]*+){{0,3}}"),
    _token("npm token", "npm_", least=36),
    _token("PyPI token", "pypi-", alphabet=URL_WORD, least=50),
    _token("NVIDIA key", "nvapi-", alphabet=URL_WORD, least=40),
)

NAMED_KIND = "value of a name that announces a key"
_QUOTE = r"\\{0,3}(?:[\"']|&(?:quot|apos|#x?\d{2});)?"
_SCHEME = r"(?:basic|bearer|digest|token|api-?key|key|bot|negotiate|ntlm|splunk|aws4-\S{1,40})"
# Not the special tokens of a tokenizer, which logs and tracebacks name.
_NO_NAME = (
    r"(?<!(?:eos|bos|unk|pad|cls|sep|new|end|str|max|per)_)(?<!per )(?<!(?:mask|next)_)(?<!(?:start|image)_)(?<!tik)"
)
_NAME = (
    r"api[_-]?key|(?:access|account|private|secret|signing|encryption|master|auth|deploy|session|shared|subscription)"
    rf"[_-]?key|{_NO_NAME}token|secret|passw(?:or)?d|passphrase|credentials?|connection[_-]?string|client-key-data|(?<!old)(?<=[\w;])pwd|_auth|(?<!ward|cond|irst|last|each|next|this)(?<!one)(?<!two)_pass(?=[\"']?\s?[:=])"
)
# An end-of-text token; a call in the code of a traceback; a number, such as joules_per_token=4.25.
_NO_VALUE = (
    r"(?!<\|?[\w/ ]{1,40}\|?>|\[[A-Z]{2,12}\]|(?-i:[a-z_][a-z_.]{1,64})[(\[][\"')\]a-z_{]|self\."
    r"|\w{0,20}Secret\w{0,20}\(|[\d.eE+-]{1,64}(?:[\s,;}\])]|$))"
)

# Texts that announce a key: the part after the first group is the key.
LOGIN_IN_URL = _form(
    "password in a URL",
    "://",
    r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]{1,30}://[^\s/:@'\"]{0,256}:)[^\s/@'\"]{1,1024}(?=@)",
    re.IGNORECASE,
)
KEY_IN_URL = _form("key in a URL", "://", r"(://)(?=[A-Za-z_-]{0,256}\d)(?:[0-9a-f]{16,256}|[\w-]{20,256})(?=@)")
ANNOUNCED: tuple[KeyForm, ...] = (
    # Of a database, also with characters that a URL should not have.
    _form(
        "password in a URL",
        "://",
        r"((?<![a-z])(?:postgres(?:ql)?|mysql|mariadb|mongodb|rediss?|amqps?|mssql|oracle|snowflake|clickhouse)(?:\+\w{1,20})?"
        r"://[^\s/:@'\"]{0,256}:)[^\s'\"]{1,512}(?=@[\w.-])",
        re.IGNORECASE,
    ),
    LOGIN_IN_URL,
    KEY_IN_URL,
    _form(
        "signature in a URL",
        "sig",
        r"([?&;](?:amp;)?(?:sig|signature|x-(?:amz|goog)-signature)=)[^\s&\"'<>]{8,}+",
        re.IGNORECASE,
    ),
    _form("key in a URL", "key= code= auth=", r"([?&](?:key|code|auth)=)(?=[^\s&\"'<>\d]{0,64}\d)[^\s&\"'<>]{16,}+"),
    _form(
        "Authorization header",
        "authorization",
        rf"(\bauthorization\W{{1,6}}b?{_QUOTE}{_SCHEME}\s{{1,4}})[^\s\"',;]{{8,}}+",
        re.IGNORECASE,
    ),
    _form(
        "Authorization header",
        "authorization",
        rf"(\bauthorization{_QUOTE}\]?\s{{0,3}}[:=,]\s{{0,3}}b?{_QUOTE}(?:[a-z][\w-]{{1,20}}\s{{1,4}})?)"
        r"(?=[^\s\"',;\d]{0,256}\d)[^\s\"',;]{8,}+",
        re.IGNORECASE,
    ),
    _form(
        "bearer token", "bearer", r"(\bbearer[\s.:=]{1,4})(?=[A-Za-z_.~+/-]{0,256}\d)[\w.~+/-]{16,}+=*+", re.IGNORECASE
    ),
    _form(
        "netrc entry",
        "password",
        r"(\b(?:login|machine)\s{1,8}\S{1,256}\s{1,8}(?:(?:login|account)\s{1,8}\S{1,256}\s{1,8}){0,2}password\s{1,8})\S++",
    ),
    # A line of its own, as `.netrc` is often written; with a digit or a sign, because it may be prose.
    _form(
        "netrc entry",
        "password",
        r"((?m:^)[+\- ]?[ \t]{0,8}password[ \t]{1,8})(?=[A-Za-z]{0,64}[^\sA-Za-z.,:;!?)])\S{8,256}(?m:$)",
    ),
    # 40 hexadecimal digits are an old W&B key only if "key" or "token" stands right before them.
    _form("W&B key", "key token", r"((?:key|token)\W{0,4})\b[0-9a-f]{40}\b", re.IGNORECASE),
    _form(
        "W&B key",
        "wandb",
        r"(\bwandb[\s\"',]{1,6}login[\s\"',]{1,6}(?:--[\w-]{1,30}(?:[\s\"',=]{1,6}https?://[^\s\"',]{1,200})?[\s\"',=]{1,6})"
        r"{0,4})(?=[A-Za-z_-]{0,64}\d)[\w-]{20,}+",
    ),
    _form("W&B key", "wandb.login(", r"(\bwandb\.login\([^\n()]{0,80}?[\"'])[0-9a-f]{40}(?=[\"'])"),
    _form(
        "password of curl",
        "curl wget",
        r"(\b(?:curl|wget)\b[^\n]{0,300}?[\s\"'](?:-u|--user|-U|--proxy-user)[\s\"',=]{0,6}[^\s:\"',]{0,128}:)[^\s\"']{1,}+",
    ),
    # Shorter than other values, with a digit, because code and prose have `password: str`.
    _form(
        "password with digits",
        "passw passphrase",
        rf"((?:passw(?:or)?d|passphrase){_QUOTE}\]?\s{{0,8}}[=:]\s{{0,8}}{_QUOTE}|\bpassw(?:or)?d\s{{1,3}}is:?\s{{1,3}}[\"']?)"
        r"(?=[A-Za-z]{0,64}\d)[^\s\"'&,;)\]}]{4,}+",
        re.IGNORECASE,
    ),
)
# name=value with a name that announces a secret, also in JSON, YAML and in calls with both as arguments.
NAMED = _form(
    NAMED_KIND,
    "key token secret passw passphrase credential connection pwd _auth _pass",
    rf"((?:{_NAME}){_QUOTE}\]?\s{{0,8}}(?:=>|[=:]|%3[ad])\s{{0,8}}(?:\w{{0,20}}Secret\w{{0,20}}\()?{_QUOTE})"
    rf"{_NO_VALUE}[^\s\"'&,;]{{8,}}+",
    re.IGNORECASE,
)
# `NAME=value` as in a shell and in .env: any value, because code has blanks around = or a lower-case name.
SHELL = _form(
    NAMED_KIND,
    "=",
    r"((?<![\w$])[A-Z][A-Z0-9_]{0,64}?(?:PASSWORD|PASSWD|PASSPHRASE|_PWD|_PASS|SSHPASS|SECRET|TOKEN|API_?KEY|ACCESS_KEY|SECRET_KEY)=[\"']?)"
    r"(?![(%]|os\.|[\d.]{1,32}(?:\s|$))[^\s\"'`;,()]{6,}+",
)

# What stands for a key in code and on pages: `{key}`, `$TOKEN`, `<your key>`, `hf_...`, `****`.
_PLACEHOLDER = (
    r"[\"']?(?:\$\{?[A-Za-z_]\w{0,64}\}?|\{\w[^{}\s]{0,64}\}|<[^<>]{1,64}>|[\w-]{0,12}(?:\.{3}|\*{3,}|x{6,}))"
)
_BY_ANCHOR = tuple((anchor, form) for form in (*FORMS, *ANNOUNCED) for anchor in form.anchors)
_IN_NAMES = tuple((anchor, form) for form in (*FORMS, LOGIN_IN_URL) for anchor in form.anchors)
_IN_TEXTS = (*_BY_ANCHOR, *((anchor, NAMED) for anchor in NAMED.anchors))
SHORTEST_MATCH = 11  # characters: `curl -u a:b`


def keys_of(form: KeyForm, text: str) -> list[str]:
    """Return the keys of a form in a text, without what only stands for a key."""
    if not _possible(text, ((anchor, form) for anchor in form.anchors)):
        return []
    return [key for key in form.keys(text) if not _compiled(_PLACEHOLDER).match(key)]


def forms_in(text: str) -> Iterator[str]:
    """Yield the kinds of the keys of known forms in a text."""
    if may_begin(text) and (_compiled(_BEGIN).search(text) or _compiled(_END).search(text)):
        yield "private key"
    for form in _possible(text, _BY_ANCHOR):
        if keys_of(form, text):
            yield form.kind


def hide_forms(text: str) -> str:
    """Return a text without keys of known forms, and without what follows a text that announces a key."""
    if may_begin(text):
        keys = PrivateKeys()
        text = "".join(map(keys.hide, text.splitlines(keepends=True)))
    return _without(text, _IN_TEXTS)


@lru_cache(maxsize=4096)  # the files of 10,000 runs have the same few hundred values
def hide_forms_in_name(text: str) -> str:
    """Return a name or a path without keys of known formats."""
    return _without(text, _IN_NAMES)


def _without(text: str, forms: Iterable[tuple[str, KeyForm]]) -> str:
    for form in _possible(text, forms):
        text = form.hide(text)
    return text


def _possible(text: str, forms: Iterable[tuple[str, KeyForm]]) -> Iterable[KeyForm]:
    """Return the forms of which a text contains an anchor, each once."""
    if len(text) < SHORTEST_MATCH:
        return ()
    lower = text.lower()
    return dict.fromkeys([form for anchor, form in forms if anchor in lower])


# The first and the last line of a private key: PEM, PGP, SSH2, PuTTY.
_BLOCK = r"(?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?"
_BEGIN = rf"-----BEGIN {_BLOCK}-----|---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----|Private-Lines: ?\d{{1,3}}"
_END = rf"-----END {_BLOCK}-----|---- END SSH2 ENCRYPTED PRIVATE KEY ----|Private-MAC: ?[0-9a-f]{{1,128}}"
# Base64, and what is between two pieces of it in a source or in repr().
_BETWEEN = r"(?:\s|\\[nr]|[\"'+,()])"
_PIECES = rf"{_BETWEEN}{{0,64}}+(?:[A-Za-z0-9+/=]{{16,}}+{_BETWEEN}{{0,64}}+)++"
# A line of a key: base64 alone, or at least 16 characters of it after the name of a rank or a time.
_LINE = (
    rf"{_BETWEEN}{{0,64}}+(?:[A-Za-z0-9+/=]{{1,}}+|[^\n]{{0,80}}?[\s:\]|>\"'][A-Za-z0-9+/=]{{16,}}+)?"
    rf"{_BETWEEN}{{0,16}}+"
)


def may_begin(text: str) -> bool:
    """Return whether a private key may begin or end in a text. A fast test, for most texts have none."""
    return "PRIVATE KEY" in text or "Private-" in text


class PrivateKeys:
    """Hides private keys in lines as they arrive. Lines of other processes that come in between are kept."""

    def __init__(self) -> None:
        self._lines = 0  # of a private key so far, 0: not inside one

    def __bool__(self) -> bool:
        """Return whether the last line was inside a private key."""
        return self._lines > 0

    def hide(self, line: str) -> str:
        """Return a line without the parts that belong to a private key: "" if nothing is left."""
        text = line.rstrip("\r\n")
        line_end, kept, begins, ends = line[len(text) :], "", False, False
        while True:
            if self._lines:
                end = _compiled(_END).search(text)
                if end is None:
                    return kept + self._inside(text, line_end, begins=begins)
                text, self._lines, ends = text[end.end() :], 0, True
            begin = _compiled(_BEGIN).search(text)
            if begin is None:
                # No empty line for the last line of a key.
                return "" if ends and not begins and not text else kept + text + line_end
            kept += text[: begin.start()] + HIDDEN
            text, self._lines, begins = text[begin.end() :], 1, True

    def _inside(self, text: str, line_end: str, *, begins: bool) -> str:
        """Return the part of a line inside a key that is none of it. begins: the key begins before the text."""
        self._lines = self._lines + 1 if self._lines < LONGEST_KEY else 0
        if not begins and _compiled(_LINE).fullmatch(text):
            return ""
        pieces = _compiled(_PIECES).match(text)
        return (text[pieces.end() :] if pieces else text) + line_end


def is_key_name(name: str) -> bool:
    """Return whether a variable of this name holds a key, such as WANDB_API_KEY, HF_TOKEN or DB_PASSWORD."""
    return KEY_NAME.search(name) is not None
