"""The names of all files below `jobs/` of a matrix, and of the folders of a run's nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kmatrix.records.paths import MatrixDir, RunDir


@dataclass(frozen=True, slots=True)
class JobsDir:
    """The folder `jobs` of a matrix, and engine.json next to it."""

    matrix: MatrixDir

    @property
    def path(self) -> Path:
        return self.matrix.path / "jobs"

    @property
    def engine_json(self) -> Path:
        """Return the file that makes a matrix one of a cluster."""
        return self.matrix.path / "engine.json"

    @property
    def log(self) -> Path:
        """Return the append-only log of the submitter: what it meant to submit, and what it has submitted."""
        return self.path / "jobs.jsonl"

    @property
    def lock(self) -> Path:
        """Return the lock of the submitter, which its sbatch inherits."""
        return self.path / ".lock"

    @property
    def submitter(self) -> Path:
        """Return the file of the process that submits now: two nodes may both hold the lock."""
        return self.path / ".submitter.json"

    @property
    def former(self) -> Path:
        """Return the name that this folder gets in a copy of the matrix: its jobs are those of the original."""
        return self.matrix.path / "jobs.former"

    @property
    def poll(self) -> Path:
        """Return the newest answer of the scheduler."""
        return self.path / "poll.json"

    @property
    def poll_lock(self) -> Path:
        """Return the lock of the process that asks the scheduler, so that others on its machine wait for its answer."""
        return self.path / ".poll.lock"

    def submission(self, number: int) -> SubmissionDir:
        """Return the folder of a submission. number: from 1."""
        return SubmissionDir(self.path / f"{number:04d}")

    def submissions(self) -> list[SubmissionDir]:
        """Return the submissions in the order of their numbers. A folder is one as soon as it is listed."""
        # Listed, not looked for by name: on network storage, a new name may be unknown for a while after a failed look.
        try:
            names = [path.name for path in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [name for name in names if name.isascii() and name.isdecimal() and len(name) >= 4]
        return [SubmissionDir(self.path / name) for name in sorted(found, key=int)]


@dataclass(frozen=True, slots=True)
class SubmissionDir:
    """The folder of a submission: shares of one shape that were handed to the scheduler at once."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def submission_json(self) -> Path:
        return self.path / "submission.json"

    @property
    def sbatch(self) -> Path:
        """Return the script that was given to sbatch."""
        return self.path / "job.sbatch"

    @property
    def manifest(self) -> Path:
        """Return the Kubernetes objects that were created."""
        return self.path / "job.yaml"

    def share(self, task: int) -> ShareDir:
        """Return the matrix as one share sees it. task: from 0."""
        return ShareDir(self.path.parent.parent, self.number, task)


@dataclass(frozen=True, slots=True)
class ShareDir(MatrixDir):
    """A matrix as one share sees it: the lock, status and journal are its own; the runs are those of the matrix.

    The runner in a job drives it like a matrix.
    """

    submission: int
    task: int

    @property
    def id(self) -> str:
        """The share as users read it: `3.7` is task 7 of submission 3."""
        return f"{self.submission}.{self.task}"

    @property
    def folder(self) -> Path:
        return self.path / "jobs" / f"{self.submission:04d}" / str(self.task)

    @property
    def owner(self) -> Path:
        """Return the claim of the runner that has this share now."""
        return self.folder / "owner.json"

    @property
    def end(self) -> Path:
        """Return the file that tells how the last start of the job ended."""
        return self.folder / "end.json"

    @property
    def log(self) -> Path:
        """Return the output of the job script."""
        return self.folder / "slurm.log"

    @property
    def status(self) -> Path:
        return self.folder / "status.json"

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    @property
    def lock(self) -> Path:
        return self.folder / ".lock"

    @property
    def runner_log(self) -> Path:
        return self.log


@dataclass(frozen=True, slots=True)
class NodeDir:
    """The files of one node of a run over several nodes. Node 0 uses the run's own folder for log and recording."""

    run: RunDir
    node: int  # from 0

    @property
    def path(self) -> Path:
        return self.run.path / "nodes" / str(self.node)

    @property
    def node_json(self) -> Path:
        """Return the file of the agent on this node, rewritten while it lives."""
        return self.path / "node.json"

    @property
    def end(self) -> Path:
        """Return how the processes of this node ended."""
        return self.path / "end.json"

    @property
    def output_log(self) -> Path:
        return self.run.output_log if self.node == 0 else self.path / "output.log"

    @property
    def lock(self) -> Path:
        return self.run.lock if self.node == 0 else self.path / ".lock"

    @property
    def recording(self) -> RunDir:
        """Return the folder of this node's recording and phases, with the file names of a run."""
        return self.run if self.node == 0 else RunDir(self.path)


def nodes_of(run: RunDir) -> list[NodeDir]:
    """Return the nodes of a run that have a folder, in order; empty for a run on one node."""
    try:
        names = [path.name for path in (run.path / "nodes").iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [NodeDir(run, node) for node in sorted(int(name) for name in names if name.isascii() and name.isdecimal())]
