"""A scheduler without a cluster. Its state is a file, so that it outlives the process that asks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from kmatrix.engines.base import Capacity, JobRules, NodeKind, Partition, UnreachableError
from kmatrix.errors import LaunchError
from kmatrix.records.files import replacing
from kmatrix.records.jobs.files import JobView, SchedulerPhase, SubmissionFile
from kmatrix.records.jobs.paths import SubmissionDir

# What sbatch does, in a process of its own, which inherits the lock of the submitter.
CLIENT = """
import pathlib, sys, time
sys.path[:0] = {path!r}
from fake_scheduler import FakeScheduler
pathlib.Path(sys.argv[3] + ".waits").touch()
while not pathlib.Path(sys.argv[3]).exists():
    time.sleep(0.01)
print(FakeScheduler(sys.argv[1]).receive(sys.argv[2]))
"""


class FakeScheduler:
    """The methods of a Scheduler, over a file with all jobs."""

    name = "Slurm"

    def __init__(self, file: str | Path, settings: Mapping[str, str] | None = None) -> None:
        self.file = Path(file)
        self.settings = dict(settings or {})
        self.refuses = ""  # why the next submission is refused
        self.loses_answer = False  # the next submission is received, and the answer is lost
        self.is_down = False
        self.problems: list[str] = []
        self.before_submit: Callable[[], object] = lambda: None
        self.client_gate: Path | None = None  # a client process ends when this file exists; None: no process
        self.asked = 0  # questions about jobs

    @property
    def state(self) -> dict[str, dict[str, str]]:
        """Job -> its label, phase, and the jobs that it waits for."""
        try:
            return dict(json.loads(self.file.read_text()))
        except FileNotFoundError:
            return {}

    def jobs(self, label: str = "") -> list[str]:
        """Return the jobs with this part of a label."""
        return [job for job, about in self.state.items() if label in about["label"]]

    def change(self, job: str, phase: SchedulerPhase) -> None:
        """Set the phase of a job. UNKNOWN: the scheduler has forgotten it."""
        state = self.state
        if phase is SchedulerPhase.UNKNOWN:
            del state[job]
        else:
            state[job]["phase"] = phase
        self._write(state)

    def receive(self, label: str, after: Sequence[str] = ()) -> str:
        """Create a job, as slurmctld does."""
        state = self.state
        job = str(100 + len(state))
        state[job] = {"label": label, "phase": SchedulerPhase.PENDING, "after": " ".join(after)}
        self._write(state)
        return job

    def _write(self, state: Mapping[str, Mapping[str, str]]) -> None:
        with replacing(self.file) as temporary:
            temporary.write_text(json.dumps(state))

    def capacity(self) -> Capacity:
        self._answer()
        kinds = (NodeKind(count=2, cpus=4, gpus=4),)
        batch = Partition(name="batch", is_default=True, kinds=kinds, seconds=3600.0)
        return Capacity(partitions=(batch,), kill_s=30.0, most_tasks=1000)

    def rules(self) -> JobRules:
        self._answer()
        return JobRules(most_tasks=1000, has_times=True, seconds=3600.0)

    def check_paths(self, paths: Collection[Path]) -> list[str]:
        return []

    def check(self, submissions: Sequence[SubmissionFile]) -> list[str]:
        self._answer()
        return self.problems

    def render(self, folder: SubmissionDir, submission: SubmissionFile) -> dict[str, str]:
        return {"job.sbatch": f"#!/bin/bash\n#SBATCH --comment={submission.label}\n"}

    def submit(self, folder: SubmissionDir, submission: SubmissionFile, after: Sequence[str] = ()) -> str:
        self._answer()
        assert folder.sbatch.read_text().endswith(f"={submission.label}\n")
        self.before_submit()
        if self.refuses:
            raise LaunchError(self.refuses)
        if self.client_gate is not None:
            here = [str(Path(__file__).parent), *os.environ["PYTHONPATH"].split(":")]
            words = [str(self.file), submission.label, str(self.client_gate)]
            program = [sys.executable, "-c", CLIENT.format(path=here), *words]
            return subprocess.run(program, close_fds=False, check=True, capture_output=True, text=True).stdout.strip()
        job = self.receive(submission.label, after)
        if self.loses_answer:
            self.loses_answer = False
            raise UnreachableError("Slurm does not answer")
        return job

    def find(self, labels: Collection[str]) -> Mapping[str, str]:
        self._answer()
        return {about["label"]: job for job, about in self.state.items() if about["label"] in labels}

    def poll(self, jobs: Mapping[str, str]) -> Mapping[str, JobView]:
        self._answer()
        self.asked += 1
        state, found = self.state, {}
        for share, job in jobs.items():
            about = state.get(job.partition("_")[0])
            phase = SchedulerPhase(about["phase"]) if about else SchedulerPhase.UNKNOWN
            found[share] = JobView(job=job, phase=phase, state=phase.upper())
        return found

    def cancel(self, jobs: Collection[str], *, now: bool = False) -> None:
        self._answer()
        for job in {job.partition("_")[0] for job in jobs}:
            self.change(job, SchedulerPhase.ENDED)

    def _answer(self) -> None:
        if self.is_down:
            raise UnreachableError("Slurm does not answer", why=f"asked at {time.time():.0f}")
