"""The adaptive seeds of a matrix for its runner: which runs it executes now, and which are its reserve."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import RunFile, Status
from kmatrix.records.states import Request, RunRequest
from kmatrix.status.outcomes import AdaptiveSeeds, Outcomes, adaptive_seeds
from kmatrix.status.state import MAY_BE_LEFT_OUT, RunState

TO_COME = RunState()


class SeedRounds:
    """The rounds of adaptive seeds: after each, the verdict wants further runs, or none."""

    def __init__(self, seeds: AdaptiveSeeds, outcomes: Outcomes) -> None:
        self._seeds, self._outcomes = seeds, outcomes
        order = {seed: place for family in seeds.families for place, seed in enumerate(family.rules.seeds)}
        self._order = {run: order[seed] for family in seeds.families for (_, seed), run in family.runs.items()}

    def wanted(self, states: Mapping[str, RunState], pending: Collection[str] = ()) -> frozenset[str]:
        """Return the runs that the verdict wants now. pending: runs that are about to start, whatever their state."""
        known = {name: TO_COME if name in pending else state for name, state in states.items()}
        return self._seeds.wanted(self._outcomes.ends(known))

    def reserve(self, states: Mapping[str, RunState], pending: Collection[str] = ()) -> frozenset[str]:
        """Return the runs that are not needed so far. pending: as for `wanted`."""
        wanted = self.wanted(states, pending)
        return self._seeds.reserve({name: state.status for name, state in states.items()}, wanted)

    def decisions(self) -> Iterator[str]:
        """Yield a line for each verdict that was looked at since the last call."""
        return self._seeds.decisions()

    def place(self, run: str) -> int:
        """Return the place of the seed of a run: all configurations run their first seed before any runs its second."""
        return self._order.get(run, 0)


def seed_rounds(matrix: MatrixDir, records: Mapping[str, RunFile]) -> SeedRounds | None:
    """Return the rounds of a matrix with adaptive seeds, None of another one. records: run -> its run.json."""
    seeds = adaptive_seeds(matrix, records)
    return None if seeds is None else SeedRounds(seeds, Outcomes(matrix, records))


def as_requested(state: RunState, request: RunRequest | None) -> RunState:
    """Return the state of a run whose runner has not followed the request of the user yet."""
    if request is None or request.request is not Request.SKIP or state.status not in MAY_BE_LEFT_OUT:
        return state
    return replace(state, status=Status.SKIPPED)
