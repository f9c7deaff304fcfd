"""Commands in this process with an engine that finishes each run at once, and kills at any call that changes names.

As a program it is kmatrix with that engine and a slow creation of matrices: `python instant.py COMMAND NAME=value ...`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kmatrix.cli.commands as cli
from kmatrix.records.checkpoint_dir import own_checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import append_jsonl, read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.runner import execute
from kmatrix.status.state import JobPhase, JobState, RunPlan

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "link")  # functions of os that change names
STEPS = (10, 20, 30)  # of the checkpoints of a run


class InstantEngine:
    """An engine whose runs finish at their submission, with the files of a trainer."""

    def __init__(self, *_: object, **__: object) -> None:
        self._jobs: dict[str, JobState] = {}

    def check(self, runs: Sequence[RunPlan]) -> list[str]:
        return []

    def plan(self, runs: Sequence[RunPlan]) -> str:
        return ""

    def submit(self, runs: Sequence[RunPlan]) -> dict[str, str]:
        for run in runs:
            finish_run(run.dir, run.attempt)
            now = time.time()
            self._jobs[run.name] = JobState(phase=JobPhase.ENDED, started=now - 1, ended=now, exit_code=0)
        return {run.name: run.name for run in runs}

    def poll(self, jobs: Mapping[str, str] | None = None) -> dict[str, JobState]:
        return dict(self._jobs)

    def cancel(self, jobs: Mapping[str, str] | None = None, *, now: bool = False) -> None:
        pass


def finish_run(run: RunDir, attempt: int) -> None:
    """Write the files of a finished run: its result, metrics and checkpoints."""
    plan = read_json(run.run_json)
    write_json(run.run_used, {"train": plan["train"], "adjusted": []}, durable=False)
    run.output_log.write_text(f"attempt {attempt}\n")
    append_jsonl(run.metrics, {"step": 30, "time": time.time(), "attempt": attempt, "train/loss": 2.0})
    save_checkpoints(own_checkpoint_dir(run))
    values = {"run_id": plan["run_id"], "attempt": attempt, "status": "finished", "step": 30, "final_val_loss": 2.5}
    write_json(run.result, values, durable=False)


def save_checkpoints(folder: Path) -> None:
    """Save checkpoints, the last of which is also the best and the final one."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        last = step == STEPS[-1]
        Checkpoints(folder).put(
            step, lambda file, step=step: file.write(b"weights of step %d" % step), attempt=1, val_loss=2.5, final=last
        )


def instant_program(folder: Path, monkeypatch: Any) -> Any:
    """Return kmatrix with the instant engine and without GPUs, and with the configuration of a small CPU run."""
    from programs import Program, give_gpus  # not above: they import pytest, which this program does not need

    monkeypatch.setattr(execute, "LocalEngine", InstantEngine)
    give_gpus(monkeypatch, 0)
    made = Program(folder)
    made.check("defconfig-gpt2-cpu-quick")
    return made


class Killed(BaseException):
    """The process was killed: nothing that it does afterwards has an effect."""


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Kill at the call with this number (from 0) of a function that changes names. Yields the names of the calls."""
    calls: list[str] = []
    real = {name: getattr(os, name) for name in CHANGES}

    def call(name: str, *arguments: Any, **options: Any) -> Any:
        if len(calls) >= number:  # also in the `finally` of the killed code
            raise Killed(name)
        calls.append(name)
        return real[name](*arguments, **options)

    for name in CHANGES:
        setattr(os, name, functools.partial(call, name))
    try:
        yield calls
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def tree(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return the mode, times and content of every file and directory of a tree."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        link = str(path.readlink()) if path.is_symlink() else ""
        found[str(path.relative_to(folder))] = (
            stat.st_mode,
            stat.st_ino,
            stat.st_mtime_ns,
            hashlib.sha256(content).hexdigest(),
            link,
        )
    return found


def slowly(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes 10 ms more before it starts, so that kills come in its middle."""

    @functools.wraps(make)
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return make(*arguments, **options)

    return slow


def main() -> int:
    """Run a command with the instant engine. With KMATRIX_SLOW=1 each change of a name takes 10 ms more."""
    execute.LocalEngine = InstantEngine  # type: ignore[assignment,misc]
    if os.environ.get("KMATRIX_SLOW"):
        for name in ("rename", "replace", "mkdir"):
            setattr(os, name, slowly(getattr(os, name)))
    print(json.dumps({"pid": os.getpid()}), flush=True)
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
