"""The program `kmatrix` called in this process, on a folder of its own, with as many GPUs as a test asks for."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import pytest

import kmatrix.cli.commands as cli
import kmatrix.experiment.plan as planning
from kmatrix.experiment.plan import Plan
from kmatrix.gpu.nvml.detect import Detected, Gpu

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command gave. status: its exit status."""

    status: int
    out: str
    err: str

    @property
    def runs(self) -> list[str]:
        """The lines of a dry run that stand for a run."""
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
        """Make these lines the .config, as somebody does who edits it by hand."""
        self.config.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return self.config

    def value(self, name: str) -> str | None:
        """Return what .config says of a symbol: the text behind =, "n" where it is not set, None where it is absent."""
        for line in self.config.read_text(encoding="utf-8").splitlines():
            if line == f"# CONFIG_{name} is not set":
                return "n"
            if line.startswith(f"CONFIG_{name}="):
                return line.partition("=")[2]
        return None

    def __call__(self, *words: str) -> Answer:
        places = [] if any(word.startswith(("O=", "KCONFIG_CONFIG=")) for word in words) else [f"O={self.folder}"]
        return run(*words, *places)

    def plan(self, *words: str, one: bool = False) -> Plan:
        """Return the plan of .config with these words over it."""
        _, given = cli.parse("test-matrix-dry-run", [*words, f"O={self.folder}"])
        return planning.make_plan(given.config, given.assignments, gpus=given.get("GPUS"), one=one)

    def good(self, *words: str) -> Answer:
        """Run a command that must succeed."""
        answer = self(*words)
        assert answer.status == 0, answer.err
        return answer

    def refused(self, *words: str) -> str:
        """Run a command that must be refused; return its message."""
        answer = self(*words)
        assert answer.status == 2, f"status {answer.status}\n{answer.out}\n{answer.err}"
        assert answer.err.startswith("error: "), answer.err
        assert "Traceback" not in answer.err
        return answer.err


def run(*words: str) -> Answer:
    """Call the program with these words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(list(words))
    return Answer(status, out.getvalue(), err.getvalue())


def give_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the planner see this many GPUs, whatever the machine has."""
    gpus = tuple(Gpu(index=i, name="NVIDIA A10G", uuid=f"GPU-{i}", memory_total=23028) for i in range(count))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(planning, "detect", lambda: Detected(gpus=gpus, notes=()))
