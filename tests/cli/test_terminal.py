"""Live displays restore the terminal, whatever ends them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace

import pytest

from instant import InstantEngine
from kmatrix.cli.commands import main
from kmatrix.output import run_program
from kmatrix.records.lock import held
from kmatrix.records.states import read_matrix_status, read_run_status
from kmatrix.runner import execute
from kmatrix.status.state import JobPhase, JobState
from programs import ROOT
from records_factory import FakeRun, make_matrix

pytestmark = pytest.mark.process

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
        except SystemExit as ended:
            status = ended.code
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
        if b"gpt2_" in output.partition(HIDDEN)[2] and not is_sent:
            os.kill(pid, number)
            is_sent = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


@pytest.mark.parametrize(("end", "status"), [(0, 0), (1, 2)])
def test_a_closed_pipe_ends_a_command_quietly_and_a_full_disk_with_one_error(end, status, tmp_path):
    make_matrix(tmp_path, [FakeRun()])
    reader, closed = os.pipe()
    os.close(reader)
    output = closed if not end else os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "kmatrix", "status", f"RESULTS_DIR={tmp_path}", f"O={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(output)
    assert done.returncode == status
    assert done.stderr.startswith("error: a disk is full") if end else not done.stderr
