"""The rounds of a matrix with adaptive seeds for its runner: which runs it executes now, and which are its reserve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import RunFile, Status, read_matrix_file_or_empty, read_run_file_or_empty
from kmatrix.runner.status_writer import StatusWriter
from kmatrix.status.outcomes import AdaptiveSeeds, Outcomes, adaptive_seeds, has_adaptive_seeds
from kmatrix.status.state import RunState, is_left_out, overall

TO_COME = RunState()


class SeedRounds:
    """The rounds of a matrix: after each, its losses want further seeds, or nothing."""

    def __init__(self, seeds: AdaptiveSeeds, outcomes: Outcomes) -> None:
        self._seeds, self._outcomes = seeds, outcomes
        order = {seed: place for family in seeds.families for place, seed in enumerate(family.rules.seeds)}
        self._order = {run: order[seed] for family in seeds.families for (_, seed), run in family.runs.items()}

    def wanted(self, states: Mapping[str, RunState], pending: Collection[str] = ()) -> frozenset[str]:
        """Return the runs that are wanted now.

        pending: runs that are about to start, whatever their state.
        """
        known = {name: TO_COME if name in pending else state for name, state in states.items()}
        return self._seeds.wanted(self._outcomes.ends(known))

    def reserve(self, states: Mapping[str, RunState], pending: Collection[str] = ()) -> frozenset[str]:
        """Return the runs that are not needed so far. pending: as for `wanted`."""
        wanted = self.wanted(states, pending)
        return self._seeds.reserve({name: state.status for name, state in states.items()}, wanted)

    def decisions(self) -> Iterator[str]:
        """Yield a line for each decision since the last call."""
        return self._seeds.decisions()

    def place(self, run: str) -> int:
        """Return the place of the seed of a run: all configurations run their first seed before any runs its second."""
        return self._order.get(run, 0)


class RunStarter(Protocol):
    """What the rounds of a matrix do with the runs of a runner."""

    open: set[str]  # runs of this execution that have not ended
    disk_full: bool  # no more runs are started

    def start(self, name: str) -> None:
        """Queue the next attempt of a run of the reserve."""

    def has_spent(self, *, now: bool) -> bool:
        """Return whether the budget of the matrix is spent; if so, stop its runs."""


class Reserve:
    """The runs of an execution that start only if they are wanted; most matrices have none."""

    def __init__(
        self,
        runs: RunStarter,
        writer: StatusWriter,
        names: Sequence[str],
        rounds: SeedRounds | None,
        on_note: Callable[[str], None],
    ) -> None:
        """Create the reserve. names: of its runs, in the order of their starts."""
        self._runs, self._writer, self._rounds, self._on_note = runs, writer, rounds, on_note
        self.names = dict.fromkeys(names)  # not a set: in their order

    @property
    def is_used(self) -> bool:
        """True if the matrix executes its runs as far as they are wanted."""
        return self._rounds is not None

    def start_wanted(self) -> None:
        """Queue the runs that are wanted now, if the losses decide that there are any."""
        if self._rounds is None:
            return
        states = self._writer.states
        wanted = self._rounds.wanted(states, self._runs.open)
        for text in self._rounds.decisions():
            self._writer.log("verdict looked at", text=text)
            self._on_note(text)
        new = [name for name in self.names if name in wanted]
        # Nothing starts on a full disk, or without a budget: they stay wanted, and `continue` runs them.
        if not new or self._runs.disk_full or self._runs.has_spent(now=True):
            return
        self._writer.log("runs wanted", runs=new)
        for name in new:
            del self.names[name]
            if not is_left_out(states[name]):  # else it waits for its release
                self._runs.start(name)

    def unneeded(self) -> frozenset[str]:
        """Return the runs that are not needed so far: a matrix is finished without them."""
        return frozenset() if self._rounds is None else self._rounds.reserve(self._writer.states, self._runs.open)

    def overall(self) -> Status:
        """Return the status of the matrix."""
        reserve = self.unneeded()
        found = [state.status for name, state in self._writer.states.items() if name not in reserve]
        return overall([*found, *([Status.PLANNED] if self._writer.missing else [])])


def rounds_of_matrix(matrix: MatrixDir, records: Mapping[str, RunFile]) -> SeedRounds | None:
    """Return the rounds of a matrix, None of one that executes all its runs. records: run -> its run.json."""
    seeds = adaptive_seeds(matrix, records)
    return None if seeds is None else SeedRounds(seeds, Outcomes(matrix, records))


def unneeded_runs(matrix: MatrixDir, states: Mapping[str, RunState]) -> frozenset[str]:
    """Return the runs that a matrix without a runner does not need so far. states: of its runs."""
    if not has_adaptive_seeds(read_matrix_file_or_empty(matrix).verdict):
        return frozenset()
    rounds = rounds_of_matrix(matrix, {run.name: read_run_file_or_empty(run) for run in matrix.runs()})
    return frozenset() if rounds is None else rounds.reserve(states)
