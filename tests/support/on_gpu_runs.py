"""Runs on the device of `make check-gpu`: a GPU with NCCL, or the CPU with gloo in its place."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
from check_gpu import CPU, GPU, ON
from factories import ROOT, environment, make_run, ranks_of, train_command, trainer
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics

TRAINER = ("-m", "gpt2.train")
COUNTING = ("tests/support/counted_graphs.py",)
FAULTS = ("tests/support/trainer_faults.py",)
WAITS = ("tests/support/no_waits.py",)
TIMEOUT_S = 900.0  # of a run; a first compilation on a GPU takes minutes


@dataclass(frozen=True, slots=True)
class Place:
    """The device of the tests."""

    kind: str  # cuda or cpu
    gpus: int  # that PyTorch sees; on the CPU the ranks that stand for them

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a trainer. On a GPU, CUDA_VISIBLE_DEVICES is that of the tests."""
        variables = environment() | {"PYTHONUNBUFFERED": "1", "TORCH_LOGS": "recompiles"}
        if self.is_gpu:
            variables.pop("CUDA_VISIBLE_DEVICES")
            variables |= {n: t for n, t in os.environ.items() if n == "CUDA_VISIBLE_DEVICES"}
        return variables

    def made(self, folder: Path, name: str = "run", **fields: Any) -> RunDir:
        """Make a run on this device."""
        backend = "nccl" if self.is_gpu else "gloo"
        return make_run(folder, name, **{"device": self.kind, "ddp_backend": backend, **fields})

    def train(
        self,
        run: RunDir,
        *arguments: str,
        ok: bool = True,
        program: tuple[str, ...] = TRAINER,
        attempt: int = 1,
        **more: object,
    ) -> tuple[int, str]:
        """Train a run to its end: torchrun with several ranks, else the trainer alone; return its status and output.

        more: environment variables. On the CPU all ranks are forked, which is the same but for the time, and a compiled
        run takes the compiler that only counts graphs: inductor's C++ takes half a minute per run.
        """
        variables = self.environment | {name: str(value) for name, value in more.items()}
        if not self.is_gpu:
            if program == TRAINER and read_json(run.run_json)["train"]["compile"]:
                program, variables["GRAPHS"] = COUNTING, str(run.path / "graphs")
            command = [*trainer(run, attempt=attempt, program=program), *arguments]
            process: Any = forked.start(command, variables, ranks=ranks_of(run))
        else:
            command = [*train_command(run, attempt=attempt, program=program), *arguments]
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(command, cwd=ROOT, env=variables, **pipes)
        try:
            output = "".join(text for text in process.communicate(timeout=TIMEOUT_S) if text)
        finally:
            process.kill()
        assert process.returncode == 0 or not ok, output[-6000:]
        return process.returncode, output


def place() -> Place:
    """Return the device that the environment chooses."""
    if os.environ.get(ON, GPU) == CPU:
        return Place("cpu", 2)
    import torch

    return Place("cuda", torch.cuda.device_count())


def losses(run: RunDir) -> list[float]:
    """Return the training loss of each logged step."""
    return [line.values["train/loss"] for line in merged_metrics(run.metrics) if "train/loss" in line.values]
