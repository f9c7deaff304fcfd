"""Matrices, runs with the fake trainer, and runner processes for tests of the runner."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kmatrix.engines.local.engine import LocalEngine
from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.status.classify import classify
from kmatrix.status.state import Attempt, JobPhase, JobState, RunPlan
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "support" / "fakes.py"
PYTHON = Path(sys.executable)
MAX_ITERS = 5
END_S = 240.0  # a process that was asked to end has ended by then, on a busy machine too

# The program of start_runner: a runner process that tests can kill.
DRIVER = """
import json, sys
sys.path[:0] = [{root!r}, {root!r} + "/lib", {root!r} + "/tests/support"]
from pathlib import Path
from running import engine, plan_of
from kmatrix.runner.loop import drive
from kmatrix.records.paths import MatrixDir
matrix = MatrixDir(Path(sys.argv[1]))
real = sys.argv[3] == "torchrun"
plans = [plan_of(matrix, *word.split("="), real=real) for word in sys.argv[4:]]
sys.exit(drive(matrix, plans, engine(real=real, grace_s=float(sys.argv[2])), poll_s=0.02).exit_code)
"""


def engine(*, real=False, **known):
    """Return the local engine, with the fake trainer started directly, or by the real torchrun."""
    return LocalEngine(PYTHON, ROOT, None if real else (str(PYTHON), str(FAKES)), **known)


def plan_of(matrix, name, behave="finish", *, real=False, **known):
    command = (str(FAKES), f"--behave={behave}") if real else (f"--behave={behave}",)
    return RunPlan(
        **{"name": name, "run_id": f"id-{name}", "dir": matrix.run(name), "ranks": 1, "command": command} | known
    )


@pytest.fixture
def matrix(tmp_path):
    """Return a matrix; tests add its runs."""
    folder = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    folder.path.mkdir()
    return folder


@pytest.fixture
def plan(matrix):
    """Write the directory of a run and return its plan."""

    def make(name, behave="finish", **known):
        train = {"batch_size": 12, "learning_rate": 6e-4, "max_iters": MAX_ITERS, "data_path": "/data"}
        write_json(matrix.run(name).run_json, {"run_id": f"id-{name}", "name": name, "train": train})
        return plan_of(matrix, name, behave, **known)

    return make


def classify_end(plan, *, started=None, gpus=(), **job):
    """Classify an attempt from what the engine reported. started: Unix seconds."""
    attempt = Attempt(number=plan.attempt, micro_batch=plan.micro_batch, started=started, gpus=gpus)
    return classify(plan.dir, attempt, JobState(phase=JobPhase.ENDED, started=started, gpus=gpus, **job))


def status_of(plan):
    return read_json(plan.dir.status)


def wait_for_start(plan) -> int:
    """Wait until a run trains, and its runner has recorded that; return the pid of its guard.

    The trainer may be faster than the runner, whose status names no process until then.
    """
    return wait_until(lambda: plan.dir.metrics.exists() and status_of(plan)["pid"], f"{plan.name} trains")


def once_training(plan):
    """Return a callback of `drive` that lets nothing happen to a run before it trains, however slowly it starts."""
    return lambda shown: shown.run != plan.name or wait_until(plan.dir.metrics.exists, f"{plan.name} trains")


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def processes_naming(matrix):
    """Return every process whose command line names this matrix."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(matrix.path) in a for a in p.info["cmdline"] or [])]


@pytest.fixture
def start_runner(matrix):
    """Start a runner in its own process, as `make test-matrix` does."""
    started = []

    def start(*arguments, grace_s=5.0, launcher="direct"):
        code = DRIVER.format(root=str(ROOT))
        command = [sys.executable, "-c", code, str(matrix.path), str(grace_s), launcher, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    for process in processes_naming(matrix):
        process.kill()


def recorder_launcher(**known) -> RecorderLauncher:
    return RecorderLauncher(**{"python": PYTHON, "root": ROOT, "hz": 20} | known)
