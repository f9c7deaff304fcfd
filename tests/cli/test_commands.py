"""Commands of the program: arguments, variables of make, and exit statuses."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kmatrix.cli.commands as cli
from kmatrix.cli import run as running
from kmatrix.cli.commands import ALIASES, COMMANDS, find_command, from_make_words, parse
from kmatrix.errors import ConfigError
from programs import ROOT, Program, run
from records_factory import FakeRun, make_matrix

HEAVY = ("torch", "numpy", "matplotlib", "rich", "transformers", "pynvml", "psutil")


def program(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program in its own process."""
    environ = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environ |= {"PYTHONPATH": f"{ROOT / 'lib'}:{ROOT}", **environment}
    start = ["-c", code] if code else ["-m", "kmatrix"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_every_command_has_a_function_and_a_help_text():
    for name, command in COMMANDS.items():
        module, _, function = command.handler.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name
        assert command.help in cli.usage("make TARGET"), name
    assert run("help").out.startswith("usage: kmatrix COMMAND")
    assert run().status == 0


def test_a_command_has_the_names_of_the_documents_and_each_form_of_defconfig():
    assert parse("test_matrix", [])[1].target == "test-matrix"
    assert set(ALIASES.values()) <= set(COMMANDS)
    for target in ("defconfig-x", "x_defconfig", "defconfig-x+y"):
        assert find_command(target) is COMMANDS["defconfig"]


def test_an_unknown_command_is_refused_with_the_closest_match():
    with pytest.raises(ConfigError, match="hint: did you mean test-matrix"):
        find_command("test-matrx")


def test_arguments_and_assignments_of_a_command_are_separated():
    _, given = parse("test-matrix", ["GPUS=0,2", "MAX_ITERS=5", "O=out", "DETACH=1"])

    assert given.values == {"GPUS": "0,2", "O": "out", "DETACH": "1"}
    assert given.words == ["MAX_ITERS=5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["savedefconfig", "MAX_ITERS=4"], "savedefconfig does not take MAX_ITERS"),
        (["summary", "TARGT=x"], "did you mean TARGET?"),
        (["status", "JSON=yes"], "invalid JSON=yes\n  why: expected 1 or 0"),
        (["serve", "PORT=65536"], "invalid PORT=65536\n  why: expected an integer from 0 to 65535"),
        (["sample", "TOKENS=many"], "invalid TOKENS=many"),
        (["compare", "FAIL_ON=better"], "invalid FAIL_ON=better\n  why: expected worse"),
        (["summary", "foo"], "'foo' is not NAME=value"),
        (["test-matrix", "MAX_ITERS=1", "MAX_ITERS=2"], "MAX_ITERS is given twice"),
        (["nothing"], "unknown command nothing"),
        (["test-matrix-dry-run", "V=1"], "unknown symbol V"),
        (["test-matrix-dry-run", "CONFIG_GPT2_MAX_ITERS=3"], "did you mean MAX_ITERS?"),
        (["test-matrix-dry-run", "MAX_ITERS=1,000"], "decimal digits without leading zeros"),
        (["diffconfig", "O=/nowhere"], "/nowhere/.config.old not found"),
        (["reproduce"], "reproduce needs a run"),
        (["reproduce", "RUN=/tmp"], "is not a run directory"),
        (["train", "OPTIMIZER=sgd,adamw"], "train runs one configuration"),
    ],
)
def test_an_invalid_call_is_refused_with_status_2(tmp_path, arguments, message):
    Program(tmp_path).check("defconfig")
    result = Program(tmp_path)(*arguments)

    assert result.status == 2
    assert message in result.err


def test_a_matrix_is_found_while_its_configuration_has_lines_that_are_refused(tmp_path):
    """Of .config, these commands need RESULTS_DIR alone."""
    results = tmp_path / 'my "results"'
    results.mkdir()
    make_matrix(results, [FakeRun(), FakeRun(status="failed", optimizer="muon")])
    escaped = str(results).replace('"', '\\"')
    lines = f'CONFIG_NO_SUCH=1\nCONFIG_RESULTS_DIR="{escaped}"\n<<<<<<< mine\n'
    (tmp_path / ".config").write_text(lines, encoding="utf-8")

    for command in ("status", "estimate", "summary", "logs"):
        result = run(command, f"O={tmp_path}")
        assert (result.status, "error" in result.err) == (0, False), command
    assert f"no matrix is running in {results}" in run("stop", f"O={tmp_path}").err
    for command in ("hold", "release"):
        assert "gpt2_muon_1cpu" in run(command, "RUN=*muon*", f"O={tmp_path}").out, command
    assert "unknown symbol NO_SUCH" in run("olddefconfig", f"O={tmp_path}").err


