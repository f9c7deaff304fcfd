import os
import shutil
import signal
import subprocess
import sys

import pytest

from kmatrix.errors import LaunchError
from kmatrix.records import lock
from kmatrix.records.lock import held, start_of, this_process, try_lock
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.run_lock import LAUNCHER, TOKEN, begin_attempt, join_attempt, kill, launcher_died, members
from waiting import wait_until

# A program that inherits a descriptor and waits.
HOLDER = "import sys, time; print('ready', flush=True); time.sleep(300)"


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path / "gpt2_adamw")
    folder.path.mkdir()
    return folder


@pytest.fixture
def holder(run):
    """Start a process that holds a descriptor and has the name of the run on its command line."""
    started = []

    def start(handle, *words):
        command = [sys.executable, "-c", HOLDER, *words]
        started.append(subprocess.Popen(command, pass_fds=(handle,), stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_attempt_shares_the_lock_with_its_processes_and_excludes_the_next_attempt(run, monkeypatch):
    handle, token = begin_attempt(run, 1)
    monkeypatch.setenv(TOKEN, token)
    rank = join_attempt(run)
    os.close(handle)  # guard and torchrun died: the rank alone holds the run
    assert begin_attempt(run, 2) is None
    assert try_lock(run.lock) is None
    os.close(rank)
    handle, _ = begin_attempt(run, 2)
    os.close(handle)


def test_a_rank_that_comes_after_a_new_attempt_began_is_refused(run, monkeypatch):
    handle, token = begin_attempt(run, 1)
    os.close(handle)  # all processes of attempt 1 that had the lock died; a rank still imports torch
    new, _ = begin_attempt(run, 12)
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(LaunchError, match="attempt 1 of gpt2_adamw has ended\n  why: another attempt has begun"):
        join_attempt(run)
    os.close(new)
    again, _ = begin_attempt(run, 3)  # the refused rank kept nothing
    os.close(again)


def test_a_rank_started_by_hand_needs_no_token(run, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    assert join_attempt(run) is None
    handle, _ = begin_attempt(run, 1)
    os.close(handle)
    rank = join_attempt(run)
    assert begin_attempt(run, 2) is None
    os.close(rank)


@pytest.mark.process
def test_members_are_named_and_only_processes_of_the_run_are_killed(run, holder):
    handle, _ = begin_attempt(run, 1)
    torchrun = holder(handle, "torch.distributed.run", str(run.path))
    reader = holder(handle)
    os.close(handle)
    found = {member.pid: member for member in members(run)}
    assert str(found[torchrun.pid]) == f"torchrun (pid {torchrun.pid})"
    assert found[torchrun.pid].of_run
    assert not found[reader.pid].of_run
    kill(list(found.values()))
    assert torchrun.wait(240) == -signal.SIGKILL
    assert reader.poll() is None
    assert list(members(run)) == [found[reader.pid]]


@pytest.mark.process
def test_a_launcher_is_identified_by_its_start_time(monkeypatch):
    monkeypatch.delenv(LAUNCHER, raising=False)
    assert not launcher_died()
    monkeypatch.setenv(LAUNCHER, f"{os.getpid()}:{start_of(os.getpid())}")
    assert not launcher_died()
    monkeypatch.setenv(LAUNCHER, f"{os.getpid()}:1")  # a reused pid
    assert launcher_died()
    child = subprocess.Popen([sys.executable, "-c", ""])
    monkeypatch.setenv(LAUNCHER, f"{child.pid}:{start_of(child.pid)}")
    child.wait()
    wait_until(launcher_died)


def test_a_lock_that_is_a_link_is_refused_and_its_target_is_not_changed(run, tmp_path):
    target = tmp_path / "precious"
    target.write_text("kept")
    run.lock.symlink_to(target)
    with pytest.raises(LaunchError, match="cannot open"):
        try_lock(run.lock)
    matrix = MatrixDir(run.path)
    with pytest.raises(LaunchError, match="cannot open"), held(matrix):
        pass
    assert target.read_text() == "kept"


@pytest.mark.process
def test_a_copy_made_with_hard_links_gets_locks_of_its_own(tmp_path):
    original, copy = MatrixDir(tmp_path / "original"), MatrixDir(tmp_path / "copy")
    original.path.mkdir()
    with held(original):
        shutil.copytree(original.path, copy.path, copy_function=os.link)
        # One lock: the copy waits for the original, and nothing on it reaches the original's runner.
        assert copy.is_held()
        assert lock.holder(copy) is None
        with pytest.raises(LaunchError, match="shares its lock with a matrix that is being run"), held(copy):
            pass
        assert lock.holder(original) == this_process()
    before = original.lock.read_bytes()
    with held(copy):
        assert lock.holder(copy) == this_process()
        assert not original.is_held()
        with held(original):
            pass
    assert original.lock.read_bytes() == before
    assert copy.lock.stat().st_nlink == original.lock.stat().st_nlink == 1
