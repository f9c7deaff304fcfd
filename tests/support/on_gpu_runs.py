"""Runs on the device of `make check-gpu`: a GPU with NCCL, or the CPU with gloo in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import forked
from check_gpu import CPU, GPU, ON
from factories import ROOT, environment, make_run, ranks_of, train_command, trainer
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics

FAULTS = ("tests/support/trainer_faults.py",)
TRAINER = ("-m", "gpt2.train")
COUNTING = ("tests/support/counted_graphs.py",)
RANKS_ON_CPU = 2
MOST_RANKS = 8
TIMEOUT_S = 900.0  # of a run; a first compilation on a GPU takes minutes


class Process(Protocol):
    """What tests use of a started run."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def communicate(self, timeout: float = ...) -> tuple[str, str]: ...
    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """The device of the tests."""

    kind: str  # cuda or cpu
    gpus: int  # that PyTorch sees; on the CPU the ranks that stand for them

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def backend(self) -> str:
        return "nccl" if self.is_gpu else "gloo"

    @property
    def ranks(self) -> int:
        """The most ranks that divide a global batch of 8."""
        return max(ranks for ranks in (1, 2, 4, MOST_RANKS) if ranks <= self.gpus)

    @property
    def memory(self) -> int:
        """The bytes of memory of the first GPU."""
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a trainer. On a GPU, CUDA_VISIBLE_DEVICES is that of the tests."""
        variables = environment()
        if self.is_gpu:
            variables.pop("CUDA_VISIBLE_DEVICES")
            if "CUDA_VISIBLE_DEVICES" in os.environ:
                variables["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        return variables

    def fields(self, **changes: Any) -> dict[str, Any]:
        """Return the fields of a run on this device."""
        return {"device": self.kind, "ddp_backend": self.backend, **changes}

    def compiled(self, mode: str = "default") -> dict[str, Any]:
        """Return the fields of a compiled run."""
        return {"compile": True, "compile_mode": mode}

    def start(
        self, run_dir: RunDir, *arguments: str, program: tuple[str, ...] | None = None, attempt: int = 1, **more: object
    ) -> Process:
        """Start a run: torchrun with several ranks, else the trainer alone. more: environment variables.

        On the CPU all ranks are forked, which is the same but for the time, and a compiled run takes the compiler that
        only counts graphs: inductor's C++ takes half a minute per run and is tested elsewhere.
        """
        variables = self.environment | {name: str(value) for name, value in more.items()}
        train = read_json(run_dir.run_json)["train"]
        if program is None:
            program = TRAINER
            if not self.is_gpu and train["compile"]:
                program = COUNTING
                variables["GRAPHS"] = str(run_dir.path / "graphs")
        if not self.is_gpu:
            command = [*trainer(run_dir, attempt=attempt, program=program), *arguments]
            return forked.start(command, variables, ranks=ranks_of(run_dir))
        command = [*train_command(run_dir, attempt=attempt, program=program), *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def train(self, run_dir: RunDir, *arguments: str, ok: bool = True, **options: Any) -> str:
        """Train a run to its end and return its output. ok: it must succeed."""
        process = self.start(run_dir, *arguments, **options)
        output = output_of(process)
        assert process.returncode == 0 or not ok, output[-6000:]
        return output

    def trained(self, folder: Path, name: str, **changes: Any) -> RunDir:
        """Make a run on this device, train it and return its directory."""
        run_dir = make_run(folder, name, **self.fields(**changes))
        self.train(run_dir)
        return run_dir


def place() -> Place:
    """Return the device that the environment chooses."""
    if os.environ.get(ON, GPU) == CPU:
        return Place("cpu", RANKS_ON_CPU)
    import torch

    return Place("cuda", torch.cuda.device_count())


def output_of(process: Process, timeout: float = TIMEOUT_S) -> str:
    """Wait for the end of a process and return its output. It is killed if that takes too long."""
    try:
        return "".join(text for text in process.communicate(timeout=timeout) if text)
    finally:
        process.kill()


def losses(run_dir: RunDir) -> list[float]:
    """Return the training loss of each logged step."""
    lines = merged_metrics(run_dir.metrics)
    return [line.values["train/loss"] for line in lines if "train/loss" in line.values]


def ended(run_dir: RunDir) -> tuple[str, str | None, str | None]:
    """Return status, kind and ended_by of a result."""
    result = read_json(run_dir.result)
    return result["status"], result["kind"], result["ended_by"]


def script(text: str, variables: dict[str, str], *arguments: str, timeout: float = 300) -> str:
    """Run a short Python program and return what it prints."""
    command = [sys.executable, "-c", text, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
