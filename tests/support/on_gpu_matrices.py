"""Matrices on the GPUs of `make check-gpu`, run by the command that users run.

On the CPU the driver is the simulated one, with two GPUs, and the trainer computes on the CPU instead of its GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from factories import ROOT
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.simulate.library import build
from kmatrix.simulate.library import environment as simulated
from on_gpu_runs import Place, script
from skips import require_program

MIB = 2**20
SIMULATED_MIB = 1152  # memory of a simulated GPU: a small model can be too large for it
SCENARIO = f"""
gpus 2
0 * mem 0
0 * memtotal {SIMULATED_MIB}
"""
# Every Python that finds sitecustomize.py on its path imports it. This one changes the trainer alone: it computes on
# the CPU, names the GPU that it was given as PyTorch would, and with STAND_IN_OOM has no memory for the micro-batch of
# its configuration, which an attempt with --micro-batch replaces. It is started without torchrun, which needs as long
# to import PyTorch and has nothing to do for one rank.
STAND_IN = """
import os, sys

argv = sys.orig_argv
if "torch.distributed.run" in argv:
    trainer = argv[argv.index("gpt2.train") :]
    os.execv(sys.executable, [sys.executable, "-m", *trainer])

if "gpt2.train" in argv:
    import torch
    from gpt2 import dist, machine

    def machine_of(world):
        return original(world) | {"gpu": {"name": "simulated", "uuid": os.environ["CUDA_VISIBLE_DEVICES"]}}

    def forward(self, *args, **more):
        if self.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return evaluated(self, *args, **more)

    dist.choose_device = lambda kind, local_rank: torch.device("cpu")
    # Before anything imports it by its name.
    original, machine.machine_of = machine.machine_of, machine_of
    from gpt2.model.gpt2 import GPT
    if os.environ.get("STAND_IN_OOM") and "--micro-batch" not in argv:
        evaluated, GPT.forward = GPT.forward, forward
"""
UUIDS = """
import os
from kmatrix.gpu.nvml.detect import detect, usable
print(*(gpu.uuid for gpu in usable(detect(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=None)))
"""


def simulated_driver(variables: dict[str, str], folder: Path, scenario: str) -> dict[str, str]:
    """Return the environment of a process that sees the simulated GPUs of a scenario."""
    require_program("gcc")
    (folder / "test.scn").write_text(scenario, encoding="utf-8")
    free = {name: text for name, text in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
    return free | simulated(build(folder), folder / "test.scn")


@dataclass(frozen=True, slots=True)
class Attempt:
    """The last attempt of a run, as its files describe it."""

    run: RunDir
    given: tuple[str, ...]  # UUIDs of the GPUs that the runner gave it
    used: tuple[str, ...]  # UUIDs of the GPUs that its trainer saw
    started: float  # Unix seconds
    ended: float


class Runner:
    """`kmatrix COMMAND`, with a folder of its own for .config, data and results."""

    def __init__(self, device: Place, folder: Path) -> None:
        self._folder, self._environment = folder, device.environment
        self.memory = device.memory if device.is_gpu else SIMULATED_MIB * MIB
        if not device.is_gpu:
            self._environment = simulated_driver(self._environment, folder, SCENARIO)
            (folder / "stand_in").mkdir()
            (folder / "stand_in" / "sitecustomize.py").write_text(STAND_IN, encoding="utf-8")
            path = (self._environment["PYTHONPATH"], str(folder / "stand_in"))
            self._environment["PYTHONPATH"] = os.pathsep.join(path)
        self.check("olddefconfig", f"RESULTS_DIR={folder / 'results'}")

    @property
    def gpus(self) -> list[str]:
        """The UUIDs of the GPUs, in the order of the driver."""
        return script(UUIDS, self._environment).split()

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command and return its exit status and output."""
        command = [sys.executable, "-m", "kmatrix", *arguments, f"O={self._folder}"]
        environment = self._environment | variables
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    def check(self, *arguments: str, **variables: str) -> str:
        """Run a command that must succeed, and return its output."""
        done = self(*arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def matrix(self, printed: str) -> Path:
        """Return the directory of the matrix that the output of a command names."""
        found = re.search(r"test_matrix_results_\w+", printed)
        assert found, printed
        return self._folder / "results" / found[0]


def attempts(matrix: Path) -> list[Attempt]:
    """Return the last attempt of each run, in the order of their start."""
    found = []
    for path in matrix.glob("*/status.json"):
        run = RunDir(path.parent)
        last = read_json(run.status)["attempts"][-1]
        used = tuple(gpu["uuid"] for gpu in read_json(run.run_used)["gpus"])
        found.append(Attempt(run, tuple(last["gpus"]), used, last["started"], last["ended"]))
    return sorted(found, key=lambda attempt: attempt.started)
