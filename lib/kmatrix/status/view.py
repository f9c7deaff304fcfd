"""What `make status` and `make estimate` show of a matrix, as text and as JSON: its runs, GPUs, times and cost."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kmatrix import locks
from kmatrix.clock import clock
from kmatrix.packing import PackedJob
from kmatrix.records.attempts import Attempt, host_of
from kmatrix.records.decode import Record, as_json, decode_lines, replaced
from kmatrix.records.events import PhaseLine
from kmatrix.records.matrix import LOCAL, PlannedRun
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult, Status
from kmatrix.records.tracking import SyncStatus, read_track, sync_status
from kmatrix.status import estimate
from kmatrix.status.alerts import read_alerts
from kmatrix.status.cost import limit_s, spent, spent_in, spent_of, total_dollars
from kmatrix.status.estimate import EstimateSource, Measured, MeasuredRuns, ends_of, whole_number
from kmatrix.status.fold import FINISHED, Files, end_of, overall
from kmatrix.status.live import GpuView, MetricsTail, newest_gpus
from kmatrix.status.look import Look
from kmatrix.status.wanted import seeds_of

TO_COME = (Status.RUNNING, Status.PLANNED, Status.STOPPED)  # of runs that have not ended for good
WAITS, RUNS, ENDED = "waits", "runs", "ended"  # phases of a job
Spans = dict[str, tuple[float | None, float | None]]  # run -> its start and end, s from now


class JobView(Record, frozen=True, kw_only=True):
    """The job of a run on a cluster, as its scheduler shows it."""

    id: str  # as users know it: 12_3
    phase: str  # waits, runs, ended
    state: str  # in the scheduler's words
    reason: str = ""  # the same
    nodes: str = ""
    starts: float | None = None  # Unix seconds, expected
    log: str = ""  # below the folder of the matrix


class RunView(Record, frozen=True, kw_only=True):
    """The current values of one run. Unknown values are None."""

    name: str
    status: Status
    to_come: bool = False  # it has not ended for good, the matrix needs it, and nobody holds it
    reserve: bool = False  # of adaptive seeds: it is not needed so far
    held: bool = False  # by its user
    kind: str = ""  # of its end
    reason: str = ""
    ended_by: str | None = None  # why a finished run ended early
    reused_from: str = ""
    attempt: int = 0
    ends: tuple[str, ...] = ()  # kinds of the ends of the attempts before the last one
    last_end: str = ""  # the reason of the newest one of them
    micro_batch: int | None = None
    start: int = 0  # step at which its last attempt began
    step: int | None = None
    max_iters: int | None = None
    epochs: float | None = None
    all_epochs: float | None = None
    loss: float | None = None  # nats/token, training
    val_loss: float | None = None  # nats/token
    tokens_per_second: float | None = None
    mfu: float | None = None  # 0 to 1
    device: str = ""
    ranks: int | None = None
    nodes: int = 1
    host: str = ""  # of its last attempt
    gpus: tuple[str, ...] = ()  # UUIDs, of its last attempt
    memory_mib: float | None = None  # MiB, of its fullest device: now, or the maximum of a run that has ended
    elapsed_s: float | None = None  # of all attempts
    gpu_hours: float | None = None  # held in this time; None on the CPU
    left_s: float | None = None  # of its own time, without waiting
    left_from: EstimateSource | None = None
    starts_s: float | None = None  # seconds from now
    ends_s: float | None = None  # seconds from now
    dollars: float | None = None  # spent
    all_dollars: float | None = None  # in total
    alerts: tuple[str, ...] = ()  # active ones
    trackers: tuple[SyncStatus, ...] = ()
    job: JobView | None = None  # on a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView:
    """The current values of a matrix."""

    name: str
    path: Path
    engine: str
    status: Status
    running: bool  # a run trains, or a process on this host holds it
    waiting: bool  # jobs of a cluster wait
    stop: str | None  # why nothing starts; None: nobody has stopped it
    silent: str  # why the scheduler does not answer; "" if it does
    spent: str  # that its budget is spent, "" if it is not
    left_s: float | None  # until its end, if it runs or is continued now; None if unknown for a run
    most_s: float | None  # the same with all seeds in reserve
    ends: float | None  # Unix seconds of its end, if it runs or is continued now
    dollars: float | None  # spent on all runs with a price; None without one
    all_dollars: float | None  # at the end; None also if the time left of a run with a price is unknown
    runs: tuple[RunView, ...]
    gpus: tuple[GpuView, ...]  # of the machine, or of the nodes of a cluster that train

    @property
    def is_active(self) -> bool:
        """True if it runs, or will go on by itself: jobs wait for their start."""
        return self.running or self.waiting

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(run.status for run in self.runs)
        return {status.value: found[status] for status in Status if found[status]}

    def to_json(self) -> dict[str, Any]:
        """Return all values for programs, without its path: a copied matrix has the same. Unknown is None."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "path"}
        return {**as_json(values), "counts": self.counts}


