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
    KeyForm("PyPI", _line("upload('@')", LETTERS + "-_", 60, "py" + "pi-AgEIcHlwaS5vcmc")),
    KeyForm("Docker", _line("docker = '@'", LETTERS + "-_", 27, "dckr" + "_pat_")),
    KeyForm("SendGrid", _line("mail = '@'", LETTERS, 43, "S" + "G.abcdefghij0123456789AB.")),
    KeyForm("Stripe", _line("pay = '@'", LETTERS, 24, "sk" + "_live_")),
    KeyForm("webhook", _line("sign('@')", LETTERS, 32, "wh" + "sec_")),
    KeyForm("Google OAuth", _line("g = '@'", LETTERS + "-_", 60, "ya" + "29.a0")),
    KeyForm("token in a URL", _line("dsn = 'https://@ AT o1.ingest.example.org/2'", HEX, 31, "7")),
    KeyForm("ApiKey", _line("# Authorization: ApiKey @", LETTERS, 40, "4")),
    KeyForm("wandb login", _line("# wandb login @", HEX, 40, "")),
    KeyForm("wandb login elsewhere", _line("# wandb login --relogin --host https://wandb.example.org @", HEX, 40)),
    KeyForm("PGPASSWORD", _line("# PGPASSWORD=@ psql -h db", string.ascii_lowercase, 14)),
    KeyForm("curl -u", _line("# curl -s -u you:@ https://example.org", LETTERS, 12)),
    KeyForm("DB_PWD", _line("# DB_PWD=@", LETTERS, 12)),
    KeyForm("Discord", _line("d = 'https://discord.com/api/webhooks/123456789012345678/@'", LETTERS, 68)),
    KeyForm("Azure", _line("u = 'https://a.blob.core.windows.net/c?sv=2022&sig=@'", LETTERS, 40, "z7%2B")),
    KeyForm("Telegram", _line("bot = '123456789:@'", LETTERS + "-_", 33, "A" + "A")),
    KeyForm("Replicate", _line("r = '@'", LETTERS, 37, "r" + "8_")),
    KeyForm("Groq", _line("q = '@'", LETTERS, 52, "gs" + "k_")),
    KeyForm("NVIDIA", _line("n = '@'", LETTERS + "-_", 64, "nv" + "api-")),
    KeyForm("Databricks", _line("d = '@'", HEX, 32, "da" + "pi")),
    KeyForm("Vault", _line("v = '@'", LETTERS, 24, "hv" + "s.")),
    KeyForm("age", _line("a = '@'", string.ascii_uppercase + string.digits, 58, "AGE-SECRET" + "-KEY-1")),
    KeyForm("Tailscale", _line("t = '@'", LETTERS + "-", 30, "ts" + "key-auth-")),
    KeyForm("Grafana", _line("g = '@'", LETTERS, 32, "gl" + "sa_")),
    KeyForm("Twilio", _line("t = '@'", HEX, 32, "S" + "K")),
    KeyForm("header in a tuple", _line("headers.append(('X-Auth-Token', '@'))", LETTERS, 30, "8")),
    KeyForm("setdefault", _line("os.environ.setdefault('HF_TOKEN', '@')", LETTERS, 30, "8")),
    KeyForm("escaped JSON", _line(r'x = "{\"password\": \"@\"}"', LETTERS, 20, "4")),
    KeyForm("repr", _line(r"x = b'first\n@'", LETTERS, 34, "h" + "f_")),
    KeyForm("cookie", _line("# Cookie: session=@", LETTERS, 30, "3")),
    KeyForm("--password", _line("# registry login --password @", LETTERS, 20, "3")),
    KeyForm("sshpass", _line("# sshpass -p @ ssh host", LETTERS, 20, "3")),
    KeyForm("connection string", _line("c = 'Server=db;Uid=you;Pwd=@'", LETTERS, 20, "3")),
    KeyForm("XML", _line("<password>@</password>", LETTERS, 20, "3")),
    KeyForm("password of digits", _line("connect(password='@')", string.digits, 10)),
    KeyForm("short password", _line("connect(password='@')", LETTERS, 4, "a4")),
    KeyForm("database", _line("db = 'postgresql://you:@ AT db/runs'", LETTERS, 12, "a/b AT 7")),
    KeyForm("login of requests", _line("get(url, auth=('you', '@'))", LETTERS, 20, "7")),
    KeyForm("Docker login", _line('{"auths": {"hub": {"auth": "@"}}}', LETTERS, 40, "7")),
    KeyForm("SQL", _line("# ALTER USER you IDENTIFIED BY '@'", LETTERS, 20, "7")),
    KeyForm("setenv", _line("# setenv HF_TOKEN @", LETTERS, 30, "7")),
    KeyForm("HTML", _line("<x y='token=&quot;@&quot;'>", LETTERS, 30, "7")),
    KeyForm("SecretStr", _line("Settings(api_key=SecretStr('@'))", LETTERS, 30, "7")),
    KeyForm("sentence", _line("# Incorrect API key provided: @", LETTERS, 40, "7")),
    KeyForm("Together", _line("t = '@'", LETTERS + "-_", 43, "tg" + "p_v1_")),
    KeyForm("Fireworks", _line("f = '@'", LETTERS, 24, "f" + "w_")),
    KeyForm("Jina", _line("j = '@'", LETTERS, 60, "ji" + "na_")),
    KeyForm("Cerebras", _line("c = '@'", string.ascii_lowercase + string.digits, 48, "cs" + "k-")),
    KeyForm("Voyage", _line("v = '@'", LETTERS + "-_", 43, "p" + "a-")),
    KeyForm("Tavily", _line("t = '@'", LETTERS, 32, "tv" + "ly-")),
    KeyForm("Anyscale", _line("a = '@'", LETTERS, 40, "esec" + "ret_")),
    KeyForm("Kaggle token", _line("k = '@'", HEX, 32, "KG" + "AT_")),
    KeyForm("Doppler", _line("d = '@'", LETTERS, 43, "d" + "p.pt.")),
    KeyForm("1Password", _line("o = '@'", LETTERS, 200, "op" + "s_eyJ")),
    KeyForm("Pulumi", _line("p = '@'", HEX, 40, "pu" + "l-")),
    KeyForm("RubyGems", _line("r = '@'", HEX, 48, "ruby" + "gems_")),
    KeyForm("Sourcegraph", _line("s = '@'", HEX, 40, "sg" + "p_")),
    KeyForm("PostHog", _line("p = '@'", LETTERS, 43, "ph" + "c_")),
    KeyForm("Buildkite", _line("b = '@'", HEX, 40, "bk" + "ua_")),
    KeyForm("CircleCI", _line("c = '@'", HEX, 40, "CCI" + "PAT_" + "a1" * 11 + "_")),
    KeyForm("Dynatrace", _line("d = '@'", string.ascii_uppercase, 64, "dt0" + "c01." + "A1" * 12 + ".")),
    KeyForm("Vercel", _line("v = '@'", LETTERS, 40, "vercel" + "_blob_rw_")),
    KeyForm("HubSpot", _line("h = '@'", HEX + "-", 36, "pat" + "-na1-")),
    KeyForm("GitLab runner", _line("g = '@'", LETTERS, 20, "GR" + "1348941")),
    KeyForm("Square", _line("s = '@'", LETTERS + "-_", 43, "sq0" + "csp-")),
    KeyForm("Artifactory", _line("a = '@'", LETTERS, 69, "AK" + "Cp")),
    KeyForm("Alibaba", _line("a = '@'", LETTERS, 20, "LT" + "AI")),
    KeyForm("Render", _line("r = '@'", LETTERS, 32, "rn" + "d_")),
    KeyForm("NuGet", _line("n = '@'", string.ascii_lowercase + string.digits, 43, "oy" + "2")),
    KeyForm("wandb.login(key)", _line("wandb.login('@')", HEX, 40)),
    KeyForm("annotation", _line("api_key: str | None = '@'", LETTERS, 30, "7")),
    KeyForm("default", _line("getenv('HF_TOKEN', default='@')", LETTERS, 30, "7")),
    KeyForm("SMTP_PASS", _line("# SMTP_PASS=@", LETTERS, 12, "7")),
    KeyForm("become_pass", _line("# ansible_become_pass: @", LETTERS, 12, "7")),
    KeyForm("after a colour", _line(r"print('\x1b[31m@\x1b[0m')", LETTERS, 34, "h" + "f_")),
    KeyForm("Kaggle", _line('{"username": "you", "key": "@"}', HEX, 32)),
)
