"""Live displays restore the terminal, whatever ends them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest

from kmatrix import locks
from kmatrix.cli.watch.status import watch
from kmatrix.output import run_program
from kmatrix.records.control import stop_of
from kmatrix.runner.controller import exit_status
from kmatrix.status.wanted import wanted
from programs import ROOT, main
from records_factory import FakeRun, make_matrix

pytestmark = pytest.mark.process

HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"  # the cursor


def on_a_terminal(call: Callable[[], int], number: int, lock: int) -> tuple[int, bytes]:
    """Call a function on a terminal while a matrix is held, and send a signal once it draws; then release the matrix.

    Return its exit status and its output.
    """
    pid, terminal = pty.fork()
    if not pid:  # a copy of the test process: it may not return to pytest
        status = 120
        try:
            os.close(lock)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # that of pytest-timeout raises
            signal.alarm(60)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.environ["TERM"] = "xterm-256color"
            status = run_program(call)
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
        if b"stopping" in output and lock:
            locks.release(lock)
            lock = 0
    os.close(terminal)
    if lock:
        locks.release(lock)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_status_and_restores_the_cursor(number, tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="stopped")])
    lock = locks.try_lock(matrix.path / ".lock")
    words = ["status", f"TARGET={matrix.path}", f"O={tmp_path}"]
    status, output = on_a_terminal(lambda: main(words), number, lock)
    assert output.rfind(SHOWN) > output.rfind(HIDDEN)
    assert b"Traceback" not in output
    assert status == (0 if number == signal.SIGINT else 128 + number)
    assert stop_of(matrix.path) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_matrix_is_run_stops_it_and_waits_for_its_end(number, tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="stopped")])

    def foreground() -> int:
        return exit_status(watch(matrix.path, is_ours=True), wanted)

    status, output = on_a_terminal(foreground, number, locks.try_lock(matrix.path / ".lock"))
    assert output.rfind(SHOWN) > output.rfind(HIDDEN)
    assert b"Traceback" not in output
    assert status == 130
    assert stop_of(matrix.path) == signal.Signals(number).name


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
