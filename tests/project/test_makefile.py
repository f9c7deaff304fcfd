"""A target of the Makefile is one call of the program with exactly the typed arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kmatrix.cli.commands import ALIASES, COMMANDS, GROUPS
from kmatrix.kconfig.tree import Tree
from pages import make_targets
from programs import ROOT, Program
from skips import require_program

pytestmark = pytest.mark.process

CLEAN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
MINE = f"PYTHON={sys.executable}"  # this interpreter instead of .venv


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make in the project."""
    environ = {name: value for name, value in os.environ.items() if name not in CLEAN} | environment
    command = [str(require_program("make")), "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=120)


def test_every_command_and_every_target_of_the_help_is_a_target():
    names = sorted({*COMMANDS, *ALIASES})
    lines = make("-n", MINE, *names).stdout.splitlines()
    called = [match[1] for line in lines if (match := re.search(r" -m kmatrix --make '(.*)'$", line))]
    patterns = {target for target in make_targets() if target.startswith((".", "defconfig-"))}
    patterns |= {target for target in make_targets() if target.endswith("_defconfig")}

    assert sorted(called) == names
    listed = {name for group in GROUPS.values() for name in group}
    assert make_targets() - patterns - {"Makefile", "constraints.txt", "pyproject.toml"} == listed | set(ALIASES)


def test_make_alone_prints_the_help_of_every_target_without_any_package():
    result = subprocess.run(
        [sys.executable, "-S", "-m", "kmatrix", "help"],
        env={"PYTHONPATH": str(ROOT / "lib")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.stdout.startswith("usage: kmatrix COMMAND"), result.stderr
    printed = make(MINE).stdout
    for name, command in ((name, command) for group in GROUPS.values() for name, command in group.items()):
        assert re.search(rf"^  {re.escape(name)} +{re.escape(command.help[:40])}", printed, re.MULTILINE), name


def test_a_copied_checkout_runs_its_own_code_without_a_venv_for_the_help_or_with_python(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    code = tmp_path / "lib" / "kmatrix"
    code.mkdir(parents=True)
    (code / "__init__.py").touch()
    (code / "__main__.py").write_text("import sys\nprint('own code', *sys.argv[1:])\n", encoding="utf-8")
    for words, target in (((), "help"), (("test-matrx",), "test-matrx"), (("train", "wandb-test", MINE), "train")):
        result = make("-C", str(tmp_path), *words, PYTHONPATH=str(ROOT / "lib"))
        assert result.stdout.startswith(f"own code --make {target}\n"), result.stderr
    assert not (tmp_path / ".venv").exists()


def test_each_value_arrives_as_it_was_typed_and_flags_of_make_and_the_environment_do_not(tmp_path):
    texts = [
        "two  words",
        "it's",
        'say "x"',
        "a$b",
        "$HOME",
        "$(",
        f"$(shell touch {tmp_path}/ran)",
        "a#b",
        r"a\b",
        "ü=",
    ]
    program = Program(tmp_path / "a folder's")
    (tmp_path / "a folder's").mkdir()
    for flags, environ in (([], {}), (["-j2", "-k"], {}), (["-e"], {}), (["-B", "V=1"], {}), ([], {"MAKEFLAGS": "e"})):
        typed = {"RESULTS_DIR": texts.pop(0), "DATA_DIR": texts.pop(0)}
        words = [f"{name}={text}" for name, text in typed.items()]
        result = make(*flags, MINE, "defconfig", f"O={program.folder}", *words, MAX_ITERS="5", **environ)

        assert result.returncode == 0, result.stderr
        for name, text in typed.items():
            escaped = text.replace("\\", "\\\\").replace('"', '\\"')
            assert program.value(name) == f'"{escaped}"'
        assert program.value("GPT2_MAX_ITERS") == "10000"
    assert not (tmp_path / "ran").exists()


def test_each_defconfig_is_a_target_that_the_shell_can_complete_and_writes_to_the_requested_path(tmp_path):
    database = make("-pn", MINE, "help").stdout

    for path in (ROOT / "defconfigs").iterdir():
        if path.is_file():
            assert f"\ndefconfig-{path.name}:" in database
            assert f"\n{path.name}_defconfig:" in database
    assert make(MINE, "defconfig-gpt2-cpu-quick", f"O={tmp_path}/o").returncode == 0
    assert make(MINE, "gpt2-cpu-quick_defconfig", f"KCONFIG_CONFIG={tmp_path}/own").returncode == 0
    assert (tmp_path / "o" / ".config").read_bytes() == (tmp_path / "own").read_bytes()


def test_an_error_of_the_program_or_an_unknown_target_fails(tmp_path):
    for target, message in (("defconfig", "did you mean MAX_ITERS"), ("test-matrx", "did you mean test-matrix")):
        result = make(MINE, target, f"O={tmp_path}", "MAX_ITER=5", "-e")

        assert result.returncode == 2
        assert message in result.stderr
        assert "Error 2" in result.stderr


def test_no_variable_of_the_makefile_has_the_name_of_a_symbol_or_of_an_argument():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = set(re.findall(r"^(\w+)\s*[:+]?=", text, re.MULTILINE))
    names = {name for symbol in Tree.parse(srctree=ROOT).symbols for name in (symbol.name, symbol.name[5:])}
    names |= {name for command in COMMANDS.values() for name in command.takes}

    assert not used & names
    assert used >= {"PY", "KMATRIX"}


def test_setup_refuses_an_old_python_in_one_sentence(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    environment = {**os.environ, "KMATRIX_BASE_PYTHON": str(old)}

    result = subprocess.run(
        ["sh", "scripts/setup.sh", "core"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert result.returncode == 2
    assert "kmatrix needs Python 3.11 or newer" in result.stderr
