"""A command under its guard exits, is stopped or is killed, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kmatrix.engines.local.process import GUARD, start
from kmatrix.records.lock import try_lock
from waiting import wait_until

pytestmark = pytest.mark.process

SPAWN = """
import subprocess, sys, time
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print("ready", flush=True)
"""
IGNORE_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
)


@pytest.fixture
def start_command(tmp_path):
    """Start Python code under a guard; processes left by a test are killed."""
    trees = []

    def run(code, *, grace_s=5.0, lock=None, wait_for="ready"):
        log = tmp_path / "log"
        tree = start(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ,
            log=log,
            python=Path(sys.executable),
            grace_s=grace_s,
            lock=lock,
        )
        trees.append(tree)
        wait_until(lambda: not wait_for or wait_for in log.read_text())
        return tree

    yield run
    for tree in trees:
        tree.kill()


def has_exited(tree):
    code = None

    def all_exited():
        nonlocal code
        code = tree.poll()
        return code is not None

    wait_until(all_exited)
    return code


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


COMPANION = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("error: no login with", os.environ["MY_SERVICE_TOKEN"], file=sys.stderr, flush=True)
signal.sigwait({signal.SIGTERM})
print("bye", os.environ["MY_SERVICE_TOKEN"], flush=True)
"""


def test_a_process_next_to_the_command_writes_to_the_same_log_without_keys(start_command, tmp_path, monkeypatch):
    """The recorder: its errors must not be lost, nor bring a key to the log."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse-battery")
    go = tmp_path / "go"
    tree = start_command(
        f"import os, time\nprint('ready', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    )

    recorder = tree.start_companion([sys.executable, "-c", COMPANION], env=os.environ)
    wait_until(lambda: "no login" in (tmp_path / "log").read_text())
    go.touch()

    assert has_exited(tree) == 0  # and all output is in the log, which needs the companion to exit, too
    assert recorder.wait() == 0
    assert (tmp_path / "log").read_text() == "ready\nerror: no login with <hidden>\nbye <hidden>\n"


def test_without_a_log_there_is_no_process_next_to_the_command(start_command):
    tree = start_command("pass", wait_for="")
    has_exited(tree)

    with pytest.raises(OSError, match="No such file"):
        tree.start_companion([sys.executable, "-c", "pass"])


@pytest.mark.parametrize(
    ("code", "exit_code"), [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_of_the_command_is_kept(start_command, code, exit_code):
    assert has_exited(start_command(code, wait_for="")) == exit_code


def test_a_missing_program_exits_with_127_and_a_line_in_the_log(tmp_path):
    log, me = tmp_path / "log", Path(sys.executable)
    tree = start(["/no/such/program"], cwd=tmp_path, env=os.environ, log=log, python=me, grace_s=1)
    assert has_exited(tree) == 127
    assert "cannot start /no/such/program" in log.read_text()


def test_stdout_and_stderr_are_appended_and_stdin_is_empty(start_command, tmp_path):
    (tmp_path / "log").write_text("before\n")
    has_exited(
        start_command("import sys; print(len(sys.stdin.read()), flush=True); sys.stderr.write('err')", wait_for="")
    )
    assert (tmp_path / "log").read_text() == "before\n0\nerr"


def test_a_command_runs_in_its_own_session_without_terminal_signals(start_command):
    tree = start_command("import time; print('ready', flush=True); time.sleep(300)")
    assert os.getsid(tree.pid) == tree.pid != os.getsid(0)


def test_a_command_inherits_no_blocked_signals(start_command, tmp_path):
    has_exited(start_command("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))", wait_for=""))
    assert (tmp_path / "log").read_text().strip() == "set()"


def test_stop_ends_a_command_that_handles_sigterm(start_command):
    tree = start_command("import time; print('ready', flush=True); time.sleep(300)")
    tree.stop()
    assert has_exited(tree) == 128 + signal.SIGTERM


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace_period(start_command):
    tree = start_command(IGNORE_SIGTERM, grace_s=0.6)
    started = time.monotonic()
    tree.stop()
    assert has_exited(tree) == 137
    assert 0.6 <= time.monotonic() - started < 30


def test_processes_left_by_the_command_are_killed(start_command, tmp_path):
    go = tmp_path / "go"
    tree = start_command(SPAWN + f"import os\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    members = tree.members()
    go.touch()
    assert has_exited(tree) == 0
    assert len(members) >= 3
    assert not [process for process in members if is_alive(process)]


def test_kill_ends_a_process_tree_over_many_sessions(start_command):
    tree = start_command(SPAWN + "time.sleep(300)")
    members = tree.members()
    assert len(members) == 4
    assert tree.kill() == 137
    assert not [process for process in members if is_alive(process)]


def test_after_a_guard_is_killed_no_recorded_process_survives(start_command):
    tree = start_command(SPAWN + "time.sleep(300)")
    members = tree.members()
    os.kill(tree.pid, signal.SIGKILL)
    assert has_exited(tree) == -9
    assert not [process for process in members if is_alive(process)]


def test_a_guard_with_a_dead_runner_starts_nothing(tmp_path):
    marker = tmp_path / "marker"
    command = [sys.executable, "-I", "-S", str(GUARD), "999999999", "5", "/usr/bin/env", "touch", str(marker)]
    assert subprocess.run(command, check=False).returncode == 128 + signal.SIGTERM
    assert not marker.exists()


def test_a_lock_passed_to_the_guard_is_held_until_the_tree_has_exited(start_command, tmp_path):
    lock = try_lock(tmp_path / "lock")
    tree = start_command(IGNORE_SIGTERM, lock=lock)
    os.close(lock)
    assert try_lock(tmp_path / "lock") is None
    tree.kill()
    lock = try_lock(tmp_path / "lock")
    assert lock is not None
    os.close(lock)


def test_the_command_inherits_only_stdin_stdout_stderr_and_the_lock(start_command, tmp_path):
    lock = try_lock(tmp_path / "lock")
    code = "import os; files = [f'/proc/self/fd/{n}' for n in range(3, 4096)]; "
    code += "found = [os.readlink(file) for file in files if os.path.lexists(file)]; "
    code += "print([name for name in found if not name.startswith('pipe:')], len(found))"  # and the log's pipe
    has_exited(start_command(code, lock=lock, wait_for=""))
    os.close(lock)
    assert (tmp_path / "log").read_text().strip() == f"{[str(tmp_path / 'lock')]} 2"


def test_a_lock_is_held_by_the_command_after_its_guard_was_killed(start_command, tmp_path):
    lock = try_lock(tmp_path / "lock")
    tree = start_command(IGNORE_SIGTERM, lock=lock)
    os.close(lock)
    wait_until(tree.members)
    os.kill(tree.pid, signal.SIGKILL)
    wait_until(lambda: psutil.Process(tree.pid).status() == psutil.STATUS_ZOMBIE)
    assert try_lock(tmp_path / "lock") is None
    assert has_exited(tree) == -signal.SIGKILL  # it kills the command, too
    lock = try_lock(tmp_path / "lock")
    assert lock is not None
    os.close(lock)
