"""The attempts of the runs of one execution: the plan of each run now, and what follows an attempt that has ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kmatrix.records.runs import read_run_file
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.cost import wall_s
from kmatrix.status.state import Attempt, RunPlan, RunState, next_attempt, retry


class Attempts:
    """The plans of all runs of one execution, those in reserve included."""

    def __init__(self, plans: Sequence[RunPlan], *, again: bool, left: Collection[str]) -> None:
        """Read the plans. again: a first failure is retried once.  left: kinds of ends that another one retries."""
        self.plans = {plan.name: plan for plan in plans}  # the last attempt that was planned
        self.train: dict[str, TrainConfig] = {plan.name: read_run_file(plan.dir).train for plan in plans}
        self._again, self._left = again, left

    def after_end(self, name: str, state: RunState) -> RunPlan | None:
        """Return the plan of the automatic retry of a run that has ended, None if there is none."""
        attempt = retry(state, batch_size=self._micro_batch(name), again=self._again)
        if attempt is None or (state.last is not None and state.last.kind in self._left):
            return None
        return self._with(name, state, attempt)

    def next(self, name: str, state: RunState) -> RunPlan | None:
        """Return the plan of the next attempt of a run without processes; None if it finished, or failed."""
        plan = self.plans[name]
        if state.number < plan.attempt:
            return plan  # its planned attempt has not started
        attempt = next_attempt(state, batch_size=self._micro_batch(name), retry_killed=True, again=self._again)
        return None if attempt is None else self._with(name, state, attempt)

    def _micro_batch(self, name: str) -> int:
        """Return the micro-batch of run.json."""
        return self.train[name].batch_size or 1

    def _with(self, name: str, state: RunState, attempt: Attempt) -> RunPlan:
        """Return the plan of a further attempt of a run."""
        return replace(
            self.plans[name],
            attempt=attempt.number,
            resume=attempt.resume,
            micro_batch=attempt.micro_batch,
            spent_s=wall_s(state.attempts) or 0.0,
        )
