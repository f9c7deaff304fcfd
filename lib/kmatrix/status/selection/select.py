"""The rule by which a matrix selects its runs: adaptive seeds, or successive halving; most matrices have none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import AxisEntry, RunFile, Status, VerdictRules, read_matrix_file_or_empty
from kmatrix.status.outcomes import AdaptiveSeeds, Family, SeedEnd, families_of
from kmatrix.status.selection.halving import HalvedFamily, Halving
from kmatrix.verdict.halving import Rung, rungs


class Selection(Protocol):
    """Which runs a matrix wants now: a function of the losses so far, stored nowhere."""

    @property
    def families(self) -> Sequence[Family]:
        """The configurations with comparable losses."""

    @property
    def rungs(self) -> Mapping[str, Sequence[int]]:
        """The steps of each run whose losses decide; none with adaptive seeds."""

    def targets(
        self, ends: Mapping[str, SeedEnd], at_rungs: Mapping[str, Mapping[int, float]]
    ) -> Mapping[str, int | None]:
        """Return the runs to execute now, each with the step to train it to, None for its end; none: it is over."""

    def reserve(self, statuses: Mapping[str, Status], wanted: Collection[str]) -> frozenset[str]:
        """Return the runs that nobody executes unless they are wanted later. wanted: now."""

    def decisions(self) -> Iterator[str]:
        """Yield a line for each decision since the last call."""


def selects(rules: VerdictRules) -> bool:
    """Return whether a matrix with these rules executes its runs as far as its losses want them."""
    return bool((rules.seeds_auto and rules.seeds) or rules.halving)


def selection_of(
    rules: VerdictRules, axes: Sequence[AxisEntry], records: Mapping[str, RunFile]
) -> AdaptiveSeeds | Halving | None:
    """Return the selection of a matrix, None if it executes all its runs. records: run -> its run.json."""
    if not selects(rules):
        return None
    families = families_of(rules, axes, records)
    return halving_of(rules, families, records) if rules.halving else AdaptiveSeeds(families)


def halving_of(rules: VerdictRules, families: Sequence[Family], records: Mapping[str, RunFile]) -> Halving:
    """Return the successive halving of these families."""
    return Halving([_halved(family, rules.halving, records) for family in families])


def _halved(family: Family, eta: int, records: Mapping[str, RunFile]) -> HalvedFamily:
    """Return a family with its rungs; without any if its runs do not say when they evaluate."""
    trains = [records[run].train for run in family.runs.values()]
    max_iters = min((train.max_iters or 0 for train in trains), default=0)
    interval = max((train.eval_interval or 0 for train in trains), default=0)
    warmup = max((train.warmup_steps or 0 for train in trains), default=0)
    known: tuple[Rung, ...] = ()
    if max_iters and interval:
        known = rungs(max_iters, len(family.configurations), eta, eval_interval=interval, warmup=warmup)
    return HalvedFamily(family=family, rungs=known, max_iters=max_iters)


def selection_of_matrix(matrix: MatrixDir, records: Mapping[str, RunFile]) -> AdaptiveSeeds | Halving | None:
    """Return the selection of a matrix, as `selection_of`."""
    plan = read_matrix_file_or_empty(matrix)
    return selection_of(plan.verdict, plan.axis_entries, records)
