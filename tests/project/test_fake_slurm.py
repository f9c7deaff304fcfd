"""The fake programs of Slurm print what the real ones print, and go wrong as a test asks them to."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_slurm import UNKNOWN_OPTION, FakeSlurm
from slurm_stage import SlurmStage
from waiting import wait_until

pytestmark = pytest.mark.process

Run = Callable[..., subprocess.CompletedProcess[str]]
FORMAT = "--format=%i|%A|%F|%K|%T|%t|%r|%N|%S|%k|%j|%P|%D"
ALL = ["squeue", "--noheader", "--me", "--states=all", FORMAT]
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+")
SCRIPT = """#!/bin/bash
#SBATCH --job-name=km --comment="a|b c"
#SBATCH --array=0-3%2 --nodes=2 --signal=B:USR1@60 --requeue --open-mode=append
#SBATCH --output=log_%A_%a.txt
echo $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID ${SLURM_RESTART_COUNT:-0} $SLURM_JOB_NODELIST $SLURM_JOB_NUM_NODES
"""


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm")


@pytest.fixture
def run(slurm: FakeSlurm, tmp_path: Path) -> Run:
    return runner_of(slurm, tmp_path)


def runner_of(slurm: FakeSlurm, folder: Path) -> Run:
    environment = {**os.environ, "PATH": slurm.path}

    def run(*words: str, text: str | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        options = {"env": environment, "cwd": folder, "timeout": timeout}
        return subprocess.run(words, input=text, text=True, capture_output=True, check=False, **options)

    return run


def lines(run: Run) -> list[str]:
    return sorted(run(*ALL).stdout.splitlines())


def test_an_array_runs_one_task_after_the_other_in_the_environment_of_slurm(slurm, run, tmp_path):
    assert run("sbatch", "--parsable", text=SCRIPT).stdout == "1\n"
    assert [slurm.run_next() for _ in range(5)] == ["1_0", "1_1", "1_2", "1_3", None]
    texts = [path.read_text() for path in sorted(tmp_path.glob("log_*"))]
    assert texts == [f"1 {task} 0 n[1-2] 2\n" for task in range(4)]
    assert [job["state"] for job in slurm.jobs()] == ["COMPLETED"] * 4


def test_a_job_that_requeues_itself_runs_again_and_counts_its_starts(slurm, run, tmp_path):
    again = "scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID} && exec sleep 100\n"
    run("sbatch", text=SCRIPT + f'if [ -z "$SLURM_RESTART_COUNT" ]; then {again} fi')
    assert [slurm.run_next(), slurm.run_next()] == ["1_0", "1_0"]
    assert (tmp_path / "log_1_0.txt").read_text() == "1 0 0 n[1-2] 2\n1 0 1 n[1-2] 2\n"


def test_a_dependent_job_waits_for_the_end_of_the_other(slurm, run):
    run("sbatch", "--wrap=true")
    run("sbatch", "--dependency=afterany:1", "--wrap=true")
    assert [slurm.run_next(), slurm.run_next()] == ["1", "2"]


def test_an_answer_that_is_lost_leaves_a_job(slurm, run):
    slurm.fail("sbatch", "answer lost")
    lost = run("sbatch", "--parsable", "--comment=x", "--wrap=true")
    assert (lost.returncode, lost.stdout) == (1, "")
    assert "Socket timed out on send/recv operation" in lost.stderr
    assert run("squeue", "--noheader", "--format=%i %k").stdout == "1 x\n"
    assert run("sbatch", "--parsable", "--wrap=true").stdout == "2\n", "the fault was for one call"


@pytest.mark.parametrize(("fault", "jobs"), [("hang", 0), ("hang after", 1)])
def test_a_call_may_hang_before_or_after_its_work(slurm, run, fault, jobs):
    slurm.fail("sbatch", fault)
    environment = {**os.environ, "PATH": slurm.path}
    with subprocess.Popen(["sbatch", "--wrap=true"], env=environment, stdout=subprocess.PIPE) as process:
        try:
            wait_until(lambda: slurm.calls("sbatch") and len(slurm.jobs()) == jobs)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            assert len(slurm.jobs()) == jobs
        finally:
            process.kill()


def test_programs_refuse_what_they_do_not_imitate(run):
    refused = run("squeue", "--noheader", "--format=%i", "--priority")
    assert refused.returncode == UNKNOWN_OPTION
    assert "--priority is not imitated" in refused.stderr


@pytest.mark.nightly
def test_the_programs_print_what_the_real_ones_print(slurm, run, tmp_path):
    with SlurmStage(nodes=3, gpus=2) as stage:

        def both(*words: str) -> str:
            real = stage.login(words, check=False)
            fake = run(*words)
            real_lines, fake_lines = (sorted(TIME.sub("TIME", found.stdout).splitlines()) for found in (real, fake))
            assert fake_lines == real_lines, words
            assert (fake.stderr, fake.returncode) == (real.stderr, real.returncode), words
            return fake.stdout.strip()

        for folder in (stage.shared, tmp_path):
            (folder / "job.sbatch").write_text(SCRIPT, encoding="utf-8")
            (folder / "text").write_text("hello\n", encoding="utf-8")
        # Held: the state of a job that may start depends on when it is asked for.
        both("sbatch", "--parsable", "--hold", "job.sbatch")
        both("sbatch", "--hold", "--gres=gpu:2", "--job-name=one", "--output=/dev/null", "--wrap=true")
        both("sbatch", "--hold", "--parsable", "--array=5", "--wrap=true")
        both(*ALL)
        both(*ALL, "--array")
        both("sbatch", "text")
        both("sbatch", "missing")
        both("sbatch", "--parsable", "--partition=nope", "--wrap=true")
        both("sbatch", "--parsable", "--array=0-5000", "--wrap=true")
        both("scancel", "1_2")
        both("scancel", "3")
        both("scancel", "--quiet", "900")
        both("scancel")
        both(*ALL)
        both("squeue", "--noheader", "--format=%i", "--jobs=900")
        both("scontrol", "requeue", "900")
        both("scontrol", "ping")
        both("scontrol", "show", "hostnames", "n[1-3]")
        both("scontrol", "--oneliner", "show", "partition")
        both("sinfo", "--noheader", "--format=%P|%R|%a|%l|%D|%t|%T|%N|%G|%c|%m")
        both("sinfo", "--version")
        both("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", "--jobs=1")
        compare_texts(stage, run)
        job = both("sbatch", "--parsable", "--nodes=2", "--wrap=exit 3")
        stage.wait(lambda: stage.job_state(job) == "FAILED", "the end of a job")
        slurm.run_next()
        both("squeue", "--noheader", "--states=FAILED", "--name=wrap", FORMAT)
        both("sbatch", "--parsable", "--gres=gpu:3", "--wrap=true")


def compare_texts(stage: SlurmStage, run: Run) -> None:
    """Compare what differs in details of the machine: the settings, and the nodes."""
    command = ["scontrol", "show", "config"]
    fake = run(*command).stdout.splitlines()
    assert set(fake) <= set(stage.login(command).stdout.splitlines())
    node = ["scontrol", "--oneliner", "show", "node"]
    names = ("NodeName", "CPUTot", "CPUAlloc", "Gres", "NodeHostName", "RealMemory", "State", "Partitions")
    parts = [
        [word for word in run_.stdout.split() if word.split("=")[0] in names]
        for run_ in (run(*node), stage.login(node))
    ]
    assert parts[0] == parts[1]
