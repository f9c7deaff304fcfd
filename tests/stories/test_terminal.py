"""Follow a matrix and GPUs in terminals, in pipes and in logs."""

from __future__ import annotations

import io

import pexpect
import pytest

from clones import TIMEOUT_S, environment
from kmatrix.locks import is_held
from kmatrix.text import printable
from waiting import wait_until

pytestmark = pytest.mark.story

ESCAPE = "\x1b"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor
OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def terminal(clone):
    """Run a make target of the clone in a terminal with this many columns."""
    opened = []

    def start(columns, *words):
        arguments = ["--no-print-directory", "-C", str(clone.root), *words]
        variables = environment(TERM="xterm-256color")
        variables = {name: text for name, text in variables.items() if name not in ("COLUMNS", "LINES")}
        size = {"dimensions": (24, columns), "encoding": "utf-8", "timeout": TIMEOUT_S}
        opened.append(pexpect.spawn("make", arguments, env=variables, **size))
        opened[-1].logfile_read = io.StringIO()
        return opened[-1]

    yield start
    for child in opened:
        child.close()


def shows(child, *texts):
    for text in texts:
        child.expect_exact(text)


def status_of(child):
    """Wait until the command ends, and return its exit status as a shell does."""
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus if child.signalstatus is None else 128 + child.signalstatus


def written(child):
    return child.logfile_read.getvalue()


def test_a_matrix_is_watched_stopped_continued_and_left_in_terminals(story, terminal):
    story.script({"adamw": [3.3], "muon": [3.2]})
    story.hold()
    child = terminal(80, "test-matrix", *story.words("SIMULATE=2", "GPU_MONITOR=y"))
    story.wait_for_start(1)
    shows(child, "step", "running", "planned")
    matrix = story.newest()
    target, lock = f"TARGET={matrix.path}", matrix.path / ".lock"
    other = terminal(40, "status", target)
    shows(other, "step", "running", "planned")
    assert ESCAPE not in story.make("status", target, FORCE_COLOR="1", TERM="xterm-256color", CLICOLOR_FORCE="1")
    child.sendintr()
    assert (status_of(child), status_of(other)) == (130, 0)  # the other terminal has seen the end
    assert "Continue: make continue TARGET=" in written(child)
    assert sorted(story.statuses(matrix).values()) == ["planned", "stopped"]
    for one, columns in ((child, 80), (other, 40)):
        rows = [line for line in printable(written(one)).splitlines() if line.startswith(("run ", "gpt2_"))]
        assert max(map(len, rows)) <= columns

    again = terminal(80, "continue", target, "TRACKER=none")
    shows(again, "2 runs to run", "running", "planned")
    again.close()  # the runs go on without the terminal
    other = terminal(80, "status", target)
    shows(other, "running", "attempt 2")
    other.sendintr()  # ends the look, and make
    assert status_of(other) == 130
    assert is_held(lock)
    story.make("stop", target)
    wait_until(lambda: not is_held(lock), "it ends")
    assert status_of(terminal(80, "continue", target, "DETACH=1")) == 0
    assert is_held(lock)
    story.let_go()
    wait_until(lambda: not is_held(lock), "it ends")
    assert set(story.statuses(matrix).values()) == {"finished"}
    for path in matrix.path.rglob("*"):
        if path.suffix in (".log", ".txt", ".json", ".jsonl"):
            assert ESCAPE not in path.read_text(encoding="utf-8", errors="replace"), path


def test_gputop_draws_simulated_gpus_and_leaves_the_terminal_as_it_was(clone, terminal):
    once = clone.run(clone.python, "scripts/gputop.py", "--once")
    assert once.returncode == 0, once.stderr  # also without a GPU
    child = terminal(120, "gputop", "SIMULATE=4")
    shows(child, OTHER_SCREEN, "SIMULATED", "4 GPUs", "balance")
    child.send("q")
    assert status_of(child) == 0
    text = written(child)
    assert text.rfind(FIRST_SCREEN) > text.rfind("balance")
    assert text.rfind(SHOWN) > text.rfind(HIDDEN)
