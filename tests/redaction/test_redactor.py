"""Recognize keys by their form and by the names of their variables, and redact them."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from urllib.parse import quote, quote_plus

import pytest

from key_forms import KEY_FORMS, planted
from kmatrix.cli.commands import COMMANDS
from kmatrix.experiment.configure import text_of_config
from kmatrix.kconfig.assignments import SETS
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import ALIASES
from kmatrix.redaction.forms import HIDDEN, is_key_name
from kmatrix.redaction.redactor import SHORTEST, is_key, redact, redact_json
from kmatrix.text import printable
from programs import ROOT, Program

HF = "hf_" + "aB3" * 12
WANDB = "wandb_v1_" + "c" * 40
OLD = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "TRACKIO_WRITE_TOKEN", "MY_PASSWORD", "token"])
def test_a_variable_with_such_a_name_is_a_secret(name):
    assert is_key_name(name)


@pytest.mark.parametrize("name", ["TOKENS", "MAX_TOKENS", "KEEP_CHECKPOINTS", "GPT2_TOKENIZER", "MONKEY", "HOME"])
def test_other_names_are_not_secrets(name):
    assert not is_key_name(name)


def test_no_symbol_or_argument_is_mistaken_for_a_key():
    symbols = {symbol.name for symbol in Tree.parse(srctree=ROOT).symbols}
    arguments = {name for command in COMMANDS.values() for name in command.takes}

    assert {name for name in symbols | {*ALIASES, *SETS} if is_key_name(name)} == set()
    assert {name for name in arguments if is_key_name(name)} == set()


@pytest.mark.parametrize("text", [HF, WANDB, OLD, "local-" + OLD, f"https://user:{HF}@host"])
def test_keys_are_recognized_by_their_form(text):
    assert is_key(text)


@pytest.mark.parametrize(
    "text", ["", "gpt2-1a2b3", "/home/you/data", "HuggingFaceFW/fineweb-2", "hf_datasets", OLD[:39]]
)
def test_no_value_of_a_configuration_is_a_key(text):
    assert not is_key(text)


@pytest.mark.parametrize(
    "line",
    [f"login with {HF} failed", f"api_key={WANDB}", f"key: {OLD}", "password = 'letmein123'", f"Bearer token {OLD}"],
)
def test_a_key_in_a_line_is_replaced_and_the_rest_is_kept(line):
    clean = redact(line, {})

    assert HIDDEN in clean
    assert not is_key(clean)
    assert clean.split()[0].partition("=")[0] == line.split()[0].partition("=")[0]


def test_values_of_secret_variables_are_redacted_whatever_their_form():
    environment = {"WANDB_API_KEY": "correct horse battery", "HF_TOKEN": "abc", "HOME": "/home/you"}

    assert redact("/home/you: correct horse battery, abc", environment) == f"/home/you: {HIDDEN}, abc"


@pytest.mark.parametrize("line", [f"commit {OLD}", "Iter 10 | loss 3.4560 | tok/s 55188", "tokens: 12345678901"])
def test_other_lines_are_unchanged(line):
    assert redact(line, {}) == line


@pytest.mark.parametrize("line", [f"TRACKER_PROJECT={OLD}", f"WANDB_ENTITY={WANDB}", f"RESULTS_DIR={HF}"])
def test_a_key_in_a_configuration_is_refused_and_not_repeated(tmp_path, line):
    program = Program(tmp_path)

    message = program.refused("defconfig-gpt2-cpu-quick", line)

    assert "would contain a key" in message
    assert line.partition("=")[2] not in message


@pytest.mark.parametrize(
    ("line", "variables", "error"),
    [
        (
            "ON_FINISH=true {}",
            {"SLACK_TOKEN": "correct horse"},
            "CONFIG_ON_FINISH would contain the value of the variable",
        ),
        (
            "ON_FINISH=true {}x",
            {"MY_URL": "https://you:correct-horse@host"},
            "CONFIG_ON_FINISH would contain the value",
        ),
        ("ON_FINISH=true --password={}", {}, "CONFIG_ON_FINISH would contain a key"),
        ("ON_FINISH=true --api-key={}4711", {}, "CONFIG_ON_FINISH would contain a key"),
        ("TRACKER_PROJECT={}", {"MY_SECRET": "correct-horse"}, "CONFIG_TRACKER_PROJECT would contain the value"),
        (
            "SAMPLE_PROMPT=it is {}|x",
            {"MY_SECRET": "correct-horse"},
            "CONFIG_GPT2_SAMPLE_PROMPT would contain the value",
        ),
        (
            "DATA_DIR=/nowhere/{}/x",
            {"S3_KEY": "correct-horse"},
            "CONFIG_DATA_DIR would contain the value of the variable",
        ),
        (
            "RESULTS_DIR={}",
            {"S3_KEY": "tmp/correct-horse"},
            "CONFIG_RESULTS_DIR would contain the value of the variable",
        ),
    ],
)
def test_a_value_of_the_environment_in_a_text_is_refused_with_its_symbol(tmp_path, monkeypatch, line, variables, error):
    key = "correct-horse"
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
        key = "correct horse" if " " in text else key if "://" in text else text
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick", "SAMPLE_INTERVAL=5")

    message = program.refused("test-matrix-dry-run", line.format(key))

    assert message.startswith(f"error: command line: {line.partition('=')[0]}: {error}")
    assert key not in message
    assert "script" in message
    assert not variables or f"env -u {next(iter(variables))}" in message


def test_a_password_on_the_command_line_is_not_called_a_variable(tmp_path, monkeypatch):
    """make passes its arguments on in MAKEFLAGS, and in a variable per argument."""
    text = "curl https://you:correct-horse@example.org"
    monkeypatch.setenv("ON_FINISH", text)
    monkeypatch.setenv("MAKEFLAGS", f" -- ON_FINISH={text}")
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick")

    message = program.refused("test-matrix-dry-run", f"ON_FINISH={text}")

    assert message.startswith("error: command line: ON_FINISH: CONFIG_ON_FINISH would contain a key")


@pytest.mark.parametrize(
    "line",
    [
        "ON_FINISH=sh -c 'curl -H \"Authorization: Bearer $SLACK_TOKEN\" https://example.org'",
        "ON_FINISH=true --token=$SLACK_TOKEN",
        "SAMPLE_PROMPT=The secret: everything is a token = something |password: required",
    ],
)
def test_the_name_of_a_variable_and_prose_are_accepted(tmp_path, monkeypatch, line):
    monkeypatch.setenv("SLACK_TOKEN", "correct-horse")
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick", "SAMPLE_INTERVAL=5")

    program.check("test-matrix-dry-run", line)


def test_a_known_key_in_a_setting_is_refused_before_the_run_is_changed_by_it(tmp_path, monkeypatch):
    """Redaction must not change a text that a run reads, and must not let it pass."""
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick", "SAMPLE_INTERVAL=5", "SAMPLE_PROMPT=openwebtext-3")
    monkeypatch.setenv("MY_SECRET", "openwebtext-3")

    message = program.refused("test-matrix-dry-run")

    assert "CONFIG_GPT2_SAMPLE_PROMPT would contain the value of the variable MY_SECRET" in message
    assert "env -u MY_SECRET" in message


def test_a_key_in_a_comment_is_not_copied_to_the_matrix(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "correct-horse")
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick")
    text = program.config.read_text()
    program.write(
        text, f"# as with {HF} is not set", "# correct-horse", "#WANDB_API_KEY=a0123456789", "# CONFIG_X token is y"
    )

    plan = program.plan()
    copied = text_of_config(plan.tree, plan.lines)

    assert copied == text


def test_a_key_in_a_file_is_refused_with_its_line_and_not_repeated(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_SEED=1", f'CONFIG_WANDB_ENTITY="{WANDB}"')

    message = program.refused("olddefconfig")

    assert ".config:2: CONFIG_WANDB_ENTITY would contain a key" in message
    assert WANDB not in message


def test_every_form_of_a_key_is_replaced_in_a_log_also_in_colours():
    """Programs colour a key as a whole, its name, or parts of it."""
    for form in KEY_FORMS:
        text, keys = planted(form, seed=1)
        clean = redact(text, {})
        assert HIDDEN in clean, form.kind
        assert not [key for key in keys if key in clean], form.kind
        assert redact(clean, {}) == clean
        for key in keys:
            for coloured in (f"\x1b[1;31m{key}\x1b[0m", f"\x1b[01;31m\x1b[K{key[:4]}\x1b[m\x1b[K{key[4:]}"):
                clean = redact(text.replace(key, coloured), {"MY_SECRET": key} if len(key) >= SHORTEST else {})
                assert key not in printable(clean), form.kind


def test_a_key_in_colours_is_hidden_and_other_lines_keep_theirs():
    text = "\x1b[36mapi_key\x1b[0m=\x1b[32mabcdefgh1234\x1b[0m\n\x1b[1mloss\x1b[0m 3.4\r\n"

    assert redact(text, {}) == f"api_key={HIDDEN}\n\x1b[1mloss\x1b[0m 3.4\r\n"


@pytest.mark.parametrize("user", ["api:", "", "somebody:", "a-long-name-of-a-user:"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_known_value_is_found_in_base64_with_any_text_around_it(user, encode):
    key = "0123456789abcdef?>~ correct horse"
    for after in ("", ":", "xy", "xyz"):
        encoded = encode(f"{user}{key}{after}".encode()).decode()

        clean = redact(f"Proxy echoed {encoded}, sorry", {"WANDB_API_KEY": key})

        assert clean == f"Proxy echoed {HIDDEN}, sorry"


def in_lower_case(key):
    return re.sub("%..", lambda match: match[0].lower(), quote(key))


def ascii_of(key):
    return ascii(key)[1:-1]


@pytest.mark.parametrize(
    "spell",
    [
        *(str, quote, quote_plus, lambda key: quote(key, safe=""), in_lower_case),
        *(lambda key: json.dumps(key)[1:-1], lambda key: json.dumps(json.dumps(key))[3:-3]),
        *(html.escape, lambda key: repr(key)[1:-1], lambda key: repr(key.encode())[2:-1], ascii_of),
        *(lambda key: shlex.quote(key)[1:-1], lambda key: key.encode().hex(), lambda key: key.encode().hex().upper()),
    ],
)
def test_a_known_value_is_found_in_every_usual_spelling(spell):
    key = "two words/and\"quotes' <é>"

    assert redact(f"x={spell(key)}!", {"MY_SECRET": key}) == f"x={HIDDEN}!"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("PGPASSWORD", "correct-horse"),
            ("SMTP_PW", "correct-horse"),
            ("MY_TOKEN", '"correct-horse"\n'),
            ("AWS_SECRET_ACCESS_KEY", "correct-horse"),
            ("MYSQL_PWD", "correct-horse"),
            ("SSHPASS", "correct-horse"),
            ("API_KEYS", "correct-horse"),
            ("HF_TOKEN_2", "correct-horse"),
            ("HF_TOKEN2", "correct-horse"),
            ("MY_JWT", "correct-horse"),
            ("DB_CREDS", "correct-horse"),
            ("MIRROR", "https://you:correct%2Dhorse@example.org"),
        ],
        ("DATABASE_URL", "postgresql://you:correct-horse@db/runs"),
        ("SMTP_PW", "correct-horse"),
        ("MY_TOKEN", " 'correct-horse'\n"),
        ("REGISTRY_AUTH", "you:correct-horse"),
        ("GOOGLE_CREDENTIALS", '{"x": [{"client_secret": "correct-horse"}]}'),
        ("DEPLOY_KEY", "-----BEGIN KEY-----\ncorrect-horse\n-----END KEY-----"),
    ],
)
def test_variables_that_hold_keys_in_other_ways(name, value):
    assert redact("it is correct-horse.", {name: value}) == f"it is {HIDDEN}."


@pytest.mark.parametrize(
    "name", ["PWD", "SSH_AUTH_SOCK", "WANDB_IDENTITY_TOKEN_FILE", "TOKENIZERS_PARALLELISM", "HOME", "KEYBOARD"]
)
def test_variables_that_hold_none(name):
    assert redact("/somewhere/else is fine", {name: "/somewhere/else"}) == "/somewhere/else is fine"


def test_numbers_of_tokens_stay():
    counts = {"MAX_TOKENS": "100000000", "SHARD_TOKENS": "10000000,20000000", "TOKENS_PER_PARAM": "20.5,1e3,1M"}

    assert [redact(text, counts) for text in counts.values()] == [*counts.values()]


def test_an_existing_path_is_not_a_key(tmp_path):
    assert redact(f"results in {tmp_path}", {"MY_SECRET": str(tmp_path)}) == f"results in {tmp_path}"


def test_records_are_redacted_but_their_names_numbers_and_settings_stay():
    environment = {"DB_PASSWORD": "finished", "MY_TOKEN": "correct-horse-7"}
    record = {
        "status": "finished",
        "reason": "login as finished failed: correct-horse-7",
        "joules_per_token": 4.123456789,
        "log": ["token: secret", {"path": "/data/finished runs", "id": "correct-horse-7"}],
        "symbols": {"GPT2_SAMPLE_PROMPT": "password = abracadabra1 |finished that"},
        "train": {"data_path": "/data/correct-horse-7/x"},
        "none": None,
        "code_files": {f"gpt2/{HF}.py": "0123"},
    }

    assert redact_json(record, environment) == {
        "status": "finished",
        "reason": f"login as {HIDDEN} failed: {HIDDEN}",
        "joules_per_token": 4.123456789,
        "log": ["token: secret", {"path": "/data/finished runs", "id": HIDDEN}],
        "symbols": {"GPT2_SAMPLE_PROMPT": "password = abracadabra1 |finished that"},
        "train": {"data_path": "/data/correct-horse-7/x"},
        "none": None,
        "code_files": {f"gpt2/{HIDDEN}.py": "0123"},
    }


def test_the_password_of_netrc_is_known(tmp_path):
    path = tmp_path / "logins"
    path.write_text("machine a login b password correct-horse\n")

    assert redact("it is correct-horse", {"NETRC": str(path)}) == f"it is {HIDDEN}"
    path.write_text("machine a\n broken { password battery-staple")
    assert redact("it is battery-staple", {"NETRC": str(path)}) == f"it is {HIDDEN}"


def test_a_variable_may_have_any_bytes(tmp_path):
    environment = {"MY_TOKEN": "correct\udcffhorse", "NETRC": str(tmp_path)}

    assert redact("it is correct\udcffhorse", environment) == f"it is {HIDDEN}"
    assert redact_json({"reason": "it is correct\udcffhorse"}, environment) == {"reason": f"it is {HIDDEN}"}
