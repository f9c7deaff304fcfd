"""Watch the budget of a matrix while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.cost import MatrixBudget, Spent, SpentBudget
from kmatrix.status.state import RunState

CHECK_EVERY_S = 1.0  # between two checks of the budget


class BudgetWatch:
    """The budget of a matrix and the prices of its runs, also of those that earlier executions finished."""

    def __init__(self, matrix: MatrixDir, budget: MatrixBudget, elsewhere: Callable[[], Spent] | None = None) -> None:
        """Create the watch. elsewhere: returns what other runners of the matrix have spent."""
        self._matrix, self._budget, self._elsewhere = matrix, budget, elsewhere
        self._prices: dict[str, TrainConfig] = {}  # by run
        self._due = 0.0  # monotonic seconds

    def begin(self, runs: Iterable[str]) -> None:
        """Read the prices of the runs."""
        self._prices = {name: read_run_file_or_empty(self._matrix.run(name)).train for name in runs}

    def spent(self, states: Mapping[str, RunState], *, now: bool = False) -> SpentBudget | None:
        """Return the limit that is reached, None if there is none, or it was checked within the last second.

        now: check it in any case.
        """
        if not now and time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + CHECK_EVERY_S
        runs = ((states[name], self._prices[name]) for name in self._prices)
        if self._elsewhere is None:
            return self._budget.spent(runs, time.time())
        return self._budget.spent(runs, time.time(), self._elsewhere())
