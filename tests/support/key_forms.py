"""Lines with keys of many services, made at run time: the repository itself holds nothing that looks like a key."""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

LETTERS = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


@dataclass(frozen=True)
class KeyForm:
    """One form in which keys appear in sources. make: from a random source to a text, and the keys in it."""

    kind: str
    make: Callable[[random.Random], tuple[str, tuple[str, ...]]]


def planted(form: KeyForm, seed: int) -> tuple[str, tuple[str, ...]]:
    """Return a text of one or more lines, and the keys in it."""
    return form.make(random.Random(f"{form.kind}/{seed}"))


def _line(text: str, alphabet: str, length: int, prefix: str = "") -> Callable[[random.Random], tuple[str, tuple[str]]]:
    """Return the maker of a line with one key in place of @; " AT " becomes @."""

    def make(source: random.Random) -> tuple[str, tuple[str]]:
        key = prefix + "".join(source.choices(alphabet, k=length))
        return text.replace("@", key).replace(" AT ", "@"), (key.replace(" AT ", "@"),)

    return make


def _aws(source: random.Random) -> tuple[str, tuple[str, ...]]:
    name = "AK" + "IA" + "".join(source.choices(string.ascii_uppercase + string.digits, k=16))
    secret = "".join(source.choices(LETTERS + "+/", k=40))
    return f"session = Session(aws_access_key_id='{name}',\n    aws_secret_access_key='{secret}')", (name, secret)


def _private_key(source: random.Random) -> tuple[str, tuple[str, ...]]:
    body = base64.b64encode(source.randbytes(192)).decode()
    lines = [body[start : start + 64] for start in range(0, len(body), 64)]
    begin, end = ("-----" + word + " RSA PRIVATE " + "KEY-----" for word in ("BEGIN", "END"))
    return "\n".join(['KEY = """' + begin, *lines, end + '"""']), tuple(lines)


def _key_in_strings(source: random.Random) -> tuple[str, tuple[str, ...]]:
    _, lines = _private_key(source)
    begin, end = ("-----" + word + " EC PRIVATE " + "KEY-----" for word in ("BEGIN", "END"))
    return "\n".join(['KEY = ("' + begin + '\\n"', *(f'    "{line}\\n"' for line in lines), f'"{end}\\n")']), lines


def _key_with_cr(source: random.Random) -> tuple[str, tuple[str, ...]]:
    text, lines = _private_key(source)
    return text.replace("\n", "\r\n"), lines


def _key_of_pgp(source: random.Random) -> tuple[str, tuple[str, ...]]:
    _, lines = _private_key(source)
    begin, end = ("-----" + word + " PGP PRIVATE " + "KEY BLOCK-----" for word in ("BEGIN", "END"))
    return "\n".join([f"'{begin}", "", *lines, "=aB3x", f"{end}'"]), lines


def _key_of_ranks(source: random.Random) -> tuple[str, tuple[str, ...]]:
    text, lines = _private_key(source)
    return "\n".join(f"[rank0]: {line}" for line in text.split("\n")), lines


def _key_in_json(source: random.Random) -> tuple[str, tuple[str, ...]]:
    _, lines = _private_key(source)
    begin, end = ("-----" + word + " PRIVATE " + "KEY-----" for word in ("BEGIN", "END"))
    return f"""{{"type": "service_account", "private_key": "{begin}""" + "\\n".join(["", *lines, end]) + '"}', lines


def _netrc_lines(source: random.Random) -> tuple[str, tuple[str]]:
    key = "".join(source.choices(HEX, k=40))
    return f"machine api.example.org\n  login you\n  password {key}", (key,)


def _json_web_token(source: random.Random) -> tuple[str, tuple[str, ...]]:
    parts = [{"alg": "HS256", "typ": "JWT"}, {"sub": source.randint(1, 10**9), "name": "you"}]
    words = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    key = ".".join([*words, "".join(source.choices(LETTERS + "-_", k=43))])
    return f"headers = dict(auth='{key}')", (key,)


def _webhook(source: random.Random) -> tuple[str, tuple[str, ...]]:
    parts = "T" + "".join(source.choices(HEX.upper(), k=8)), "B" + "".join(source.choices(HEX.upper(), k=8))
    key = "".join(source.choices(LETTERS, k=24))
    return f"hook = 'https://hooks.slack.com/services/{'/'.join(parts)}/{key}'", (key,)


KEY_FORMS = (
    KeyForm("W&B in os.environ", _line("os.environ['WANDB_API_KEY'] = '@'", HEX, 40)),
    KeyForm("W&B login", _line("wandb.login(key='@')", HEX, 40)),
    KeyForm("AWS", _aws),
    KeyForm("GitHub", _line("gh = '@'", LETTERS, 36, "gh" + "p_")),
    KeyForm("OpenAI", _line("client = OpenAI('@')", LETTERS, 48, "s" + "k-")),
    KeyForm("OpenAI project", _line("client = OpenAI('@')", LETTERS + "-_", 80, "s" + "k-proj-7")),
    KeyForm("Hugging Face", _line("login('@')", LETTERS, 34, "h" + "f_")),
    KeyForm("private key", _private_key),
    KeyForm("URL", _line("remote = 'https://you:@ AT example.org/x.git'", LETTERS, 20)),
    KeyForm("password=", _line("connect(host='db', password='@')", LETTERS, 14)),
    KeyForm("Slack token", _line("slack = '@'", LETTERS, 24, "xo" + "xb-123456789012-")),
    KeyForm("Slack webhook", _webhook),
    KeyForm("Google", _line("maps = '@'", LETTERS + "-_", 35, "AI" + "za")),
    KeyForm("JSON Web Token", _json_web_token),
    KeyForm("DATABASE_URL", _line("DATABASE_URL = 'postgresql://you:@ AT db.example.org/runs'", LETTERS, 16)),
    KeyForm("netrc", _line("# machine api.example.org login you password @", HEX, 40)),
    KeyForm(".env", _line("# WANDB_API_KEY=@", HEX, 40)),
    KeyForm("Bearer", _line("headers = {'Authorization': 'Bearer @'}", LETTERS, 40)),
    KeyForm("Basic", _line("headers = {'Authorization': 'Basic @'}", LETTERS, 40)),
    KeyForm("JSON", _line('config = """{"api_key": "@"}"""', LETTERS, 32)),
    KeyForm("private key with CR", _key_with_cr),
    KeyForm("private key in strings", _key_in_strings),
    KeyForm("private key of PGP", _key_of_pgp),
    KeyForm("private key after a prefix", _key_of_ranks),
    KeyForm("private key in JSON", _key_in_json),
    KeyForm("netrc in lines", _netrc_lines),
    KeyForm("npm", _line("//registry.npmjs.org/:x='@'", LETTERS, 36, "np" + "m_")),
    KeyForm("wandb login", _line("# wandb login @", HEX, 40, "")),
    KeyForm("wandb login elsewhere", _line("# wandb login --relogin --host https://wandb.example.org @", HEX, 40)),
    KeyForm("after a colour", _line(r"print('\x1b[31m@\x1b[0m')", LETTERS, 34, "h" + "f_")),
)
