"""Run `kmatrix` commands in this process, in a temporary directory, with a fake number of GPUs."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kmatrix.cli.commands as cli
import kmatrix.experiment.doctor
import kmatrix.experiment.inputs.ask
import kmatrix.experiment.plan as planning
from kmatrix.experiment.cluster import resolve
from kmatrix.experiment.plan import Plan
from kmatrix.gpu.nvml.detect import Detected, Gpu
from kmatrix.output import run_program

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def runs(self) -> list[str]:
        """The lines of a dry run that describe a run."""
        return [line for line in self.out.splitlines() if line.startswith("run ")]

    @property
    def ids(self) -> list[str]:
        return [line.split()[1] for line in self.runs]

    @property
    def names(self) -> list[str]:
        return [line.split()[2] for line in self.runs]


@dataclass(frozen=True, slots=True)
class Program:
    """`kmatrix COMMAND ... O=folder`."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / ".config"

    def write(self, *lines: str) -> Path:
        """Write these lines to .config, as an editor would."""
        self.config.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return self.config

    def value(self, name: str) -> str | None:
        """Return the value of a symbol in .config: the text after =, "n" if it is not set, None if it is absent."""
        for line in self.config.read_text(encoding="utf-8").splitlines():
            if line == f"# CONFIG_{name} is not set":
                return "n"
            if line.startswith(f"CONFIG_{name}="):
                return line.partition("=")[2]
        return None

    def __call__(self, *arguments: str) -> CommandResult:
        has_path = any(argument.startswith(("O=", "KCONFIG_CONFIG=")) for argument in arguments)
        return run(*arguments, *([] if has_path else [f"O={self.folder}"]))

    def plan(self, *arguments: str, one: bool = False) -> Plan:
        """Return the plan of .config with these assignments."""
        _, parsed = cli.parse("test-matrix-dry-run", [*arguments, f"O={self.folder}"])
        return planning.make_plan(parsed.config, parsed.assignments, gpus=parsed.get("GPUS"), one=one)

    def check(self, *arguments: str) -> CommandResult:
        """Run a command that must succeed."""
        result = self(*arguments)
        assert result.status == 0, result.err
        return result

    def refused(self, *arguments: str) -> str:
        """Run a command that must be refused; return its message."""
        result = self(*arguments)
        assert result.status == 2, f"status {result.status}\n{result.out}\n{result.err}"
        assert result.err.startswith("error: "), result.err
        assert "Traceback" not in result.err
        return result.err


def main(words: Sequence[str]) -> int:
    """Run the command in this process, print its errors, and return its exit status."""
    return run_program(lambda: cli.main(words))


def run(*arguments: str) -> CommandResult:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return CommandResult(status, out.getvalue(), err.getvalue())


def prepare_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare data in this process: each program of its own would import for half a second."""

    def prepare(command: list[str], **_: Any) -> SimpleNamespace:
        from gpt2.prepare.__main__ import main

        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            return SimpleNamespace(returncode=main(command[3:]), stdout=out.getvalue())

    known = SimpleNamespace(run=prepare, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(kmatrix.experiment.inputs.ask, "subprocess", known)


def answer_for_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `doctor` find a working PyTorch without starting it, which takes seconds."""
    found = {"torch": "2.13.0", "cuda": "12.6", "available": True, "why": "", "bf16": True, "nccl": "2.27.3"}

    def answer(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, json.dumps(found), "")

    known = SimpleNamespace(run=answer, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(kmatrix.experiment.doctor, "subprocess", known)


def give_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make the planner detect this many GPUs, whatever the machine has."""
    gpus = tuple(Gpu(index=i, name="NVIDIA A10G", uuid=f"GPU-{i}", memory_total=23028) for i in range(count))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(resolve, "detect", lambda: Detected(gpus=gpus, notes=()))
