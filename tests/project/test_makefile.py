"""Every target of the Makefile is one call of the program with exactly the typed arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kmatrix.cli.commands import ALIASES, COMMANDS, GROUPS, find_command
from pages import make_targets
from programs import ROOT, Program
from skips import require_program

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CLEAN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make in the project with this interpreter instead of .venv."""
    environ = {name: value for name, value in os.environ.items() if name not in CLEAN} | environment
    command = [str(require_program("make")), "--no-print-directory", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def program(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_DEVICE_CPU=y", "CONFIG_GPT2_NUM_GPUS=1")
    return program


def test_every_command_has_a_target_that_calls_it():
    names = sorted({*COMMANDS, *ALIASES})
    lines = make("-n", *names, "DEFCONFIG=x").stdout.splitlines()
    called = [
        line.rpartition(" -m kmatrix --make ")[2].split()[0].strip("'")
        for line in lines
        if " -m kmatrix --make " in line
    ]

    assert sorted(called) == names


def test_make_alone_prints_the_help_of_every_target():
    out = make().stdout

    assert out.startswith("usage: make TARGET")
    for name, command in ((name, command) for group in GROUPS.values() for name, command in group.items()):
        assert re.search(rf"^  {re.escape(name)} +{re.escape(command.help[:40])}", out, re.MULTILINE), name


def test_the_help_lists_the_targets_of_the_makefile():
    documented = {name for group in GROUPS.values() for name in group if "<" not in name}
    patterns = {target for target in make_targets() if "%" in target or target.startswith((".", "defconfig-"))}
    other = {"Makefile", "constraints.txt", "pyproject.toml"}
    found = make_targets() - patterns - other - {target for target in make_targets() if target.endswith("_defconfig")}

    assert found == documented | set(ALIASES)


def test_the_help_needs_no_third_party_package():
    result = subprocess.run(
        [sys.executable, "-S", "-m", "kmatrix", "help"],
        env={"PYTHONPATH": str(ROOT / "lib")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.stdout.startswith("usage: kmatrix COMMAND"), result.stderr


def test_arguments_reach_the_program_and_environment_variables_do_not(program):
    output_dir = f"O={program.folder}"
    plain = make("test-matrix-dry-run", output_dir)
    assert plain.returncode == 0, plain.stderr

    same = make(
        "test-matrix-dry-run", output_dir, MAX_ITERS="5", GPT2_SEED="3", OPTIMIZER="sgd", KCONFIG_CONFIG="/nowhere"
    )
    other = make("test-matrix-dry-run", output_dir, "MAX_ITERS=5")

    assert same.stdout == plain.stdout
    assert other.stdout != plain.stdout


@pytest.mark.parametrize("flags", [["-j2"], ["V=1"], ["-k", "-s"], ["-j2", "V=1", "--no-builtin-rules"]])
def test_flags_of_make_have_no_effect_on_the_command(program, flags):
    plain = make("test-matrix-dry-run", f"O={program.folder}", "SEED=1,2")
    result = make(*flags, "test-matrix-dry-run", f"O={program.folder}", "SEED=1,2")

    assert [line for line in result.stdout.splitlines() if "-m kmatrix" not in line] == plain.stdout.splitlines()


@pytest.mark.parametrize(
    "text", ["two words", "it's", 'say "x"', "a$b", "a#b", "a,b", r"back\slash", "ünïcode", "a=b", "$(x)"]
)
def test_every_character_of_a_value_survives_make(program, text):
    result = make("olddefconfig", f"O={program.folder}", f"RESULTS_DIR={text}")

    assert result.returncode == 0, result.stderr
    expected = text.replace("\\", "\\\\").replace('"', '\\"')
    assert program.value("RESULTS_DIR") == f'"{expected}"'


@pytest.mark.parametrize("target", ["defconfig", "defconfig-gpt2-cpu-quick", "gpt2-cpu-quick_defconfig"])
def test_configuration_targets_write_to_the_requested_path(tmp_path, target):
    assert make(target, f"O={tmp_path}/o").returncode == 0
    assert make(target, f"KCONFIG_CONFIG={tmp_path}/own").returncode == 0
    assert (tmp_path / "o" / ".config").read_bytes() == (tmp_path / "own").read_bytes()


def test_a_directory_with_spaces_is_accepted(tmp_path):
    output_dir = tmp_path / "my results"

    assert make("defconfig", f"O={output_dir}").returncode == 0
    assert (output_dir / ".config").is_file()


def test_another_kconfig_file_is_used(tmp_path):
    kconfig = tmp_path / "K"
    kconfig.write_text('config A\n\tbool "a"\n\tdefault y\n', encoding="utf-8")
    options = [f"KCONFIG={kconfig}", f"O={tmp_path}"]

    assert make("defconfig", *options).returncode == 0
    assert make("olddefconfig", *options).returncode == 0
    assert make("savedefconfig", *options, f"DEFCONFIG={tmp_path}/saved").returncode == 0
    assert make("defconfig", *options, f"DEFCONFIG={tmp_path}/saved").returncode == 0
    assert (tmp_path / ".config").read_text(encoding="utf-8").splitlines()[-1].endswith(("CONFIG_A=y", "A is not set"))


@pytest.mark.parametrize(
    ("arguments", "config", "installed"),
    [
        (["TRACKER=wandb"], "", True),
        (["TRACKER=none"], "CONFIG_TRACKER_WANDB=y", False),
        ([], "CONFIG_TRACKER_TRACKIO=y", True),
        ([], "# CONFIG_TRACKER_WANDB is not set", False),
        ([], 'CONFIG_TRACKER_PROJECT="y"', False),
    ],
)
def test_a_target_that_uses_a_tracker_installs_it_first(tmp_path, arguments, config, installed):
    (tmp_path / ".config").write_text(config + "\n", encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if name not in CLEAN} | {"TRACKER": "all"}

    # -W pretends that the packages changed; otherwise make would not list what is already installed
    lines = subprocess.run(
        [str(require_program("make")), "-n", "-W", "pyproject.toml", "test-matrix", f"O={tmp_path}", *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert ("scripts/setup.sh trackers" in lines) is installed


def test_an_error_of_the_program_fails_the_target(program):
    result = make("test-matrix-dry-run", f"O={program.folder}", "MAX_ITER=5")

    assert result.returncode == 2
    assert "did you mean MAX_ITERS" in result.stderr
    assert "Error 2" in result.stderr


def test_each_defconfig_is_a_target_that_the_shell_can_complete():
    database = make("-pn", "help").stdout

    for path in (ROOT / "defconfigs").iterdir():
        if path.is_file():
            assert f"\ndefconfig-{path.name}:" in database
            assert f"\n{path.name}_defconfig:" in database


def test_no_variable_of_the_makefile_has_the_name_of_a_symbol():
    from kmatrix.kconfig.tree import Tree

    used = set(re.findall(r"^(?:override (?:define )?)?(\w+)\s*[:?]?=", MAKEFILE, re.MULTILINE))
    names = {name for symbol in Tree.parse(srctree=ROOT).symbols for name in (symbol.name, symbol.name[5:])}

    assert not used & names
    assert used >= {"PY", "KMATRIX"}


def test_cleaning_keeps_results(tmp_path):
    lines = make("-n", "mrproper").stdout

    for kept in ("test_matrix_results", "checkpoint", "data/", "*.bin"):
        assert kept not in lines


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


def test_an_unknown_target_is_answered_with_similar_ones():
    completed = make("test-matrx", "MAX_ITERS=5")
    assert completed.returncode == 2
    assert "error: unknown command test-matrx" in completed.stderr
    assert "did you mean test-matrix" in completed.stderr


def test_an_unknown_target_does_not_reach_a_shell(tmp_path):
    completed = make(f"x;touch {tmp_path}/made '`touch {tmp_path}/made`")
    assert completed.returncode == 2
    assert not (tmp_path / "made").exists()


def test_a_line_break_in_an_argument_is_refused_and_does_not_end_it(tmp_path, program):
    completed = make("train", f"RESULTS_DIR={tmp_path}/a" + chr(10) + "b", f"O={program.folder}")
    assert completed.returncode == 2
    assert "control characters are not allowed" in completed.stderr
    assert "a\\nb" in completed.stderr
    assert not (tmp_path / "a").exists()


def test_train_takes_detach():
    assert "DETACH" in find_command("train").names
