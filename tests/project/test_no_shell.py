"""No text of a user reaches a shell: not in the Makefile, not in the scripts, not in the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from kmatrix.cli.commands import from_makeflags
from programs import ROOT
from skips import require_program

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Variables of the Makefile that hold no text of a user, or hold it quoted.
QUOTED = {"OURS", "PY", "Q", "KMATRIX", "QUIET_MAKE", "CONTROL"}
# Names that the Makefile uses or defines, those of make itself, and any other.
NAMES = {
    *re.findall(r"\$\(([.\w]+)\)", MAKEFILE),
    *re.findall(r"(?m)^(?:override )?(?:define )?([.\w]+) [:?]?=", MAKEFILE),
    *("KCONFIG_CONFIG", "O", "V", "TRACKER", "PYTHON", "TORCH_INDEX", "KMATRIX_BASE_PYTHON"),
    *("PART", "ON", "PEER"),
    *("TARGET", "RESULTS_DIR", "MAKE", "MAKECMDGOALS", "MAKEOVERRIDES", "MFLAGS", "VPATH", "GPATH", "CURDIR", "SHELL"),
}
CODE = [path for folder in ("lib", "gpt2", "scripts", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
SHELL_CALLS = {"system", "popen", "getoutput", "getstatusoutput"}
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash"}


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make in the project, without a .venv. variables: more of the environment."""
    command = [str(require_program("make")), "--no-print-directory", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_the_makefile_calls_no_shell_by_itself():
    assert "$(shell" not in re.sub(r"(?m)^#.*", "", MAKEFILE)
    assert "!=" not in MAKEFILE


def test_every_variable_in_a_recipe_is_quoted_or_holds_no_text_of_a_user():
    recipes = [line for line in MAKEFILE.splitlines() if line.startswith("\t")]
    recipes += [line for line in MAKEFILE.splitlines() if re.match(r"override (OURS|PY|KMATRIX|QUIET_MAKE) :?=", line)]
    wrong = []
    for line in recipes:
        rest = line
        # The innermost references first, until none is left.
        while match := re.search(r"\$\(([^()$]*)\)", rest):
            inside = match[1]
            fixed = inside in QUOTED or inside.startswith(("call quote,", "if ,", "or ,", "wildcard .venv", "filter "))
            if not fixed and not re.search(r"\$\(call quote,[^()]*" + re.escape(match[0]), rest):
                wrong.append(f"{match[0]} in {line.strip()}")
            rest = rest.replace(match[0], "")
        wrong += [f"$@ in {line.strip()}"] if re.search(r"\$[@<^?+](?!\))", line) else []
    assert not wrong, wrong


def test_the_code_starts_programs_without_a_shell():
    found = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                owner = getattr(getattr(node.func, "value", None), "id", "")
                found += [f"{where}: {owner}.{name}"] if owner in ("os", "subprocess") and name in SHELL_CALLS else []
                found += [f"{where}: shell=" for keyword in node.keywords if keyword.arg == "shell"]
            if isinstance(node, ast.List | ast.Tuple) and node.elts and isinstance(node.elts[0], ast.Constant):
                found += [f"{where}: {node.elts[0].value}"] if node.elts[0].value in SHELLS else []
    assert not found, "\n".join(found)


def test_the_set_up_script_evaluates_no_text():
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert not re.search(r"\b(eval|sh -c|bash -c)\b", script)
    # Outside quotes, the shell splits a value and expands its patterns; these hold words of the script itself.
    code = re.sub(r"(?m)(^|\s)#.*$", "", script.partition("<<'SCRIPT'")[0])
    assigned = {"KMATRIX_BASE_PYTHON"}  # in an assignment, nothing is split
    unquoted = re.sub(r"'[^']*'|\"(?:\\.|[^\"])*\"", "", code)
    assert set(re.findall(r"\$\{?(\w+)", unquoted)) <= {"stage", "quiet", "1", "path", *assigned}


@pytest.mark.parametrize("values", ["command line", "environment"])
def test_a_value_is_one_word_whatever_its_name(tmp_path, values):
    """PYTHON is the program that is run, and fast. -i: a command that fails does not protect the next ones."""
    ran = tmp_path / "ran"
    hostile = [
        f"$(shell touch {ran})$$(touch {ran})`touch {ran}`&touch {ran}",
        f"x'; touch {ran}; '\"; touch {ran}; \"",
        f"x\n\ttouch {ran}\n'\ntouch {ran}\n",
    ]
    assert {"Q", "PY", "CHOSEN", "CONTROL", "quote", ".SHELLFLAGS"} <= NAMES
    for name in sorted(NAMES):
        for value in hostile:
            if values == "command line":
                make("-i", "PYTHON=true", f"{name}={value}", "help", "doctor")
            else:
                make("-i", "PYTHON=true", "help", "doctor", **{name: value})
            assert not ran.exists(), (name, value)


def test_no_value_starts_another_program_in_the_recipes_of_the_environment(tmp_path):
    """Without PYTHON, the stages of .venv are made. Nothing is: make only prints, and expands what it would run."""
    hostile = dict.fromkeys(NAMES - {"MAKEFLAGS", "MFLAGS"}, f"$(shell touch {tmp_path / 'ran'})")
    words = [f"{name}={value}" for name, value in hostile.items() if name != "PYTHON"]
    make("-n", "-B", "check", "trackio-view", *words)
    make("-n", "-B", "-e", "check", "trackio-view", **hostile)
    assert not (tmp_path / "ran").exists()


def test_values_reach_the_program_as_they_were_typed(tmp_path):
    texts = ["$(shell echo no)", "$HOME", "$$", "$", "a#b", "it's", 'say "x"', "two  words", "back\\slash", "%*"]
    words = [f"NAME{number}={text}" for number, text in enumerate(texts)]
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nprintf "%s" "$MAKEFLAGS"\n')
    show.chmod(0o755)
    assert from_makeflags(make(f"PYTHON={show}", *words, "doctor").stdout) == [f"PYTHON={show}", *words]


def test_a_hostile_target_is_one_word(tmp_path):
    ran = tmp_path / "ran"
    for target in (f"defconfig-`touch\t{ran}`", f"defconfig-x'&touch\t{ran}&'", f"defconfig-$$(touch\t{ran})"):
        make(f"PYTHON={sys.executable}", target)
    assert not ran.exists()


def test_the_trackers_of_a_configuration_are_found_without_a_shell(tmp_path):
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    (folder / ".config").write_text('CONFIG_TRACKER_WANDB=y\nCONFIG_TRACKER_PROJECT="y"\n# CONFIG_TRACKER_TRACKIO=y\n')
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\nshow:\n\t@echo 'chosen: $(CHOSEN)'\n")

    def chosen(*arguments):
        return make("-C", str(ROOT), "-f", str(tmp_path / "Makefile"), "show", "PYTHON=x", *arguments).stdout

    assert "chosen: CONFIG_TRACKER_WANDB=y" in chosen(f"O={folder}")
    assert chosen("O=/nowhere").strip() == "chosen:"
    assert chosen(f"KCONFIG_CONFIG={tmp_path}").strip() == "chosen:"
