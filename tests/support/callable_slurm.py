"""A Slurm as one callable in place of subprocess.run: its jobs are a dict."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SINFO = "main*|2-00:00:00|1-infinite|3|16|4000|gpu:a10g:2(S:0)\nshort|5:00|1-2|3|16|4000|gpu:a10g:2\n"
LIVE = ("PENDING", "RUNNING")


@dataclass
class Job:
    name: str
    state: str = "PENDING"
    reason: str = "Priority"


@dataclass
class FakeSlurm:
    """sbatch, squeue, scancel, sinfo and scontrol."""

    jobs: dict[str, Job] = field(default_factory=dict)  # id, with its task -> job
    silent: str = ""  # "before": no answer, and nothing is done; "after": it is done, and the answer is lost
    sinfo: str = SINFO
    config: str = "KillWait                = 30 sec\nMaxArraySize            = 1001\n"
    calls: list[Sequence[str]] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)
    answers: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # program -> its next status, stdout, stderr
    number: int = 10

    def __call__(self, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(words)
        self.environments.append(options["env"])
        out = "" if self.silent == "before" else getattr(self, f"do_{words[0]}")(words[1:])
        lost = (1, "", f"{words[0]}: error: Unable to contact slurm controller (connect failure)")
        status, out, err = self.answers.pop(words[0], lost if self.silent else (0, out, ""))
        return subprocess.CompletedProcess(words, status, out, err)

    def do_sbatch(self, words: Sequence[str]) -> str:
        text = Path(words[-1]).read_text(encoding="utf-8")
        self.number += 1
        name, array = re.search(r"--job-name=(\S+)", text), re.search(r"--array=0-(\d+)", text)
        assert name is not None
        for task in [f"_{task}" for task in range(int(array[1]) + 1)] if array else [""]:
            self.jobs[f"{self.number}{task}"] = Job(name[1])
        return f"{self.number}\n"

    def do_squeue(self, words: Sequence[str]) -> str:
        lines = [f"{job}|{one.name}|{one.state}|{one.reason}|n1|N/A" for job, one in self.jobs.items()]
        return "\n".join([*lines, "99|somebody|RUNNING|None|n2|1", "a plugin's message", ""])

    def do_scancel(self, words: Sequence[str]) -> str:
        for word in words[1:]:
            base, _, tasks = word.partition("_")
            for job in [f"{base}_{task}" for task in tasks.strip("[]").split(",")] if tasks else [word]:
                self.jobs[job].state = "CANCELLED" if self.jobs[job].state in LIVE else self.jobs[job].state
        return ""

    def do_sinfo(self, words: Sequence[str]) -> str:
        return self.sinfo

    def do_scontrol(self, words: Sequence[str]) -> str:
        return self.config

    def live(self) -> dict[str, Job]:
        return {job: one for job, one in self.jobs.items() if one.state in LIVE}
