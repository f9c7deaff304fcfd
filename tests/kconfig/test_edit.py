"""menuconfig in a terminal (tmux), with unusual locales and terminals, and without a terminal."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kmatrix.kconfig.assignments import explicit_names
from programs import ROOT, Program
from skips import require_program
from waiting import wait_until

NUMBERS = itertools.count()


class Screen:
    """A terminal of 100 x 40 that runs the program; a shell prints its exit status after it."""

    def __init__(self, folder, *, arguments=(), environment=None):
        self.tmux = [str(require_program("tmux")), "-L", f"kmatrix-{os.getpid()}-{next(NUMBERS)}", "-f", "/dev/null"]
        changes = environment or {}
        settings = [f"{name}={text}" for name, text in changes.items()]
        command = [
            *("env", "-u", "MAKEFLAGS", "-u", "KCONFIG_CONFIG", f"PYTHONPATH={ROOT / 'lib'}", *settings),
            *(sys.executable, "-m", "kmatrix", "menuconfig", f"O={folder}", *arguments),
        ]
        script = folder / "session.sh"
        quoted = " ".join(f"'{part}'" for part in command)
        script.write_text(f"{quoted}\necho STATUS $?\nexec sleep 60\n", encoding="utf-8")
        self._call("new-session", "-d", "-x", "100", "-y", "40", "sh", str(script))

    def _call(self, *arguments):
        return subprocess.run([*self.tmux, *arguments], capture_output=True, text=True, check=True, timeout=20).stdout

    def text(self):
        return self._call("capture-pane", "-p")

    def keys(self, *names):
        self._call("send-keys", *names)

    def wait(self, expected):
        """Wait until a text is on the screen; return the screen."""
        return wait_until(
            lambda: screen if expected in (screen := self.text()) else None, f"{expected!r} is on the screen"
        )

    def close(self):
        subprocess.run([*self.tmux, "kill-server"], capture_output=True, check=False, timeout=20)


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


@pytest.fixture
def screen(program):
    opened = []

    def start(**settings):
        opened.append(Screen(program.folder, **settings))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


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
    terminal.wait("STATUS 0")

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
    second.wait("STATUS 0")
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
    text = " ".join(terminal.wait("STATUS 2").split())

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
        terminal = screen(environment=environment)
        text = terminal.wait("Optimizer")
        terminal.keys("q")
        terminal.wait("STATUS 0")

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
