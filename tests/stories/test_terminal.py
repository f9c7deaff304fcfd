"""Follow a matrix and GPUs in terminals, in pipes and in logs."""

from __future__ import annotations

import contextlib
import re
import subprocess

import pytest

from kmatrix.locks import is_held
from tmux_screen import Tmux
from waiting import wait_until

pytestmark = pytest.mark.story

ESCAPE = "\x1b"


@pytest.fixture
def terminal(clone, tmp_path):
    """Run a make target of the clone in a terminal of this size."""
    opened = []

    def start(size, *words, **environ):
        folder = tmp_path / f"tmux{len(opened)}"
        folder.mkdir()
        plainly = ("env", "-u", "COLUMNS", "-u", "LINES")  # readline sets them in any program
        opened.append(
            Tmux(folder, size, environ, *plainly, "make", "--no-print-directory", "-C", str(clone.root), *words)
        )
        return opened[-1]

    yield start
    for child in opened:
        with contextlib.suppress(subprocess.CalledProcessError):  # the command has exited
            child("kill-server")


def screen_with(terminal: Tmux, *texts: str) -> str:
    """Return the screen of a terminal once it shows all of these texts: it may be read while it is drawn."""
    return wait_until(lambda: next((seen for seen in [terminal.screen()] if all(text in seen for text in texts)), ""))


def test_a_matrix_is_watched_stopped_continued_and_left_in_terminals(story, terminal):
    story.script({"adamw": [3.3], "muon": [3.2]})
    story.hold()
    child = terminal((80, 24), "test-matrix", *story.words("SIMULATE=2", "GPU_MONITOR=y"))
    story.wait_for_start(1)
    text = screen_with(child, "running", "planned", "step")
    assert max(map(len, text.splitlines())) <= 80
    matrix = story.newest()
    for size in ((80, 24), (40, 12)):
        watched = terminal(size, "status", f"TARGET={matrix.path}")
        text = screen_with(watched, matrix.name[:30], "running", "planned", "gpt2_", "step")
        assert max(map(len, text.splitlines())) <= size[0]
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "CLICOLOR_FORCE": "1"}
    assert ESCAPE not in story.make("status", f"TARGET={matrix.path}", **colours)
    child("send-keys", "C-c")
    wait_until(lambda: not is_held(matrix.path / ".lock"), "it ends")
    assert sorted(story.statuses(matrix).values()) == ["planned", "stopped"]
    screen_with(child, "Continue: make continue TARGET=", "status=130")
    screen_with(watched, "status=0")  # the other terminals have seen the end

    again = terminal((80, 24), "continue", f"TARGET={matrix.path}", "TRACKER=none")
    screen_with(again, "2 runs to run", "running", "planned")
    again("kill-server")
    assert is_held(matrix.path / ".lock")
    watched = terminal((80, 24), "status", f"TARGET={matrix.path}")
    screen_with(watched, "running", "attempt 2")
    watched("send-keys", "C-c")  # ends the look, and make
    screen_with(watched, "running", "status=130")
    story.let_go()
    wait_until(lambda: not is_held(matrix.path / ".lock"), "it ends")
    assert set(story.statuses(matrix).values()) == {"finished"}
    for path in matrix.path.rglob("*"):
        if path.suffix in (".log", ".txt", ".json", ".jsonl"):
            assert ESCAPE not in path.read_text(encoding="utf-8", errors="replace"), path


def test_gputop_draws_simulated_gpus_and_leaves_the_terminal_as_it_was(clone, terminal):
    once = clone.run(clone.python, "scripts/gputop.py", "--once")
    assert once.returncode == 0, once.stderr  # also without a GPU
    tmux = terminal((120, 30), "gputop", "SIMULATE=4")
    screen = screen_with(tmux, "SIMULATED", "balance")
    assert [line for line in screen.splitlines() if re.match(r"3\s", line)]
    assert tmux("display-message", "-p", "#{alternate_on}").strip() == "1"
    tmux("send-keys", "q")
    screen_with(tmux, "status=0")
    assert "balance" not in tmux.screen()
    assert tmux("display-message", "-p", "#{cursor_flag} #{alternate_on}").split() == ["1", "0"]
