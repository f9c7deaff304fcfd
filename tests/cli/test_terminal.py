"""Live displays restore the terminal, whatever ends them."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace

import pytest

from instant import InstantEngine
from kmatrix.cli.commands import main
from kmatrix.output import Interrupted, check_interrupt, ending, run_program
from kmatrix.records.lock import held
from kmatrix.records.states import read_matrix_status, read_run_status
from kmatrix.runner import execute
from kmatrix.status.state import JobPhase, JobState
from records_factory import FakeRun, make_matrix

HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"  # the cursor


class EndlessEngine(InstantEngine):
    """An engine whose runs train until they are cancelled."""

    def submit(self, runs):
        self._jobs |= {run.name: JobState(phase=JobPhase.RUNNING, started=time.time()) for run in runs}
        return {run.name: run.name for run in runs}

    def cancel(self, jobs=None, *, now=False):
        for name, job in self._jobs.items():
            self._jobs[name] = replace(job, phase=JobPhase.ENDED, ended=time.time(), exit_code=-9, cancelled=True)


def on_a_terminal(words, number):
    """Run a command on a terminal, send it a signal once it draws; return its exit status and its output."""
    pid, terminal = pty.fork()
    if not pid:  # a copy of the test process: it may not return to pytest
        status = 120
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # that of pytest-timeout raises
            signal.alarm(60)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.environ["TERM"] = "xterm-256color"
            status = run_program(lambda: main(words))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    output, is_sent = b"", False
    while True:
        try:
            output += os.read(terminal, 65536)
        except OSError:  # EIO: the child has closed it
            break
        if HIDDEN in output and not is_sent:
            os.kill(pid, number)
            is_sent = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_whose_exception_is_lost_ends_the_program_all_the_same(number):
    """Python prints an exception in a callback of the garbage collector, and goes on."""
    with ending():
        try:
            signal.raise_signal(number)
        except (Interrupted, KeyboardInterrupt) as error:
            lost = error
        with pytest.raises(type(lost)):
            check_interrupt()
    check_interrupt()  # of a former signal: nothing is left


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("target", ["status", "continue"])
def test_a_signal_restores_the_cursor(target, number, tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "LocalEngine", EndlessEngine)
    matrix = make_matrix(tmp_path, [FakeRun(status="stopped")], took=None)
    with held(matrix) if target == "status" else nullcontext():
        status, output = on_a_terminal([target, f"TARGET={matrix.path}", f"O={tmp_path}"], number)
    assert output.rfind(SHOWN) > output.rfind(HIDDEN)
    assert b"Traceback" not in output
    if target == "status":
        assert status == (0 if number == signal.SIGINT else 128 + number)
    else:
        assert status == 130
        assert not matrix.is_held()
        assert read_matrix_status(matrix).status == "stopped"
        assert [read_run_status(run).status for run in matrix.runs()] == ["stopped"]
