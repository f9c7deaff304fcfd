"""Estimates of the open runs of a matrix: time left, start, end and cost, from their own pace or from similar runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kmatrix.packing import Limits
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import RunFile, Status
from kmatrix.records.train_config import TrainConfig, budget_s
from kmatrix.status.activity import Activity
from kmatrix.status.cost import spent_in
from kmatrix.status.estimate import EstimateSource, Measured, MeasuredRuns, Rest, ends_of, measured_before
from kmatrix.status.view.matrix_view import RunView


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of one run. Unknown values are None."""

    left_s: float | None = 0.0  # of its own time, without waiting
    left_from: EstimateSource | None = None
    starts_s: float | None = None  # seconds from now
    ends_s: float | None = None  # seconds from now
    share: float | None = None  # of its schedule, at which its budget ends it


ENDED = Estimate()  # of a run that has ended


class Estimates:
    """Estimate the open runs of a matrix. Finished runs of other matrices are read once, if an estimate needs them."""

    def __init__(self, matrix: MatrixDir, records: Mapping[str, RunFile]) -> None:
        """Create the estimates of a matrix. records: run -> its run.json, which may change between two calls."""
        self._matrix, self._records = matrix, records
        self._earlier: list[Measured] | None = None  # runs of other matrices, read when an estimate needs them

    def with_estimates(self, views: Sequence[RunView], *, on_cluster: bool) -> list[RunView]:
        """Return the views, those of open runs with the time left, the cost, and their start and end."""
        here = MeasuredRuns(self._measured(views))
        left = [(view, *self._left(view, here)) for view in views if view.to_come]
        open_runs = [(view, left_s) for view, left_s, _ in left]
        # Jobs of a cluster run at the same time; here, runs wait for each other.
        spans = {view.name: _span_of_job(view, s) for view, s in open_runs} if on_cluster else self._spans(open_runs)
        known = {
            view.name: Estimate(left_s, left_from, *spans[view.name], share=self._share(view, here))
            for view, left_s, left_from in left
        }
        return [completed(view, self._train(view), known[view.name]) if view.name in known else view for view in views]

    def _share(self, view: RunView, here: MeasuredRuns) -> float | None:
        """Return the share of the schedule at which the budget of an open run ends it, None if it does not."""
        train = self._train(view)
        limit = budget_s(train)
        if limit is None or view.left_s is not None:  # the estimate of its own steps has it
            return view.schedule_share
        known = here.with_earlier(self._earlier).whole(train) if self._earlier is not None else here.whole(train)
        # Operations alone say little about a time.
        if known is None or known.source not in (EstimateSource.MATRIX, EstimateSource.EARLIER):
            return None
        return limit / known.seconds if limit < known.seconds else None

    def _measured(self, views: Sequence[RunView]) -> list[Measured]:
        """Return the durations of the finished runs of this matrix, and the estimated ones of running runs."""
        found = []
        for view in views:
            # Without the work that killed attempts lost: a run like it will not lose it.
            train, elapsed = self._train(view), view.worked_s
            if view.status is Status.FINISHED and view.step and elapsed:
                found.append(Measured(train, elapsed, view.step))
            elif view.status is Status.RUNNING and view.left_s is not None and elapsed and view.max_iters:
                found.append(Measured(train, elapsed + view.left_s, view.max_iters))
        return found

    def _left(self, view: RunView, here: MeasuredRuns) -> tuple[float | None, EstimateSource | None]:
        """Return the time left (s) of an open run and its source: from similar runs, if it has no pace yet."""
        if view.left_s is not None:
            return view.left_s, view.left_from
        train = self._train(view)
        known = here.whole(train)
        if known is None or known.source is not EstimateSource.MATRIX:
            if self._earlier is None:
                self._earlier = measured_before(self._matrix)
            known = here.with_earlier(self._earlier).whole(train, self._records[view.name].expected_s)
        if known is None:
            return None, None
        # Of a stopped run, a part is done; a running run has spent part of the time already.
        done = (view.step or 0) / view.max_iters if view.status is Status.STOPPED and view.max_iters else 0.0
        left = max(0.0, known.seconds * (1 - done) - (view.attempt_s or 0.0))
        limit = budget_s(train)
        if limit is not None:
            left = min(left, max(0.0, limit - (view.elapsed_s or 0.0)))
        return left, known.source

    def _spans(self, views: Sequence[tuple[RunView, float | None]]) -> dict[str, tuple[float | None, float | None]]:
        """Return the estimated start and end (s from now) of open runs. views: with the time left (s)."""
        first = next(iter(self._records.values()), RunFile())
        about = first.provenance
        cores = int(about.get("cores") or 1)
        rest = []
        for view, left_s in views:
            cuda, ranks, threads = view.device == "cuda", view.ranks or 1, self._train(view).cpu_threads
            # A run with more threads than cores takes the whole machine.
            width = ranks if cuda else min(ranks * (threads or 1), cores)
            live = view.status is Status.RUNNING
            rest.append(Rest(name=view.name, width=width, cuda=cuda, running=live, seconds=left_s))
        there = len(about.get("gpus") or ())  # or more, if it was continued on another machine
        gpus = max([there, *(one.width for one in rest if one.cuda)])
        known = ends_of(rest, gpus=gpus, cores=cores, limits=Limits.of(first.symbols)) or {}
        return {view.name: known.get(view.name, (None, None)) for view, _ in views}

    def _train(self, view: RunView) -> TrainConfig:
        return self._records[view.name].train


def completed(view: RunView, train: TrainConfig, known: Estimate = ENDED) -> RunView:
    """Return the view with its estimate, and with spent and total cost if a GPU hour has a price."""
    spent = view.wall_s
    whole = None if known.left_s is None or spent is None else spent + known.left_s
    # One call: a view has so many fields that several copies of each would be most of the time of a poll.
    return replace(
        view,
        left_s=known.left_s if view.to_come else None,
        left_from=known.left_from,
        schedule_share=known.share if view.to_come else None,
        starts_s=known.starts_s,
        ends_s=known.ends_s,
        dollars=spent_in(spent, train).dollars,
        all_dollars=spent_in(whole, train).dollars,
    )


def _span_of_job(view: RunView, left_s: float | None) -> tuple[float | None, float | None]:
    """Return the estimated start and end (s from now) of a run on a cluster, whose jobs run at the same time."""
    if view.status is Status.RUNNING:
        return 0.0, left_s
    if view.job is None or view.job.activity is Activity.NONE:
        return None, None  # nobody has submitted it
    waits = 0.0 if view.job.activity is not Activity.QUEUED else view.job.waits_s(time.time())
    return waits, None if waits is None or left_s is None else waits + left_s
