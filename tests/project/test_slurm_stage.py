"""The Slurm of the tests is real, and its storage has the faults that a shared file system has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slurm_stage import SlurmStage, remove_stale_stages
from waiting import wait_until

pytestmark = pytest.mark.nightly
LAG_S = 3.0  # of the caches of n3
SUPPORT = Path(__file__).resolve().parents[1] / "support"

# Asks the storage something again and again on one host, until the answer is the wanted one. It prints when that was,
# by the clock that all hosts have in common (s), and the number of answers.
ASK_UNTIL = """
import os, sys, time
expression, wanted = sys.argv[1:]
answers = 1
while str(eval(expression)) != wanted:
    answers += 1
    time.sleep(0.02)
print(time.monotonic(), answers)
"""
HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read() if sys.argv[2] == "wait" else None
"""
WRITE_AND_REPLACE = """
import os, sys
path, text = sys.argv[1:]
with open(path + ".new", "w") as file:
    file.write(text)
os.replace(path + ".new", path)
"""


@pytest.fixture(scope="module")
def stage() -> Iterator[SlurmStage]:
    # The checkout itself may be below /tmp.
    with SlurmStage(nodes=3, gpus=2, caches={"n3": LAG_S}, installed=[Path(sys.prefix)], requeue_delay=5) as running:
        yield running


def python(stage: SlurmStage, host: str, program: str, *arguments: str) -> str:
    return stage.on(host, [sys.executable, "-I", "-c", program, *arguments]).stdout.strip()


def time_of(stage: SlurmStage, host: str, expression: str, wanted: object, *, at_once: bool = False) -> float:
    """Return when a host first gave the wanted answer (s). at_once: it must be its first one.

    A time is compared with an earlier one, never with a limit: on a busy machine, everything takes long.
    """
    seconds, answers = python(stage, host, ASK_UNTIL, expression, str(wanted)).split()
    assert not at_once or answers == "1"
    return float(seconds)


def test_each_node_is_a_host_with_its_own_name_processes_and_address(stage):
    out = stage.login(["srun", "--nodes=3", "bash", "-c", "echo $(hostname) $SLURM_NODEID $(cat /proc/1/comm)"]).stdout
    assert sorted(out.split("\n")) == ["", "n1 0 bash", "n2 1 bash", "n3 2 bash"]
    sleeping = stage.start("n1", ["sleep", "1000"])
    stage.wait(lambda: "1000" in stage.on("n1", ["ps", "-A", "-o", "args"]).stdout, "a process on n1")
    assert "sleep 1000" not in stage.on("n2", ["ps", "-A", "-o", "args"]).stdout
    boots = {stage.on(host, ["cat", "/proc/sys/kernel/random/boot_id"]).stdout for host in ("login", "n1", "n2")}
    assert len(boots) == 3
    stage.on("n1", ["touch", "/tmp/of_n1"])
    assert stage.on("n2", ["test", "-e", "/tmp/of_n1"], check=False).returncode == 1
    assert "10.98.66.1 " in stage.on("n2", ["getent", "hosts", "n1"]).stdout
    os.killpg(sleeping.pid, signal.SIGKILL)


def test_a_job_gets_devices_of_its_own_on_a_shared_node(stage):
    # Each waits for the other one: a job that begins later might get the device of one that has ended.
    both = "echo $CUDA_VISIBLE_DEVICES; touch up.$SLURM_JOB_ID; until [ $(ls up.* | wc -l) = 2 ]; do sleep 0.1; done"
    show = ["srun", "--nodelist=n2", "--nodes=1", "--gres=gpu:1", "bash", "-c", both]
    first, second = stage.start("login", show), stage.start("login", show)
    assert sorted([first.communicate(timeout=240)[0], second.communicate(timeout=240)[0]]) == ["0\n", "1\n"]


def test_a_job_that_needs_more_gpus_than_a_node_has_is_refused(stage):
    refused = stage.login(["sbatch", "--test-only", "--nodes=1", "--gres=gpu:9", "--wrap=true"], check=False)
    assert refused.returncode != 0
    assert "not available" in refused.stderr


def test_two_hosts_both_get_the_same_lock(stage):
    path = stage.shared / "lock"
    path.touch()
    holder = ["-I", "-c", HOLD_LOCK, str(path)]
    assert stage.on("n1", [sys.executable, *holder, "go"]).stdout == "held\n"
    first = stage.start("n1", ["bash", "-c", f"exec sleep 1000 | {sys.executable} -I -c '{HOLD_LOCK}' {path} wait"])
    assert first.stdout.readline() == "held\n"
    assert stage.on("n1", [sys.executable, *holder, "go"], check=False).returncode != 0, "one host: the lock holds"
    assert stage.on("n2", [sys.executable, *holder, "go"]).stdout == "held\n", "another host: it does not"
    os.killpg(first.pid, signal.SIGKILL)


