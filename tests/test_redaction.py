"""Recognize keys by their form and by the names of their variables, and redact them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kmatrix.cli.commands import COMMANDS
from kmatrix.kconfig.assignments import SETS
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import ALIASES
from kmatrix.redaction import HIDDEN, is_key, is_key_name, redact
from programs import ROOT, Program

HF = "hf_" + "aB3" * 12
WANDB = "wandb_v1_" + "c" * 40
OLD = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "TRACKIO_WRITE_TOKEN", "MY_PASSWORD", "token"])
def test_a_variable_with_such_a_name_is_a_secret(name):
    assert is_key_name(name)


@pytest.mark.parametrize("name", ["TOKENS", "MAX_TOKENS", "KEEP_EVERY", "GPT2_TOKENIZER", "MONKEY", "HOME"])
def test_other_names_are_not_secrets(name):
    assert not is_key_name(name)


def test_no_symbol_or_argument_is_mistaken_for_a_key():
    symbols = {symbol.name for symbol in Tree.parse(srctree=ROOT).symbols}
    arguments = {name for command in COMMANDS.values() for name in command.takes}

    assert {name for name in symbols | {*ALIASES, *SETS} if is_key_name(name)} == set()
    assert {name for name in arguments if is_key_name(name)} <= {"SHOW_TOKEN"}


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


@pytest.mark.parametrize("line", [f"PROJECT={OLD}", f"WANDB_ENTITY={WANDB}", f"RESULTS_DIR={HF}"])
def test_a_key_in_a_configuration_is_refused_and_not_repeated(tmp_path, line):
    program = Program(tmp_path)

    message = program.refused("defconfig-gpt2-cpu-quick", line)

    assert "would contain a key" in message
    assert line.partition("=")[2] not in message


def test_a_key_in_a_file_is_refused_with_its_line_and_not_repeated(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_SEED=1", f'CONFIG_WANDB_ENTITY="{WANDB}"')

    message = program.refused("olddefconfig")

    assert ".config:2: CONFIG_WANDB_ENTITY would contain a key" in message
    assert WANDB not in message


def test_a_process_that_redacts_its_output_prints_no_key():
    code = "from kmatrix.redaction import redact_output; redact_output(); import sys; print('a', sys.argv[1]); 1 / 0"
    environment = {**os.environ, "SOME_TOKEN": "correct-horse", "PYTHONPATH": str(ROOT / "lib")}

    completed = subprocess.run(
        [sys.executable, "-c", code, "correct-horse"], env=environment, capture_output=True, text=True, check=False
    )

    assert completed.stdout == f"a {HIDDEN}\n"
    assert "ZeroDivisionError" in completed.stderr
