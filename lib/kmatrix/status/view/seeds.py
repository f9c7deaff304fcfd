"""Adaptive seeds in the view of a matrix: which runs are in reserve, and the time of further seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import MatrixFile, RunFile, RunResult, read_matrix_file_or_empty
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.outcomes import AdaptiveSeeds, SeedEnd, end_of, families_of, has_adaptive_seeds
from kmatrix.status.state import RunState
from kmatrix.status.view.changes import FilesRead, changed
from kmatrix.status.view.matrix_view import FurtherSeeds, RunView

Estimated = Callable[[Sequence[RunView]], Sequence[RunView]]  # views -> the same with their estimates


class SeedsOfView:
    """The adaptive seeds of a matrix, if it has them; matrix.json is read again only if it has changed."""

    def __init__(self, matrix: MatrixDir, records: Mapping[str, RunFile]) -> None:
        """Create it. records: run -> its run.json, which may change between two calls."""
        self._matrix, self._records = matrix, records
        self._files = FilesRead()
        self._ends: dict[str, SeedEnd | None] = {}
        self._plan = MatrixFile()
        self._seeds: AdaptiveSeeds | None = None
        self._known: frozenset[str] = frozenset()  # runs that the families were made of

    @property
    def axes(self) -> frozenset[str]:
        """The symbols of the axes, whose values in each run name its configuration; empty without adaptive seeds."""
        return frozenset(axis.symbol for axis in self._plan.axis_entries if has_adaptive_seeds(self._plan.verdict))

    def read_plan(self) -> bool:
        """Read matrix.json if it has changed; return whether other fields of each run.json are needed now."""
        if not self._files.must_read((changed(str(self._matrix.matrix_json)),), time.time()):
            return False
        before, self._plan, self._seeds = self.axes, read_matrix_file_or_empty(self._matrix), None
        return self.axes != before

    def keep(self, run: str, state: RunState, train: TrainConfig, result: RunResult | None) -> None:
        """Keep how a run ended, if it is over."""
        if has_adaptive_seeds(self._plan.verdict):
            self._ends[run] = end_of(state, train, lambda: result)

    def marked(self, views: Sequence[RunView]) -> list[RunView]:
        """Return the views, those of runs in reserve marked."""
        seeds = self._of(views)
        if seeds is None:
            return list(views)
        wanted = seeds.wanted(self._over(views))
        reserve = seeds.reserve({view.name: view.status for view in views}, wanted)
        return [replace(view, reserve=True) if view.name in reserve else view for view in views]

    def looks(self) -> tuple[str, ...]:
        """Return what was decided at the last look at the verdict, a line per family. Ask `marked` before."""
        return () if self._seeds is None else self._seeds.looks()

    def further(self, views: Sequence[RunView], estimated: Estimated) -> FurtherSeeds | None:
        """Return how long the runs in reserve would take, None without one. views: as returned by `marked`."""
        reserve = [view.name for view in views if view.reserve]
        if self._seeds is None or not reserve:
            return None
        likely = self._seeds.likely(reserve)
        most = _end(estimated(_needed(views, reserve)))
        return FurtherSeeds(
            runs=len(reserve),
            likely_runs=None if likely is None else len(likely),
            likely_s=None if likely is None else _end(estimated(_needed(views, likely))),
            most_s=most,
        )

    def _of(self, views: Sequence[RunView]) -> AdaptiveSeeds | None:
        """Return the adaptive seeds, which are made again if the matrix has got other runs."""
        rules = self._plan.verdict
        if not has_adaptive_seeds(rules):
            return None
        names = frozenset(view.name for view in views if not view.missing)
        if self._seeds is None or names != self._known:
            records = {name: self._records[name] for name in self._records if name in names}
            self._seeds, self._known = AdaptiveSeeds(families_of(rules, self._plan.axis_entries, records)), names
        return self._seeds

    def _over(self, views: Sequence[RunView]) -> dict[str, SeedEnd]:
        found = ((view.name, self._ends.get(view.name)) for view in views)
        return {name: end for name, end in found if end is not None}


def _needed(views: Sequence[RunView], names: Collection[str]) -> list[RunView]:
    """Return the views as they would be if these runs were wanted."""
    chosen = set(names)
    return [replace(view, reserve=False) if view.name in chosen else view for view in views]


def _end(views: Sequence[RunView]) -> float | None:
    """Return the seconds until the last of the open runs ends, None if it is unknown for one of them."""
    ends = [view.ends_s for view in views if view.to_come]
    known = [end for end in ends if end is not None]
    return max(known, default=0.0) if len(known) == len(ends) else None