def test_what_a_user_can_fix_is_an_error_a_bug_keeps_its_traceback_and_ctrl_c_ends(tmp_path, monkeypatch):
    for raised, status, message in (
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/results/x"), 2, "a disk is full"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "/results/x"), 2, "Permission denied: /results/x"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/results/x"), 2, "Input/output error: /results/x"),
        (ZeroDivisionError(), 70, "ZeroDivisionError"),
        (KeyboardInterrupt(), 130, "stopped"),
    ):

        def fail(*_, raised=raised):
            raise raised

        monkeypatch.setattr("kmatrix.cli.configure.overrides", fail)
        result = Program(tmp_path)("defconfig")
        assert (result.status, "Traceback" in result.err) == (status, status == 70)
        assert message in result.err
        assert "Errno" not in result.err
        assert ("/results/x" in result.err) == (status == 2)


# The words of a make command line as make 4.3 keeps them, and as the user typed them.
WORDS = [
    ("", []),
    ("V=1 MAX_ITERS=5", ["MAX_ITERS=5", "V=1"]),
    (r"NAME=two\ words", ["NAME=two words"]),
    ("NAME=it's", ["NAME=it's"]),
    ('NAME="quoted"', ['NAME="quoted"']),
    ("NAME=a$$b", ["NAME=a$b"]),
    ("NAME=a#b,c", ["NAME=a#b,c"]),
    (r"NAME=a\\b", [r"NAME=a\b"]),
]


def test_the_variables_of_the_make_command_line_are_parsed():
    for text, arguments in WORDS:
        assert from_make_words(text) == arguments
    # Those of make itself are no assignments.
    _, given = parse("test-matrix", ["V=1", "PYTHON=python3", "TORCH_INDEX=x"], from_make=True)

    assert given.assignments == {}


@pytest.mark.process
def test_configuration_and_the_dry_run_import_nothing_heavy_and_return_their_status_to_the_shell(tmp_path):
    code = f"""
import sys
from kmatrix.cli.commands import main
from kmatrix.output import run_program
first, saved = "DEFCONFIG=gpt2-cpu-quick", "DEFCONFIG={tmp_path}/saved"
for words in (["defconfig", first], ["olddefconfig"], ["savedefconfig", saved], ["list-defconfigs"]):
    assert main([*words, "O={tmp_path}"]) == 0, words
    assert not {{*{HEAVY}}} & set(sys.modules), words
assert main(["test-matrix-dry-run", "O={tmp_path}"]) == 0
assert not {{"torch", "numpy", "matplotlib"}} & set(sys.modules)
sys.exit(run_program(lambda: main(["test-matrix-dry-run", "MAX_ITER=5", "O={tmp_path}"])))
"""
    result = program(code=code)

    assert result.returncode == 2
    assert "did you mean MAX_ITERS" in result.stderr
    assert "Traceback" not in result.stderr


def test_list_defconfigs_prints_the_first_comment_of_each():
    out = run("list-defconfigs").out

    for path in (ROOT / "defconfigs").iterdir():
        if path.is_file():
            assert f"make defconfig-{path.name} " in out
            assert path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") in out
    assert all(f"+{path.stem}" in out for path in (ROOT / "defconfigs" / "fragments").iterdir())


def test_paths_are_printed_relative_to_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert "configuration written to out/.config" in run("defconfig", "O=out").out
    assert Path("out/.config").is_file()


LONG = "x" * 300  # more than a name may have


@pytest.mark.parametrize(
    "words",
    [
        ("status", f"TARGET={LONG}"),
        ("status", "TARGET=~nobody-has-this-name/x"),
        ("status", "RESULTS_DIR=~nobody-has-this-name/x"),
        ("status", "STATUS=,,", "TARGET={matrix}"),
        ("logs", "TARGET={matrix}", f"RUN={LONG}"),
        ("continue", "TARGET={matrix}", f"RESUME={LONG}"),
        ("continue", "TARGET={matrix}", "BUDGET_HOURS=\u0663"),
        ("continue", "TARGET={matrix}", f"BUDGET_HOURS={'9' * 30}"),
        ("continue", "TARGET={matrix}", f"SIMULATE={LONG}"),
        ("sample", f"CHECKPOINT={LONG}"),
        ("sample", "TARGET={matrix}", f"TOKENS={'9' * 30}"),
        ("test-matrix-dry-run", "KCONFIG_CONFIG={loop}"),
        ("plan", "O={folder}", f"DATA_DIR={LONG}"),
        ("test-matrix-dry-run", "O={folder}", "DATA_DIR=~nobody-has-this-name/x"),
        ("test-matrix-dry-run", "O={folder}", "INIT_FROM=~nobody-has-this-name/x"),
    ],
    ids=lambda words: " ".join(word[:30] for word in words),
)
def test_a_value_that_nothing_can_have_is_one_error(words, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "need_torch", lambda: None)
    matrix = make_matrix(tmp_path, [FakeRun()]).path
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / ".config").write_text("CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_GPT2_NUM_GPUS=1\n")
    result = run(*(word.format(matrix=matrix, loop=tmp_path / "loop", folder=tmp_path) for word in words))
    assert (result.status, result.err.count("error: ")) == (2, 1), result.err[-2000:]
    assert "Traceback" not in result.err
