"""A share with the names of its runs, so that the runner trains, counts and reports these alone."""

from __future__ import annotations

from dataclasses import dataclass

from kmatrix.records.jobs.paths import ShareDir
from kmatrix.records.paths import MatrixDir, RunDir


@dataclass(frozen=True, slots=True)
class RunningShare(ShareDir):
    """A matrix of some runs, whose lock, status and journal are in the folder of the share."""

    names: tuple[str, ...] = ()

    def runs(self) -> list[RunDir]:
        """Return the folders of these runs that have a run.json."""
        there = {run.name for run in MatrixDir(self.path).runs()} if len(self.names) > 1 else set(self.names)
        return [self.run(name) for name in self.names if name in there and self.run(name).run_json.exists()]

    def all_runs(self) -> list[RunDir]:
        """Return the folders of these runs."""
        return [self.run(name) for name in self.names]

    def missing(self) -> list[str]:
        """Return those of these runs that have no run.json."""
        return [name for name in self.names if not self.run(name).run_json.exists()]