@dataclass(kw_only=True)
class Viewer:
    """Makes views of a matrix. It keeps what the next view would read again: metrics, and runs of other matrices."""

    path: Path
    _tails: dict[tuple[str, int], MetricsTail] = field(default_factory=dict)  # by run and attempt
    _earlier: MeasuredRuns | None = None

    def view(
        self, seen: Look, jobs: Mapping[str, JobView] | None = None, *, silent: str = "", only: Collection[Status] = ()
    ) -> MatrixView:
        """Return the view of a look. jobs: run -> its job.  silent: why they are unknown.  only: these statuses."""
        jobs, seeds = jobs or {}, seeds_of(seen)
        reserve = seeds.reserve({name: state.status for name, state in seen.states.items()}) if seeds else frozenset()
        gpus, spans, most = _planned_gpus(seen), Spans(), Spans()
        runs = [self._run(seen, run, gpus, jobs.get(run.name), reserve=run.name in reserve) for run in seen.plan.runs]
        if any(run.to_come or run.reserve for run in runs):
            runs = self._with_left(seen, runs)
            spans = self._spans(seen, [run for run in runs if run.to_come])
            most = self._spans(seen, [run for run in runs if run.to_come or run.reserve]) if reserve else spans
            runs = [_completed(seen.files[run.name], run, spans) for run in runs]
        left_s, phases = _end(run.ends_s for run in runs if run.to_come), {job.phase for job in jobs.values()}
        states = [state for name, state in seen.states.items() if name not in reserve]
        trains = RUNS in phases or any(state.status is Status.RUNNING for state in states)
        running = trains or locks.is_held(self.path / ".lock")
        all_dollars = [run.all_dollars for run in runs if run.dollars is not None]
        return MatrixView(
            name=self.path.name,
            path=self.path,
            engine=seen.plan.engine,
            status=Status.RUNNING if running else Status.PLANNED if WAITS in phases else overall(states),
            running=running,
            waiting=WAITS in phases,
            stop=seen.stop,
            silent=silent,
            spent=spent(seen),
            left_s=left_s,
            most_s=_end(end for _, end in most.values()),
            ends=None if left_s is None else clock.now() + left_s,
            dollars=total_dollars(run.dollars for run in runs),
            all_dollars=None if None in all_dollars else total_dollars(all_dollars),
            runs=tuple(run for run in runs if not only or run.status in only),
            gpus=tuple(sorted(gpus.values(), key=lambda gpu: (gpu.host, gpu.index is None, gpu.index or 0))),
        )

    def _run(
        self, seen: Look, run: PlannedRun, gpus: dict[str, GpuView], job: JobView | None, *, reserve: bool
    ) -> RunView:
        """Return the view of a run without estimates, and add its GPUs if it trains."""
        files, state = seen.files[run.name], seen.states[run.name]
        last, is_live = state.attempts[-1] if state.attempts else None, state.status is Status.RUNNING
        known = files.result if last and files.result and files.result.attempt in (None, last.number) else None
        if known is None or is_live or (state.status is Status.STOPPED and known.final_val_loss is None):
            known = RunResult() if last is None else _newest(self._tail(run.name, last), 0 if is_live else files.saved)
        here = _gpus_of(RunDir(self.path / run.name), last, local=seen.plan.engine == LOCAL) if is_live and last else []
        for gpu in here:
            about = gpus.get(gpu.uuid, gpu)
            index = about.index if gpu.index is None else gpu.index
            gpus[gpu.uuid] = replaced(gpu, index=index, name=gpu.name or about.name)
        memory = [gpu.memory_used for gpu in here if gpu.memory_used is not None]
        taken, steps = spent_of(state, files.train), whole_number(files.train, "max_iters") or None
        tokens = whole_number(files.train, "global_batch") * whole_number(files.train, "block_size")  # per step
        there = run.train_tokens or seen.plan.common.train_tokens
        epoch = tokens / there if tokens and there else None  # share of an epoch, in a step
        tracks = last and seen.plan.common.tracking.trackers
        return RunView(
            name=run.name,
            status=state.status,
            to_come=(state.status in TO_COME or state.is_due) and not reserve and files.request is None,
            reserve=reserve,
            held=files.request is not None and not files.request.skip,
            kind=state.kind if state.kind != FINISHED else "",
            reason=state.reason,
            ended_by=known.ended_by,
            reused_from=run.reused_from,
            attempt=last.number if last else 0,
            ends=tuple(end_of(one).kind for one in state.attempts[:-1]),
            last_end=end_of(state.attempts[-2]).reason if len(state.attempts) > 1 else "",
            micro_batch=last.micro_batch if last else None,
            start=last.step if last else 0,
            step=known.step,
            max_iters=steps,
            epochs=None if epoch is None or known.step is None else known.step * epoch,
            all_epochs=None if epoch is None or steps is None else steps * epoch,
            loss=known.final_train_loss,
            val_loss=known.final_val_loss,
            tokens_per_second=known.tokens_per_second,
            mfu=known.mfu,
            device=str(files.train.get("device") or ""),
            ranks=whole_number(files.train, "num_gpus") or None,
            nodes=whole_number(files.train, "num_nodes") or 1,
            host=last.host if last else "",
            gpus=last.gpus if last else (),
            memory_mib=max(memory) if memory else known.peak_memory_mib,
            elapsed_s=known.seconds if run.reused_from else taken.wall_s if last else None,
            gpu_hours=taken.gpu_hours,
            dollars=taken.dollars,
            all_dollars=taken.dollars,
            alerts=tuple(one.text for one in read_alerts(self.path / run.name) if one.until is None) if is_live else (),
            trackers=(read_track if is_live else sync_status)(RunDir(self.path / run.name)) if tracks else (),
            job=job,
        )

    def _tail(self, name: str, last: Attempt) -> MetricsTail:
        key, metrics = (name, last.number), RunDir(self.path / name).metrics
        tail = self._tails[key] = self._tails.get(key) or MetricsTail(metrics, attempt=last.number)
        tail.read()
        return tail

    def _with_left(self, seen: Look, runs: Sequence[RunView]) -> list[RunView]:
        """Return the runs, those that are to come with the time left, those in reserve with what they would take."""
        runs = [self._by_its_steps(seen, run) if run.to_come and run.attempt else run for run in runs]
        own = [
            Measured(seen.files[run.name].train, (run.elapsed_s or 0.0) + run.left_s, run.max_iters)
            for run in runs
            if run.status is Status.RUNNING and run.left_s is not None and run.max_iters
        ]
        here = MeasuredRuns([*estimate.measured_in(seen), *own], EstimateSource.MATRIX)
        expected = {run.name: run.expected_s for run in seen.plan.runs}

        def with_left(run: RunView) -> RunView:
            train = seen.files[run.name].train
            if run.left_s is None:  # it has no pace of its own
                known = here.whole(train) or self._others(seen).whole(train, expected[run.name])
                rest = 1 - min(1.0, (run.step or 0) / run.max_iters) if run.max_iters else 1.0
                begun = (run.elapsed_s or 0.0) if run.status is Status.RUNNING and run.step is None else 0.0
                run = replaced(run, left_s=max(0.0, known[0] * rest - begun), left_from=known[1]) if known else run
            if (limit := limit_s(train)) is not None:
                rest = max(0.0, limit - (run.elapsed_s or 0.0))
                run = replaced(run, left_s=rest if run.left_s is None else min(run.left_s, rest))
            return run

        return [with_left(run) if run.to_come or run.reserve else run for run in runs]

    def _others(self, seen: Look) -> MeasuredRuns:
        """Return the finished runs of other matrices on this kind of machine, which are read once."""
        if self._earlier is None:
            machine, folder = estimate.machine_of(seen.plan.provenance), self.path.parent
            earlier = estimate.measured_on(folder, machine, without=self.path.name)
            self._earlier = MeasuredRuns(earlier, EstimateSource.EARLIER)
        return self._earlier

    def _by_its_steps(self, seen: Look, run: RunView) -> RunView:
        """Return a run that trains, or has trained, with the time left by its own pace, if it has one."""
        folder, files = RunDir(self.path / run.name), seen.files[run.name]
        tail = self._tail(run.name, seen.states[run.name].attempts[-1])
        lines = tail.recent if len(tail.recent) > 1 else tail.earlier
        phases = decode_lines(folder.phases, PhaseLine) if lines else []
        if run.status is Status.RUNNING:
            start, since_s = run.start if run.step is None else run.step, tail.since_s()
            left = estimate.rest_of_run(tail.recent, phases, files.train, since_s, earlier=tail.earlier, start=start)
        else:
            left = estimate.rest_of_run((), phases, files.train, 0.0, earlier=lines, start=files.saved)
            set_ups = [phase.duration_s for phase in phases if phase.phase == estimate.SET_UP]
            left = left + statistics.median(set_ups) if left is not None and set_ups else left
        return run if left is None else replaced(run, left_s=left, left_from=EstimateSource.OWN)

    def _spans(self, seen: Look, runs: Sequence[RunView]) -> Spans:
        """Return when runs start and end: as this machine packs them, or as the scheduler expects their jobs."""
        if seen.plan.engine != LOCAL:
            return {run.name: _span_of_job(run) for run in runs}
        about, jobs = seen.plan.provenance, {True: list[PackedJob](), False: list[PackedJob]()}
        cores, on_gpus = int(about.get("cores") or 1), {run.name for run in runs if run.device == "cuda"}
        for run in runs:
            # A run with more threads than cores takes the whole machine.
            threads = min(cores, (run.ranks or 1) * (whole_number(seen.files[run.name].train, "cpu_threads") or 1))
            width = (run.ranks or 1) if run.name in on_gpus else threads
            jobs[run.status is Status.RUNNING].append(PackedJob(name=run.name, width=width, seconds=run.left_s))
        # There may be more GPUs than planned for, if it was continued on another machine.
        gpus = max([len(about.get("gpus") or ()), *(run.ranks or 1 for run in runs if run.name in on_gpus)])
        parallel = int(seen.plan.common.symbols.get("PARALLEL_JOBS") or 0)
        known = ends_of(jobs, {True: gpus, False: cores}, on_gpus, parallel) or {}
        return {run.name: known.get(run.name, (None, None)) for run in runs}


