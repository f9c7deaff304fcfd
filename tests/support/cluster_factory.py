"""Make the files of a matrix that a cluster runs, as the submitter, the scheduler's answers and the jobs write them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.engines.base import Capacity, UnreachableError
from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import (
    SLURM,
    EngineFile,
    JobLine,
    JobView,
    NodeFile,
    PollFile,
    SchedulerPhase,
    Shape,
    ShareEnd,
    ShareEntry,
    ShareOwner,
    SubmissionFile,
    append_job_line,
    job_label,
    write_engine,
    write_poll,
)
from kmatrix.records.jobs.paths import JobsDir, NodeDir, ShareDir, SubmissionDir
from kmatrix.records.paths import MatrixDir


def make_empty(root: Path, *runs: str) -> MatrixDir:
    """Make a matrix without files, and the directories of these runs."""
    matrix = MatrixDir(root / "test_matrix_results_20261120_052300")
    for path in (matrix.path, *(matrix.run(name).path for name in runs)):
        path.mkdir()
    return matrix


def make_engine(matrix: MatrixDir, *, engine: str = SLURM, submitted: bool = True, path: str = "") -> None:
    """Write engine.json, which makes a matrix one of a cluster. path: another one than its own."""
    own = path or str(matrix.path.resolve())
    write_engine(matrix, EngineFile(engine=engine, id="k7", path=own, submitted=submitted))


def make_submission(
    matrix: MatrixDir,
    shares: Sequence[Sequence[str]],
    *,
    number: int = 1,
    job: str = "12",
    events: Sequence[str] = ("intent", "submitted"),
    nodes: int = 1,
    kind: str = "runs",
    seeds: bool = False,
    **shape: int,
) -> list[ShareDir]:
    """Write a submission, its lines in jobs.jsonl and the folders of its shares. shares: the runs of each."""
    folder = JobsDir(matrix).submission(number)
    entries = tuple(ShareEntry(task=task, runs=tuple(runs)) for task, runs in enumerate(shares))
    found = [folder.share(entry.task) for entry in entries]
    for share in found:
        share.folder.mkdir(parents=True, exist_ok=True)
    label, wanted = job_label("k7", number), Shape(nodes=nodes, **shape)
    about = SubmissionFile(kind=kind, label=label, shape=wanted, shares=entries, seeds=seeds)
    write_submission(folder, about)
    for event in events:
        known = job if event == "submitted" else None
        append_job_line(JobsDir(matrix), JobLine(event=event, submission=number, time=time.time(), job=known))
    return found


def view(job: str, phase: str, **more: object) -> JobView:
    """Return the scheduler's view of a job."""
    return JobView(job=job, phase=SchedulerPhase(phase), **more)  # type: ignore[arg-type]


def answer(matrix: MatrixDir, jobs: Mapping[str, JobView], *, why_not: str = "", age_s: float = 0.0) -> None:
    """Write poll.json, as if it had been written some time ago."""
    write_poll(JobsDir(matrix), PollFile(jobs=dict(jobs), why_not=why_not))
    age(JobsDir(matrix).poll, age_s)


def claim(share: ShareDir, job: str = "12", *, age_s: float = 0.0, **more: object) -> None:
    """Write the claim of the runner in a job, as if it had been written some time ago."""
    share.folder.mkdir(parents=True, exist_ok=True)
    write_json(share.owner, as_json(ShareOwner(job=job, **more)), durable=False)  # type: ignore[arg-type]
    age(share.owner, age_s)


def end(share: ShareDir, job: str = "12", *, age_s: float = 0.0, **more: object) -> None:
    """Write the end of a start of a job, as if it had been written some time ago."""
    write_json(share.end, as_json(ShareEnd(job=job, **more)), durable=False)  # type: ignore[arg-type]
    age(share.end, age_s)


def node(folder: NodeDir, host: str, *, age_s: float = 0.0, **more: object) -> None:
    """Write node.json of the agent on one node of a run, as if it had been written some time ago."""
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder.node_json, as_json(NodeFile(node=folder.node, host=host, **more)), durable=False)  # type: ignore[arg-type]
    age(folder.node_json, age_s)


def write_submission(folder: SubmissionDir, submission: SubmissionFile) -> None:
    """Write submission.json."""
    write_json(folder.submission_json, as_json(submission))


def age(path: os.PathLike[str], seconds: float) -> None:
    """Make a file look as if it had been written some time ago."""
    if seconds:
        then = time.time() - seconds
        os.utime(path, (then, then))


@dataclass
class ScriptedScheduler:
    """A scheduler with scripted answers, which counts its questions. why_not: it does not answer, with these words."""

    phases: dict[str, str] = field(default_factory=dict)  # job, with the task of an array -> phase; others: forgotten
    reasons: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)  # job -> the label that it has
    why_not: str = ""
    questions: int = 0
    cancelled: list[tuple[str, ...]] = field(default_factory=list)
    name: str = "Slurm"

    def _asked(self) -> None:
        self.questions += 1
        if self.why_not:
            raise UnreachableError(f"{self.name} does not answer", why=self.why_not)

    def capacity(self) -> Capacity:
        self._asked()
        return Capacity()

    def check_paths(self, paths: Collection[Path]) -> list[str]:
        return []

    def check(self, submissions: Sequence[SubmissionFile]) -> list[str]:
        return []

    def render(self, folder: object, submission: SubmissionFile) -> dict[str, str]:
        return {}

    def submit(self, folder: object, submission: SubmissionFile, after: Sequence[str] = ()) -> str:
        self._asked()
        return "12"

    def find(self, labels: Sequence[str]) -> Mapping[str, str]:
        self._asked()
        return {label: job for label, job in self.labels.items() if label in labels}

    def poll(self, jobs: Mapping[str, str]) -> Mapping[str, JobView]:
        self._asked()
        return {
            share: view(
                job,
                self.phases.get(job, "unknown"),
                reason=self.reasons.get(job, ""),
                label=self.comments.get(job, ""),
            )
            for share, job in jobs.items()
        }

    def cancel(self, jobs: Sequence[str], *, now: bool = False) -> None:
        self._asked()
        self.cancelled.append(tuple(jobs))
        self.phases |= dict.fromkeys(jobs, "ended")
