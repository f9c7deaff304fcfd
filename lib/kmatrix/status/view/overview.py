"""The current view of a matrix from its files, running or not: the values of `make status` and `make estimate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from kmatrix.errors import RecordError
from kmatrix.own_file import listed_once, may_exist
from kmatrix.packing import LIMITS
from kmatrix.records.decode import decode_lines, replaced
from kmatrix.records.jobs.files import PollFile
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.plan import runs_to_archive
from kmatrix.records.runs import GpuEntry, Provenance, RunFile, RunResult, Status, read_run_file_or_empty
from kmatrix.records.states import PhaseLine, RunRequest, read_matrix_status, read_requests
from kmatrix.records.tracking import SyncState, SyncStatus, read_track, sync_status
from kmatrix.records.train_config import TrainConfig, budget_s
from kmatrix.status.activity import MAY_RUN, Activity, MatrixActivity
from kmatrix.status.cost import BUDGETS, MatrixBudget, Spent, spent_of, total_dollars
from kmatrix.status.estimate import (
    EstimateSource,
    Phase,
    one_attempt_s,
    rest_when_resumed,
)
from kmatrix.status.run_jobs import job_of, jobs_of
from kmatrix.status.state import RunState, overall
from kmatrix.status.status_file import current_result, recover_status
from kmatrix.status.view.changes import KnownRun, RunList, Signature, changed
from kmatrix.status.view.devices import gpus_now, memory_of
from kmatrix.status.view.estimates import Estimates, completed
from kmatrix.status.view.matrix_view import TO_COME, GpuView, MatrixView, RunView
from kmatrix.status.view.seeds import SeedsOfView
from kmatrix.status.watch import MetricsTail, alerts_of_run, first_known, start_of


class Overview:
    """Read the view of a matrix repeatedly; each call reads only the new metrics of its runs."""

    def __init__(
        self,
        matrix: MatrixDir,
        statuses: Collection[Status] = (),
        ask: Callable[[], PollFile | None] = lambda: None,
    ) -> None:
        """Create the overview of a matrix.

        statuses: show only runs with one of these; none: all.
        ask: returns the newest answer of the scheduler of a cluster; by default None, for that of poll.json.
        """
        self._matrix, self._statuses, self._ask = matrix, statuses, ask
        self._activity: MatrixActivity | None = None  # read by the first poll
        self._tails: dict[tuple[str, int], MetricsTail] = {}
        self._records: dict[str, RunFile] = {}  # run -> its run.json
        self._runs = RunList()
        self._estimates = Estimates(matrix, self._records)
        self._seeds = SeedsOfView(matrix, self._records)

    def poll(self, now: float | None = None) -> MatrixView:
        """Return the current view. Raises SchemaError if a newer kmatrix wrote the matrix."""
        now = time.time() if now is None else now
        if self._activity is None:
            self._activity = MatrixActivity(self._matrix, self._ask())
        else:
            self._activity.refresh(self._ask())
        if self._seeds.read_plan():
            self._runs = RunList()  # reads all runs again, with the values on the axes
            self._records.clear()
        running = self._activity.is_running
        rerun = runs_to_archive(self._matrix)
        found = [
            self._view(known, now, self._activity, rerun=known.name in rerun)
            for known in self._runs.read(self._matrix, now)
        ]
        if self._activity.activity is Activity.NONE and (missing := set(self._matrix.missing())):
            found = [replace(view, missing=view.name in missing) for view in found]
        found = self._seeds.marked(found)
        on_cluster = self._activity.engine is not None
        views = self._estimates.with_estimates(found, on_cluster=on_cluster)
        further = self._seeds.further(found, lambda some: self._estimates.with_estimates(some, on_cluster=on_cluster))
        record = read_matrix_status(self._matrix)
        left = [view.ends_s for view in views if view.to_come]
        # One run without an estimate makes the end of the matrix unknown.
        left_s = max(s for s in left if s is not None) if left and None not in left else None
        return MatrixView(
            name=self._matrix.name,
            path=self._matrix.path,
            status=self._status(views),
            running=running,
            started=record.started,
            ended=None if self._activity.activity is not Activity.NONE else record.ended,
            left_s=left_s,
            ends=None if left_s is None else now + left_s,
            dollars=total_dollars(view.dollars for view in views),
            all_dollars=_all_dollars(views),
            runs=tuple(view for view in views if not self._statuses or view.status in self._statuses),
            gpus=tuple(self._gpus_now(record.gpus, views, now)),
            jobs=jobs_of(
                self._activity,
                ((view.name, view.status) for view in views if not view.reserve),
                self._requests(),
            ),
            looks=self._seeds.looks(),
            seeds=further,
            spent=MatrixBudget.of_matrix(record, self._symbols(views)).reached(
                [Spent(wall_s=view.wall_s, gpu_hours=view.gpu_hours, dollars=view.dollars) for view in views]
            ),
        )

    def _symbols(self, views: Sequence[RunView]) -> Mapping[str, str]:
        """Return the Kconfig values of the first run, for those with the same value in all runs."""
        return self._records[views[0].name].symbols if views else {}

    def _requests(self) -> Mapping[str, RunRequest]:
        """Return the requests for single runs; none if the file is damaged, which the commands report that need it."""
        with suppress(RecordError):
            return read_requests(self._matrix)
        return {}

    def _status(self, views: Sequence[RunView]) -> Status:
        """Return the status of the matrix. One whose jobs all wait is planned: nothing has to be continued."""
        activity = Activity.NONE if self._activity is None else self._activity.activity
        if activity is Activity.QUEUED:
            return Status.PLANNED
        if activity is not Activity.NONE:
            return Status.RUNNING
        return overall([view.status for view in views if not view.reserve])

    def _gpus_now(self, listed: Sequence[GpuEntry] | None, views: Sequence[RunView], now: float) -> Sequence[GpuView]:
        if self._activity is None or self._activity.engine is None:
            return gpus_now(self._matrix, self._gpus(listed), views, now)
        # Those of the jobs alone: the machine of the plan is the one that submitted them.
        return gpus_now(self._matrix, (), views, now, self._activity.age_s)

    def _gpus(self, listed: Sequence[GpuEntry] | None) -> Sequence[GpuEntry]:
        """Return the GPUs of the runner, or those of the plan if the matrix never ran. listed: by the runner."""
        if listed is not None:
            return listed
        planned = [record.provenance.get("gpus") or [] for record in self._records.values()]
        return max(planned, key=len, default=[])

    def _view(self, known: KnownRun, now: float, activity: MatrixActivity, *, rerun: bool) -> RunView:
        """Return the view of a run, read again only if a file of it, or its job, has changed."""
        share = activity.of(known.name)
        folder = changed(known.folder)
        signature: Signature
        if activity.engine is None:
            signature = (share, rerun, folder, *known.written())
        else:
            signature = (share, rerun, folder)
            if share.activity in MAY_RUN:  # else only commands write to it, which replace its status.json
                known.files.read_again()  # the times of files may be old ones
        if not known.files.must_read(signature, now) and known.view is not None:
            return known.view
        known.view = None  # until it was read, which may fail
        self._records.pop(known.name, None)  # it may have been made again
        # Nobody writes to most of thousands of runs: their jobs wait, have ended, or gave no sign of life lately.
        with nullcontext() if share.activity is Activity.RUNNING else listed_once(known.folder):
            view = self._run(known.run, now, activity, rerun=rerun)
        if view.status not in TO_COME:
            view = completed(view, self._records[known.name].train)
        # A tracker process can end without a change of a file.
        if view.status is Status.RUNNING or any(sent.state is not SyncState.DONE for sent in view.trackers):
            known.files.read_again()
        known.view = view
        return view

    def _run(self, run: RunDir, now: float, activity: MatrixActivity, *, rerun: bool) -> RunView:
        if run.name not in self._records:
            self._records[run.name] = _needed(read_run_file_or_empty(run), self._seeds.axes)
        known_record = self._records[run.name]
        state = recover_status(
            run,
            has_runner=activity.has_runner(run.name),
            record=None if known_record == RunFile() else known_record,  # else it is missing, or damaged
            rerun=rerun,
        )
        record, train = self._records[run.name], self._records[run.name].train

        # The result of an attempt that ended, else the newest metrics.
        result = current_result(run, state)
        self._seeds.keep(run.name, state, train, result)
        known = result or RunResult()
        tail = self._tail(run, state, train, has_result=known.final_val_loss is not None)
        live = state.status is Status.RUNNING
        memory = () if state.status is Status.PLANNED else memory_of(run, live=live)
        fullest = max(memory, key=lambda device: device.most, default=None)
        last = state.last
        if live and activity.engine is not None:
            now = _time_there(run, state, tail, activity, now)
        spent = spent_of(state, train, now)
        elapsed = spent.wall_s if state.attempts else None
        step = result.step if result else first_known(tail.step, tail.start if live else None)
        left, share = _left(run, state.status, tail, train, elapsed=elapsed, step=step, now=now)
        return RunView(
            name=run.name,
            status=state.status,
            kind=last.kind if last else None,
            reason=state.reason,
            attempt=state.number,
            micro_batch=last.micro_batch if last else None,
            step=step,
            max_iters=train.max_iters or None,
            loss=result.final_train_loss if result else tail.loss,
            val_loss=first_known(known.final_val_loss, tail.val_loss),
            tokens_per_second=result.tokens_per_second if result else tail.tokens_per_second,
            mfu=result.mfu if result else (None if tail.mfu is None else tail.mfu / 100.0),
            ranks=train.num_gpus or None,
            device=train.device,
            memory_mib=fullest.most if fullest else None,
            memory=memory,
            gpus=last.gpus if last else (),
            hosts=last.hosts if last else (),
            elapsed_s=first_known(elapsed, known.seconds),
            wall_s=spent.wall_s,
            gpu_hours=spent.gpu_hours,
            worked_s=first_known(one_attempt_s(state.attempts, now), known.seconds, tail.elapsed_s),
            attempt_s=last.duration_s(now) if live and last else None,
            left_s=left,
            left_from=None if left is None else EstimateSource.OWN,
            schedule_share=share,
            epochs=_epochs(record, step),
            all_epochs=_epochs(record, train.max_iters or None),
            ended_by=known.ended_by,
            alerts=tuple(alert.text for alert in alerts_of_run(run) if alert.until is None) if live else (),
            reused_from=state.reused_from,
            trackers=_trackers(run, record, live=live),
            job=job_of(activity, run, state, train),
            ends=tuple(attempt.kind or attempt.status.value for attempt in state.attempts[:-1]),
            last_end=state.attempts[-2].reason if len(state.attempts) > 1 else "",
        )

    def _tail(self, run: RunDir, state: RunState, train: TrainConfig, *, has_result: bool) -> MetricsTail:
        number = state.number if state.last else state.archived + 1  # a result that is being archived does not count
        # A tail per attempt: all attempts append to one file, and a tail counts only the lines of its own.
        tail = self._tails.get((run.name, number))
        if tail is None:
            resumes = state.status is Status.RUNNING and number > 1  # else the lines say where it is
            start = start_of(run, state.last.resume) if resumes and state.last else None
            tail = MetricsTail(run.metrics, attempt=number, max_iters=train.max_iters or None, whole=True, start=start)
            self._tails[run.name, number] = tail
        if not has_result:  # else the metrics add nothing
            tail.read()
        return tail


def _time_there(run: RunDir, state: RunState, tail: MetricsTail, activity: MatrixActivity, now: float) -> float:
    """Return the current time (Unix seconds) by the clock of the host that a run on a cluster trains on.

    It is the newest time that the run has written, and the age of its file on the storage: the clock of this host may
    differ by minutes. now: of this host, if nothing is known.
    """
    since = activity.age_s(run.metrics)
    if tail.newest is not None and since is not None:
        return tail.newest + since
    started, since = state.last.started if state.last else None, activity.age_s(run.status)
    return now if started is None or since is None else started + since


def _trackers(run: RunDir, record: RunFile, *, live: bool) -> tuple[SyncStatus, ...]:
    """Return the status of each tracker of a run; pending steps are counted if no process uploads them now."""
    # The common case, without reading the metrics of the run.
    if not (may_exist(run.track) and run.track.exists()) and not record.tracking.trackers:
        return ()
    return read_track(run) if live else sync_status(run)


def _needed(record: RunFile, axes: Collection[str]) -> RunFile:
    """Return run.json without what the overview does not read: thousands of runs have hundreds of symbols each.

    axes: symbols that are needed, too.
    """
    symbols = {name: record.symbols[name] for name in (*LIMITS, *BUDGETS, *axes) if name in record.symbols}
    about: Provenance = {}
    if "gpus" in record.provenance:
        about["gpus"] = record.provenance["gpus"]
    if "cores" in record.provenance:
        about["cores"] = record.provenance["cores"]
    return replaced(record, symbols=symbols, provenance=about)


def _epochs(record: RunFile, steps: int | None) -> float | None:
    """Return the number of epochs in this many steps, None if the size of the data is unknown."""
    if steps is None or not record.train.tokens_per_step or not record.train_tokens:
        return None
    return steps * record.train.tokens_per_step / record.train_tokens


def _left(
    run: RunDir,
    status: Status,
    tail: MetricsTail,
    train: TrainConfig,
    *,
    elapsed: float | None,
    step: int | None,
    now: float,
) -> tuple[float | None, float | None]:
    """Return the time left (s) until the last step, or until the budget is spent, whichever is first.

    Of a stopped run, once it continues. None without a pace of its own, and of runs that neither run nor are stopped.
    The second value is the share of the schedule at which the budget ends the run, None if it does not.
    """
    if status is Status.RUNNING:
        left = tail.left_s(_phases(run), train, tail.since_s(now)) if tail.recent or tail.earlier else None
    elif status is Status.STOPPED:
        lines = tail.recent if len(tail.recent) > 1 else tail.earlier
        left = rest_when_resumed(lines, _phases(run), train, start_of(run, "auto")) if lines else None
    else:
        return None, None
    limit = budget_s(train)
    if limit is not None and elapsed is not None and (left is not None or status is Status.RUNNING):
        rest = max(0.0, limit - elapsed)
        if left is None or left <= rest:
            return rest if left is None else left, None
        done, steps = step or 0, train.max_iters
        return rest, (done + (steps - done) * rest / left) / steps if steps else None
    return left, None


def _phases(run: RunDir) -> list[Phase]:
    """Return the phases of a run without training."""
    return [Phase.of(line) for line in decode_lines(run.phases, PhaseLine)]


def _all_dollars(views: Sequence[RunView]) -> float | None:
    """Return the cost of all runs with a price at their end, None if one of them is unknown."""
    priced = [view.all_dollars for view in views if view.dollars is not None]
    return None if None in priced else total_dollars(priced)
