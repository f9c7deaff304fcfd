"""What the programs of a real Slurm 22.05.8 printed (tests/fixtures/slurm), and a `subprocess.run` that prints it.

The cluster has three nodes: n1 and n2 with 4 GPUs of the type a10g, n3 with 2; the partitions main (default, 2 days),
urgent (1 hour) and short (5 minutes).
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kmatrix.engines.slurm import commands

RECORDED = Path(__file__).parents[1] / "fixtures" / "slurm"
UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"

# squeue --format=%i|%T|%r|%N|%S|%k with times in Unix seconds.
QUEUE = """\
2|CANCELLED|PartitionConfig||1795409776|kmatrix:abc:9
4|FAILED|BadConstraints||1795409776|kmatrix:abc:8
33_[2-6,8-9%2]|PENDING|JobArrayTaskLimit||N/A|kmatrix:abc:1
34_[0-3]|PENDING|Dependency||N/A|kmatrix:abc:2
36|PENDING|BeginTime||1795413376|kmatrix:abc:3
33_0|RUNNING|None|n[1-2]|1795409777|kmatrix:abc:1
33_1|COMPLETING|None|n3|1795409777|kmatrix:abc:1
squeue: some plugin says hello
"""


@dataclass
class Answers:
    """The answers of the programs of Slurm, by the start of their command lines; and the calls."""

    texts: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # start -> status, stdout, stderr
    calls: list[tuple[str, ...]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)  # of subprocess.run

    def run(self, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(tuple(words))
        self.options.append(options)
        line = " ".join(words)
        start = max((start for start in self.texts if line.startswith(start)), key=len, default=None)
        if start is None:
            raise FileNotFoundError(words[0])
        status, out, err = self.texts[start]
        return subprocess.CompletedProcess(list(words), status, out, err)

    def say(self, start: str, out: str = "", *, err: str = "", status: int = 0) -> None:
        self.texts[start] = (status, out, err)

    def stop_controller(self) -> None:
        self.texts = {}
        for start in ("squeue", "scontrol", "sbatch", "scancel", "sacct"):
            self.say(start, err=UNREACHABLE, status=1)


def recorded(name: str) -> str:
    """Return what `scontrol show NAME` printed."""
    return (RECORDED / f"{name}.txt").read_text(encoding="utf-8")


def answer(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Replace the programs of Slurm, and return their answers."""
    found = Answers()
    for name in ("node", "partition"):
        found.say(f"scontrol --oneliner show {name}", recorded(name))
    found.say("scontrol show config", recorded("config"))
    found.say("squeue", QUEUE)
    found.say("sbatch --test-only")
    found.say("sbatch --parsable", "33\n")
    found.say("scancel")
    found.say("sacct", err="Slurm accounting storage is disabled", status=1)
    fake = SimpleNamespace(**{**vars(subprocess), "run": found.run})  # other programs, such as git, are the real ones
    monkeypatch.setattr(commands, "subprocess", fake)
    return found
