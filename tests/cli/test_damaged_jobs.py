"""No damage to a file of a cluster's matrix ends a command with a traceback, or gives a run a second job.

Each case damages one file of a matrix with a running, a requeued and a waiting job, and calls one command.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster_factory import answer, claim, end, make_engine, make_submission, node, view
from fake_scheduler import FakeScheduler
from kmatrix.cli.control import stop as stopping
from kmatrix.errors import KmatrixError
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import REPORT, SchedulerPhase
from kmatrix.records.jobs.paths import JobsDir, NodeDir
from kmatrix.runner.share.__main__ import run_job
from programs import run
from records_factory import FakeRun, make_matrix

RUNNING = FakeRun(status="running", stop_at=40, train={"num_nodes": 2, "num_gpus": 2})
REQUEUED = FakeRun(optimizer="muon", status="stopped", stop_at=40)
WAITING = FakeRun(optimizer="lion", status="planned")
THEIRS = "66"  # a job of another matrix
JOBS = "jobs/0001"
FILES = (
    *("engine.json", "jobs", "jobs/jobs.jsonl", "jobs/poll.json", "jobs/.submitter.json", "jobs/.lock", JOBS),
    *("jobs/.poll.lock", f"{JOBS}/submission.json", "jobs/0002/submission.json", f"{JOBS}/0"),
    *(f"{JOBS}/{task}/{name}" for task in (0, 1) for name in ("owner.json", "end.json", "status.json", "slurm.log")),
    *(f"{RUNNING.name}/{name}" for name in ("nodes", "nodes/0", "nodes/0/node.json", "nodes/1/node.json")),
    *(f"{RUNNING.name}/{name}" for name in ("nodes/1/end.json", "nodes/1/output.log", "ranks/1/state.json")),
)
OBJECT = '{"schema": 1, "job": "66", "counter": 1e400, "restart": -1, "nodes": 3, "shares": [{"task": 1e300}]}'


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def _truncate(path: Path) -> None:
    if path.is_file():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _text(text: str | bytes) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text
    return lambda path: _replace(path, lambda path: path.write_bytes(data))


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: _replace(path, lambda path: path.symlink_to(target))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "missing": lambda path: _replace(path, lambda _: None),
    "empty": _text(""),
    "zeros": _text(b"\0" * 5000),
    "list": _text("[3]\n"),
    "text": _text('"a"\n'),
    "wrong types": _text(OBJECT + "\n"),
    "NaN": _text('{"schema": 1, "job": NaN, "time": Infinity}\n'),
    "nesting": _text("[" * 100_000 + "\n"),
    "long line": _text(b'{"a": "' + b"x" * 3_000_000 + b'"}\n'),
    "newer": _text('{"schema": 9}\n'),
    "directory": lambda path: _replace(path, Path.mkdir),
    "pipe": lambda path: _replace(path, os.mkfifo),
    "device": _link("/dev/zero"),
    "other file": _link("/etc/passwd"),
    "nowhere": _link("/nonexistent/nowhere"),
    "loop": lambda path: _replace(path, lambda path: path.symlink_to(path.name)),
}
NEWER = frozenset({"newer"})
COMMANDS = ("status", "estimate", "stop", "continue", "logs", "summary", "hold", "test-rerun", "runner")
CASES = list(itertools.product(FILES, DAMAGES, COMMANDS))


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return a Slurm with the jobs of the matrix and one of another."""
    fake = FakeScheduler(tmp_path / "slurm.json")
    modules = ("engines.polling", "experiment.cluster.nodes", "cli.running.cluster", "cli.running.jobs")
    for module in (*modules, "cli.control.stop"):
        monkeypatch.setattr(f"kmatrix.{module}.find_scheduler", lambda engine, settings: fake)
    monkeypatch.setattr(stopping, "JOBS_S", 0.0)
    monkeypatch.setattr("kmatrix.runner.submit.DOUBT_S", 0.0)
    monkeypatch.setattr("kmatrix.cli.control.logs.time", SimpleNamespace(sleep=_interrupt, monotonic=time.monotonic))
    monkeypatch.setattr("kmatrix.cli.running.resume.need_torch", lambda: None)
    monkeypatch.setattr("kmatrix.runner.share.__main__.find_allocation", _no_allocation)
    return fake


def _interrupt(_: float) -> None:
    """Press Ctrl+C where `logs` waits for more lines."""
    raise KeyboardInterrupt


class _StartedError(KmatrixError):
    """The runner in the job would start now."""


def _no_allocation(*_: object) -> None:
    raise _StartedError("started")