def _newest(tail: MetricsTail, saved: int) -> RunResult:
    """Return what the newest metrics of an attempt say, in place of its result. saved: its step without any."""
    return RunResult(
        step=saved or None if tail.step is None else tail.step, tokens_per_second=tail.tokens_per_second,
        final_train_loss=tail.loss, final_val_loss=tail.val_loss, mfu=None if tail.mfu is None else tail.mfu / 100,
    )  # fmt: skip


def _completed(files: Files, run: RunView, spans: Spans) -> RunView:
    """Return a run with its start, end and total cost."""
    if run.reserve:
        return replaced(run, left_s=None, left_from=None)
    if not run.to_come:
        return run
    whole = None if run.left_s is None else spent_in((run.elapsed_s or 0.0) + run.left_s, files.train).dollars
    starts, ends = spans[run.name]
    return replaced(run, starts_s=starts, ends_s=ends, all_dollars=whole)


def _span_of_job(run: RunView) -> tuple[float | None, float | None]:
    if run.status is Status.RUNNING:
        return 0.0, run.left_s
    starts = run.job.starts if run.job is not None and run.job.phase == WAITS else None
    waits = None if starts is None else max(0.0, starts - clock.now())
    return waits, None if waits is None or run.left_s is None else waits + run.left_s


def _end(ends: Iterable[float | None]) -> float | None:
    """Return the latest of these, None without one, or if one is unknown."""
    found = [*ends]
    return None if None in found else max((end for end in found if end is not None), default=None)


def _planned_gpus(seen: Look) -> dict[str, GpuView]:
    """Return the GPUs of this machine by UUID; of a cluster none: the plan has those of the machine that submitted."""
    listed = seen.plan.provenance.get("gpus") or () if seen.plan.engine == LOCAL else ()
    found = ((str(gpu.get("uuid") or ""), gpu.get("index"), str(gpu.get("name") or "")) for gpu in listed)
    return {uuid: GpuView(index=index, name=name, uuid=uuid) for uuid, index, name in found if uuid}


def _gpus_of(folder: RunDir, last: Attempt, *, local: bool) -> list[GpuView]:
    """Return the GPUs of all nodes of a run that trains, with the values of its newest recordings."""
    found = {gpu.uuid: gpu for gpu in newest_gpus(folder, folder.name, "" if local else last.host)}
    if last.nodes > 1:
        for node, recording in folder.later_nodes().items():
            found |= {gpu.uuid: gpu for gpu in newest_gpus(recording, folder.name, host_of(folder.path, node))}
    missing = [uuid for uuid in last.gpus if uuid not in found] if local else []  # the recorder is not there yet
    return [*found.values(), *(GpuView(index=None, name="", uuid=uuid, run=folder.name) for uuid in missing)]
