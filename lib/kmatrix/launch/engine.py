"""The seam between a matrix and what runs it: five methods that every engine has.

An engine is asked and reports; it never decides how a run ended. That is read from the
run's own result.json (`verdict`): exit codes pass through launchers that change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kmatrix.records import RunDir

GRACE_S = 35.0  # torchrun gives its workers 30 s to save a checkpoint; then it kills them itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run that is to be started, in a folder that is ready.

    cuda: each rank needs a GPU of its own.  gpus: their UUIDs, which the engine chooses at the start.
    cpu_threads: of each rank.  command: what torchrun is to run, without the folder and what belongs to the attempt.
    timeout_s: seconds, 0 for none.  expected_s: seconds that the attempt may take, a rough guess or better;
    None where there is none. It decides who goes first, and nothing else.
    resume: what the attempt begins from: none, auto, latest, best or a path, in the trainer's words.
    micro_batch: sequences, in the place of run.json's; the global batch stays.
    """

    name: str
    run_id: str
    dir: RunDir
    ranks: int
    cuda: bool = False
    gpus: tuple[str, ...] = ()
    cpu_threads: int = 1
    command: tuple[str, ...] = ("-m", "gpt2.train")
    timeout_s: float = 0.0
    attempt: int = 1
    expected_s: float | None = None
    resume: str = "none"
    micro_batch: int | None = None

    @property
    def arguments(self) -> list[str]:
        """What the trainer is given behind its command."""
        words = [str(self.dir.path), "--attempt", str(self.attempt)]
        words += [] if self.resume == "none" else ["--resume", self.resume]
        return words + ([] if self.micro_batch is None else ["--micro-batch", str(self.micro_batch)])


class Phase(StrEnum):
    """Where the processes of a run stand; how the run ended is not known here."""

    PENDING = "pending"  # not started yet
    RUNNING = "running"
    ENDED = "ended"  # no process of it is left
    GONE = "gone"  # taken back before it started, or given up: there will never be GPUs enough for it


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What an engine knows of one run.

    pid: the process to signal to stop the run.  started, ended: Unix seconds.  exit_code: negative
    or 128 + n where signal n ended it.  cancelled: `cancel` was called on it.  reason: why the engine
    ended it, could not start it or does not start it yet, else ""; kind: the same in one word.
    gpus: UUIDs that the run was given.  log_start: size of output.log in bytes before this attempt.
    recorder_deaths: recorders that died beside it.
    """

    phase: Phase
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    cancelled: bool = False
    reason: str = ""
    kind: str = ""
    gpus: tuple[str, ...] = ()
    log_start: int = 0
    recorder_deaths: int = 0


class Engine(Protocol):
    """What runs are handed to: this box, or later a cluster."""

    def check(self, runs: Sequence[RunPlan]) -> list[str]:
        """Return what keeps these runs from running here, one sentence each; [] when nothing does."""

    def plan(self, runs: Sequence[RunPlan]) -> str:
        """Return exactly what would be run."""

    def submit(self, runs: Sequence[RunPlan]) -> dict[str, str]:
        """Hand runs over; return run name -> job id. A run that was handed over before is not run twice."""

    def poll(self, jobs: Mapping[str, str] | None = None) -> dict[str, JobState]:
        """Return run name -> state, of all jobs or of these, and let the engine do its work."""

    def cancel(self, jobs: Mapping[str, str] | None = None, *, now: bool = False) -> None:
        """Ask jobs to save and end; `poll` tells when they have. now: kill them, wait until they are gone."""