@pytest.fixture
def made(tmp_path, monkeypatch, slurm):
    """Return a function that makes the matrix again."""
    monkeypatch.setenv("COLUMNS", "200")

    def make():
        matrix = make_matrix(tmp_path / "results", [RUNNING, REQUEUED, WAITING], took=None)
        make_engine(matrix)
        first, second, _ = make_submission(matrix, [[RUNNING.name], [REQUEUED.name], [WAITING.name]], nodes=2)
        make_submission(matrix, [[]], number=2, job="13", kind=REPORT)
        claim(first, "12_0", host="n1", nodes=("n1", "n2"), pid=7)
        claim(second, "12_1", host="n3", age_s=500.0)
        end(second, "12_1", requeued=True, kind="time limit", age_s=400.0)
        for number in (0, 1):
            node(NodeDir(matrix.run(RUNNING.name), number), f"n{number + 1}")
            write_json(first.status, {"status": "running", "started": 1.0, "counts": {}})
            write_json(matrix.run(RUNNING.name).rank_state(number), {"attempt": 1, "host": "n1", "time": 1.0})
        log = matrix.run(RUNNING.name).path / "nodes/1/output.log"
        log.write_text("Iter 1\n")
        first.log.write_text("job 12\n")
        write_json(JobsDir(matrix).submitter, {"host": "n9", "pid": 3, "token": "x", "counter": 1})
        os.utime(JobsDir(matrix).submitter, (1.0, 1.0))
        views = {"1.0": view("12_0", "running"), "1.1": view("12_1", "pending"), "1.2": view("12_2", "pending")}
        answer(matrix, views, age_s=30.0)
        jobs = {"12": "kmatrix-k7-1", "13": "kmatrix-k7-2", THEIRS: "kmatrix-zz-1"}
        live = {job: {"label": label, "phase": SchedulerPhase.RUNNING, "after": ""} for job, label in jobs.items()}
        slurm.file.write_text(json.dumps(live))
        return matrix

    return make


def call(command, matrix):
    """Return the exit status, the output and the errors of a command."""
    if command == "runner":
        try:
            return run_job(matrix.path, 1, 0, {}), "", ""
        except KmatrixError as error:
            return 2, "", f"error: {error}"
    words = {
        "logs": ["RUN=1"],
        "hold": [f"RUN={RUNNING.name}"],
        "continue": ["RETRY_FAILED=1"],
    }
    try:
        done = run(command, f"TARGET={matrix.path}", *words.get(command, []), f"O={matrix.path.parent.parent}")
    except BaseException as error:  # what `main` lets through ends with a traceback
        return 70, "", repr(error)
    return done.status, done.out, done.err


def wrong(case, made, slurm):
    """Return what is wrong with the answer to a case, "" if nothing is."""
    file, damage, command = case
    matrix = made()
    DAMAGES[damage](matrix.path / file)
    before, began = Path("/etc/passwd").read_bytes(), time.monotonic()
    status, out, err = call(command, matrix)
    took = time.monotonic() - began
    jobs = slurm.state
    found = []
    if status not in (0, 1, 2, 130) or "Traceback" in err or (status == 2 and "error: " not in err):
        found.append(f"status {status}\n{err[-1500:]}")
    if set(jobs) - {"12", "13", THEIRS} and command != "runner":
        labels = [about["label"] for job, about in jobs.items() if job not in ("12", "13", THEIRS)]
        found.append(f"submitted {labels} while the jobs of all runs are live\n{out}{err}")
    if jobs[THEIRS]["phase"] != SchedulerPhase.RUNNING:
        found.append("cancelled the job of another matrix")
    if any(ord(sign) < 32 and sign not in "\n\t" for sign in out + err):
        found.append("control characters")
    if took > 20.0:
        found.append(f"took {took:.0f} s")
    assert Path("/etc/passwd").read_bytes() == before
    shutil.rmtree(matrix.path)
    return "\n".join(f"{file}, {damage}, {command}: {one}" for one in found)


# Found by the test of all cases.
KNOWN = (
    ("jobs", "pipe", "continue"),
    ("jobs", "missing", "test-rerun"),
    ("jobs/jobs.jsonl", "pipe", "stop"),
    (f"{JOBS}/submission.json", "long line", "continue"),
    ("engine.json", "missing", "test-rerun"),
)


def check(cases, made, slurm):
    problems = list(filter(None, (wrong(case, made, slurm) for case in cases)))
    assert not problems, f"{len(problems)} of {len(cases)}\n" + "\n".join(problems)


def test_the_undamaged_matrix_is_read_by_all_commands(made, slurm):
    for command in COMMANDS:
        matrix = made()
        status, out, err = call(command, matrix)
        assert status == (2 if command in ("runner", "test-rerun") else 0), (command, out, err)
        shutil.rmtree(matrix.path)


def test_a_sample_of_damaged_files_ends_no_command_with_a_traceback(made, slurm):
    check([*KNOWN, *random.Random(13).sample(CASES, 40)], made, slurm)


@pytest.mark.slow
def test_none_of_many_damaged_files_ends_a_command_with_a_traceback(made, slurm):
    check(random.Random(13).sample(CASES, 400), made, slurm)