def test_a_new_file_is_missing_on_a_caching_host_until_its_folder_is_listed_for_names(stage):
    path = stage.shared / "new"
    exists = f"os.path.exists({str(path)!r})"
    missing = time_of(stage, "n3", exists, False, at_once=True)
    python(stage, "n1", WRITE_AND_REPLACE, str(path), "text")
    listed = f"{path.name!r} in os.listdir({str(path.parent)!r})"
    time_of(stage, "n2", exists, True, at_once=True)
    time_of(stage, "n3", listed, True, at_once=True)
    assert time_of(stage, "n3", exists, True) - missing > 0.9 * LAG_S


def test_size_and_time_of_a_file_lag_but_its_content_is_read_as_it_is(stage):
    path = stage.shared / "replaced"
    size, content = f"os.path.getsize({str(path)!r})", f"open({str(path)!r}).read()"
    python(stage, "n1", WRITE_AND_REPLACE, str(path), "1")
    small = time_of(stage, "n3", size, 1, at_once=True)
    python(stage, "n1", WRITE_AND_REPLACE, str(path), "12345")
    assert time_of(stage, "n3", size, 5) - small > 0.9 * LAG_S
    python(stage, "n1", WRITE_AND_REPLACE, str(path), "1234567890")
    time_of(stage, "n3", content, "1234567890", at_once=True)


def test_a_requeued_job_starts_again_after_the_delay_of_this_slurm(stage):
    script = "#!/bin/bash\necho start ${SLURM_RESTART_COUNT:-0} on $(hostname)\nexec sleep 1000\n"
    (stage.shared / "again.sbatch").write_text(script, encoding="utf-8")
    log = stage.shared / "again.log"
    options = ["--parsable", "--requeue", "--open-mode=append", f"--output={log}"]
    job = stage.login(["sbatch", *options, "again.sbatch"]).stdout.strip()
    stage.wait(lambda: log.exists() and "start 0" in log.read_text(), "its first start")
    stage.login(["scontrol", "requeue", job])
    stage.wait(lambda: "start 1" in log.read_text(), "its second start")
    stage.login(["scancel", job])
    stage.wait(lambda: stage.job_state(job) == "CANCELLED", "its end")


def test_a_killed_node_dies_as_a_whole_and_comes_back(stage):
    sleep = ["sleep", f"2000.{os.getpid()}"]  # another test run may have the same stage
    stage.start("n2", sleep)
    everything = lambda: [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]  # noqa: E731
    stage.wait(lambda: sleep in everything(), "a process on n2")
    stage.kill_node(2)
    assert sleep not in everything()
    stage.start_node(2)
    assert stage.login(["srun", "--nodelist=n2", "hostname"]).stdout == "n2\n"


def test_jobs_outlive_a_controller_that_stops(stage):
    work = "until [ -e down ]; do sleep 0.1; done; touch survived"
    job = stage.login(["sbatch", "--parsable", "--output=/dev/null", f"--wrap={work}"]).stdout.strip()
    stage.wait(lambda: stage.job_state(job) == "RUNNING", "its start")
    stage.stop_controller()
    assert "is DOWN" in stage.login(["scontrol", "ping"], check=False).stdout
    (stage.shared / "down").touch()
    stage.wait((stage.shared / "survived").exists, "its work")
    stage.start_controller()
    stage.wait(lambda: stage.job_state(job) == "COMPLETED", "its end")


def test_a_stage_dies_with_its_test_run_and_the_next_one_removes_its_folder(stage, monkeypatch):
    # In a place of its own: the stage of another test that starts just now would remove its folder, too.
    place = tempfile.mkdtemp(prefix="stage-")
    monkeypatch.setenv("TMPDIR", place)
    monkeypatch.setattr(tempfile, "tempdir", place)
    program = (
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from slurm_stage import SlurmStage\n"
        "with SlurmStage(nodes=1) as other: print(other.folder, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = Path(run.stdout.readline().strip())
    started = psutil.Process(run.pid).children(recursive=True)
    assert len(started) > 4
    run.kill()
    run.communicate()
    wait_until(lambda: not any(process.is_running() for process in started), "its processes have died")
    assert folder.is_dir()
    remove_stale_stages()
    assert not folder.exists()
    Path(place).rmdir()
    monkeypatch.undo()
    remove_stale_stages()
    assert stage.login(["hostname"]).stdout == "login\n", "this stage was left alone"
