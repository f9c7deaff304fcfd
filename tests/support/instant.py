"""Commands in this process whose runs finish at once, and kills at any call that changes names."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kmatrix.clock import clock
from kmatrix.engines.place import Here
from kmatrix.records.attempts import Attempt, Exit
from kmatrix.records.checkpoint_dir import own_checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import append_jsonl, read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.runner import background
from kmatrix.runner.supervisor import Supervisor
from programs import Program, give_gpus

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "link")  # functions of os that change names
STEPS = (10, 20, 30)  # of the checkpoints of a run


class Ranks:
    """A trainer that has finished as soon as it is started."""

    trouble = None
    exits = (Exit(rank=0, code=0),)

    def __init__(self, run: Path, attempt: Attempt) -> None:
        folder, plan = RunDir(run), read_json(run / "run.json")
        folder.output_log.write_text(f"attempt {attempt.number}\n")
        append_jsonl(folder.metrics, {"step": 30, "time": time.time(), "attempt": attempt.number, "train/loss": 2.0})
        save_checkpoints(own_checkpoint_dir(folder))
        values = {"run_id": plan["run_id"], "attempt": attempt.number, "status": "finished", "step": 30}
        write_json(folder.result, {**values, "final_val_loss": 2.5, "used": plan["train"]}, durable=False)

    def poll(self) -> bool:
        return True

    def stop(self, grace_s: float) -> None: ...

    def kill(self) -> None: ...


class Jobs:
    """Jobs that have ended when they are submitted."""

    broken: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path

    def poll(self) -> dict[str, bool]:
        return {}

    def submit(self, runs: Sequence[str]) -> None:
        for run in runs:
            one = Supervisor(
                run=self.path / run,
                place=Here(pulse_s=1.0),
                start=lambda attempt, _, run=run: Ranks(self.path / run, attempt),  # type: ignore[misc]
            )
            try:
                background.finish(one.lead())
            finally:  # as the kernel does it after a kill
                if one.handle is not None:
                    os.close(one.handle)

    def cancel(self, runs: Sequence[str]) -> None: ...


def save_checkpoints(folder: Path) -> None:
    """Save checkpoints, the last of which is also the best and the final one."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        last = step == STEPS[-1]
        Checkpoints(folder).put(
            step, lambda file, step=step: file.write(b"weights of step %d" % step), attempt=1, val_loss=2.5, final=last
        )


def start(path: Path) -> int:
    """Be the background process of a matrix, in this one."""
    background.run(path)
    return 0


def instant_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return kmatrix whose runs finish at once, without GPUs, and with the configuration of a small CPU run."""
    monkeypatch.setattr(background, "local", Jobs)
    monkeypatch.setattr(background, "start", start)
    monkeypatch.setattr(background, "said", lambda *_: "")
    monkeypatch.setattr(clock, "sleep", lambda _: None)
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
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CHANGES}

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
        digest = hashlib.sha256(content).hexdigest()
        found[str(path.relative_to(folder))] = (stat.st_mode, stat.st_ino, stat.st_mtime_ns, digest, link)
    return found
