"""The interface of an engine, which executes runs.

An engine reports the state of processes; it never decides how a run ended. That is determined from the run's
result.json (`kmatrix.status.classify`), because launchers change exit codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kmatrix.status.state import JobState, RunPlan

GRACE_S = 35.0  # torchrun gives its workers 30 s to save a checkpoint; then it kills them itself


class Engine(Protocol):
    """A place where runs are executed: this machine, or a cluster."""

    def check(self, runs: Sequence[RunPlan]) -> list[str]:
        """Return why these runs cannot run here, one sentence per problem."""

    def plan(self, runs: Sequence[RunPlan]) -> str:
        """Return the commands that would be run."""

    def submit(self, runs: Sequence[RunPlan]) -> dict[str, str]:
        """Queue runs; return run name -> job id. A run that was submitted before is not run twice."""

    def poll(self, jobs: Mapping[str, str] | None = None) -> dict[str, JobState]:
        """Start and watch processes, and return run name -> state, of all jobs or of these."""

    def cancel(self, jobs: Mapping[str, str] | None = None, *, now: bool = False) -> None:
        """Ask jobs to save a checkpoint and exit; `poll` reports when they have. now: kill them and wait."""
