"""Stop a matrix from another terminal: the right process is signalled, and its progress is printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kmatrix.errors import LaunchError
from kmatrix.records.files import read_json, write_json
from kmatrix.records.lock import held, this_process
from kmatrix.records.paths import MatrixDir
from programs import run
from running import processes_naming, status_of
from waiting import wait_until


@pytest.fixture
def results(matrix):
    write_json(matrix.matrix_json, {"runs": []})
    return f"RESULTS_DIR={matrix.path.parent}"


@pytest.mark.process
def test_stop_finds_the_running_matrix_and_ends_it_with_checkpoints(matrix, plan, start_runner, results):
    plans = [plan("a", "hang"), plan("b")]
    process = start_runner("a=hang", "b")
    wait_until(plans[0].dir.metrics.exists)
    result = run("stop", results)
    assert (result.status, result.err) == (0, "")
    assert process.wait(60) == 130
    assert [status_of(run)["status"] for run in plans] == ["stopped", "planned"]
    assert (plans[0].dir.path / "checkpoints" / "step").exists()
    assert processes_naming(matrix) == []
    lines = result.out.splitlines()
    assert lines[0].startswith(f"sent SIGTERM to the runner (pid {process.pid}) of ")
    assert lines[1] == "  waiting for a to save a checkpoint and exit, 35 s at most"
    assert lines[2] == "stopped: 1 planned, 1 stopped"
    assert "make continue TARGET=" in lines[3]


def test_stop_without_a_running_matrix_is_refused(matrix, results):
    assert "no matrix is running in" in run("stop", results).err
    assert run("stop", results, f"TARGET={matrix.path}").status == 2


def test_two_running_matrices_are_refused_with_both_names(matrix, results):
    other = MatrixDir(matrix.path.with_name("test_matrix_results_20260101_000001"))
    other.path.mkdir()
    with held(matrix), held(other):
        result = run("stop", results)
    assert result.status == 2
    assert matrix.name in result.err
    assert other.name in result.err


@pytest.mark.process
@pytest.mark.parametrize(
    "changes", [{"pid_started": 1}, {"boot_id": "another boot"}, {"pid": None}], ids=["number", "boot", "unknown"]
)
def test_a_process_that_is_not_the_runner_is_never_signalled(matrix, changes):
    from dataclasses import replace

    from kmatrix.cli.control.stop import signal_runner

    other_process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        identity = replace(this_process(), pid=other_process.pid)
        with pytest.raises(LaunchError, match="cannot be signalled from here"):
            signal_runner(matrix, replace(identity, **changes))
        assert other_process.poll() is None
    finally:
        other_process.kill()
        other_process.wait()


@pytest.mark.process
def test_a_lost_terminal_redirects_the_output_of_a_runner_to_its_log(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from kmatrix.cli.progress import outlived
with outlived(Path(sys.argv[1])) as terminal:
    print("before", flush=True)
    os.kill(os.getpid(), signal.SIGHUP)
    assert terminal.lost
    terminal.leave()
    print("after", flush=True)
    print("error", file=sys.stderr)
"""
    log = tmp_path / "runner.log"
    completed = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=True)
    assert (completed.stdout, completed.stderr) == ("before\n", "")
    wait_until(lambda: log.exists() and sorted(log.read_text().split()) == ["after", "error"], "the log")


@pytest.mark.process
def test_the_previous_sighup_handler_is_restored_and_nohup_stays_in_effect(tmp_path):
    from kmatrix.cli.progress import outlived

    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with outlived(tmp_path / "log") as terminal:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not terminal.lost
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_the_display_switches_to_plain_lines_after_the_terminal_is_lost(tmp_path):
    import pty

    from kmatrix.cli.progress import ProgressDisplay, Terminal
    from kmatrix.records.runs import Status
    from kmatrix.status.watch import RunProgress

    class Paper(Terminal):
        def leave(self) -> None:
            self.lost = False

    terminal_fd, our_fd = pty.openpty()
    terminal = Paper(tmp_path / "log")
    with os.fdopen(our_fd, "w") as stream, ProgressDisplay(stream, terminal=terminal) as show:
        show(RunProgress(run="a", index=1, total=1, status=Status.RUNNING, step=1))
        os.read(terminal_fd, 65536)
        terminal.lost = True
        show(RunProgress(run="a", index=1, total=1, status=Status.FINISHED))
        stream.flush()
        output = b""
        while b"finished\r\n" not in output:
            output += os.read(terminal_fd, 65536)
        assert output.endswith(b"run 1/1 a  finished\r\n")
        assert b"\x1b[32m" not in output
    os.close(terminal_fd)


@pytest.mark.nightly
def test_a_detached_matrix_runs_in_another_process(matrix, plan, monkeypatch, capsys):
    """The detached runner of a matrix without pending runs starts, exits, and writes its output to the log."""
    from kmatrix.cli.commands import Arguments
    from kmatrix.cli.running.start import run_detached

    run = plan("a")
    record = read_json(run.dir.run_json)
    train = record["train"] | {"num_gpus": 1, "device": "cpu", "cpu_threads": 1, "data_path": "/data"}
    write_json(run.dir.run_json, {**record, "symbols": {}, "train": train})
    write_json(run.dir.result, {"run_id": "id-a", "attempt": 1, "status": "finished"})
    write_json(run.dir.status, {"status": "finished", "attempts": [{"attempt": 1, "status": "finished"}]})
    write_json(matrix.matrix_json, {"name": matrix.name, "runs": [{"name": "a", "run_id": "id-a", "axes": {}}]})
    assert run_detached(matrix, Arguments("test-matrix")) == 0
    wait_until(lambda: matrix.summary.exists() and not matrix.is_held())
    assert "running in the background: process " in capsys.readouterr().out
    assert "nothing to run" in matrix.runner_log.read_text()


BROKEN = """
import os, sys
from pathlib import Path
from kmatrix.cli.progress import outlived
with outlived(Path(sys.argv[1])) as terminal:
    for text in ("the report", "the next step"):
        terminal.outlive(lambda: print(text))
    Path(sys.argv[2]).touch()  # ON_FINISH
"""


@pytest.mark.process
@pytest.mark.parametrize("gone", ["closed pipe", "/dev/full", "closed descriptor"])
def test_a_terminal_that_is_gone_without_sighup_ends_nothing(tmp_path, gone):
    log, done = tmp_path / "runner.log", tmp_path / "done"
    command = [sys.executable, "-c", BROKEN, str(log), str(done)]
    if gone == "closed descriptor":
        completed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], check=False)
    elif gone == "/dev/full":
        with Path("/dev/full").open("w") as full:
            completed = subprocess.run(command, stdout=full, check=False)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        completed = subprocess.run(command, stdout=writer, check=False)
        os.close(writer)
    assert (completed.returncode, done.exists()) == (0, True)
    if gone != "closed descriptor":
        # A program of its own writes the log.
        wait_until(lambda: log.exists() and log.read_text() == "the report\nthe next step\n", "the log")
