"""menuconfig in a terminal (tmux), with unusual locales and terminals, and without a terminal."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kmatrix.kconfig.assignments import explicit_names
from programs import ROOT, Program
from tmux_screen import Tmux
from waiting import wait_until


class Screen:
    """A terminal of 100 x 40 that runs menuconfig."""

    def __init__(self, folder, **environment):
        environment |= {"PYTHONPATH": str(ROOT / "lib")}
        plainly = ("env", "-u", "MAKEFLAGS", "-u", "KCONFIG_CONFIG")
        command = (*plainly, sys.executable, "-m", "kmatrix", "menuconfig", f"O={folder}")
        self.tmux = Tmux(Path(tempfile.mkdtemp(dir=folder)), (100, 40), environment, *command)

    def text(self):
        return self.tmux.screen()

    def keys(self, *names):
        self.tmux("send-keys", *names)

    def wait(self, expected):
        """Wait until a text is on the screen; return the screen."""
        return wait_until(
            lambda: screen if expected in (screen := self.text()) else None, f"{expected!r} is on the screen"
        )


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


@pytest.fixture
def screen(program):
    opened = []

    def start(**environment):
        opened.append(Screen(program.folder, **environment))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.tmux("kill-server")


def jump_to(terminal, name):
    """Search for a symbol with / and select it."""
    terminal.keys("/")
    terminal.wait("Jump to symbol")
    terminal.keys(f"^{name.lower()}$")
    terminal.wait(f"{name}(=")
    terminal.keys("Enter")
    terminal.wait("[Space/Enter] Toggle/enter")


@pytest.mark.story
def test_saved_values_are_shown_again_and_defaults_follow_the_choices_on_the_screen(program, screen):
    program.check("defconfig")
    before = program.config.read_bytes()
    terminal = screen()
    terminal.wait("kmatrix: test matrices of GPT-2 training runs")
    jump_to(terminal, "GPT2_MAX_ITERS")
    terminal.keys("Enter")
    terminal.wait("Steps (int)")
    terminal.keys("BSpace", "BSpace", "BSpace", "BSpace", "BSpace", "77", "Enter")
    terminal.wait("(77) Steps")
    jump_to(terminal, "GPT2_DROPOUT")
    terminal.keys("Enter")
    terminal.wait("Dropout (probability) (string)")
    terminal.keys("BSpace", "BSpace", "BSpace", "1.5", "Enter")
    terminal.wait("out of range: [0, 0.95]")
    terminal.keys("Enter", "Escape")
    jump_to(terminal, "GPT2_OPTIMIZER_MUON")
    terminal.keys("Enter")
    terminal.keys("q")
    terminal.wait("Save configuration?")
    terminal.keys("y")
    terminal.wait("status=0")

    assert program.value("GPT2_MAX_ITERS") == "77"
    assert program.value("GPT2_LEARNING_RATE") == '"0.02"'
    assert explicit_names(program.config) == {"GPT2_OPTIMIZER_MUON", "GPT2_MAX_ITERS"}
    assert (program.folder / ".config.old").read_bytes() == before
    saved = program.config.stat().st_mtime_ns
    second = screen()
    second.wait("Model")
    jump_to(second, "GPT2_MAX_ITERS")
    second.wait("(77) Steps")
    second.keys("q")
    second.wait("status=0")
    assert "no change" in second.text()
    assert program.config.stat().st_mtime_ns == saved


@pytest.mark.story
def test_a_configuration_that_only_the_rules_reject_is_kept_in_another_file(program, screen):
    program.check("defconfig")
    before = program.config.read_bytes()
    terminal = screen()
    terminal.wait("Model")
    jump_to(terminal, "PARALLEL_BATCH_SIZE")
    terminal.keys("Enter")
    terminal.wait("(int)")
    terminal.keys("BSpace", "25", "Enter", "q")
    terminal.wait("Save configuration?")
    terminal.keys("y")
    text = " ".join(terminal.wait("status=2").split())

    assert "PARALLEL_BATCH_SIZE=25 is not a multiple of BATCH_SIZE=12" in text
    assert program.config.read_bytes() == before
    assert "CONFIG_PARALLEL_BATCH_SIZE=25" in (program.folder / ".config.refused").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_unusual_locales_and_terminals_open_the_screen(program, screen):
    program.check("defconfig")
    for environment in (
        {"LANG": "xx_YY.UTF-8", "LC_ALL": "xx_YY.UTF-8"},
        {"LC_CTYPE": "xx_YY.UTF-8"},
        {"TERM": "vt100"},
        {"LC_ALL": "C"},
    ):
        terminal = screen(**environment)
        text = terminal.wait("Optimizer")
        terminal.keys("q")
        terminal.wait("status=0")

        assert "Traceback" not in text + terminal.text(), environment


def test_without_a_terminal_or_with_an_invalid_line_menuconfig_is_refused(program, monkeypatch):
    program.check("defconfig")
    assert "menuconfig needs a terminal" in program.refused("menuconfig")

    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("kmatrix.cli.configure.sys", SimpleNamespace(stdin=terminal, stdout=terminal))
    program.write("CONFIG_GPT2_BACH_SIZE=4")
    before = program.config.read_bytes()
    assert "unknown symbol" in program.refused("menuconfig")
    assert program.config.read_bytes() == before
