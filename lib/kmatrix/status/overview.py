"""The current view of a matrix from its files, running or not: the values of `make status` and `make estimate`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.gpu.formats.json_array import last_entry
from kmatrix.packing import Limits
from kmatrix.records.decode import Amount, Count, Record, decode_lines, decode_optional
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.plan import runs_to_archive
from kmatrix.records.runs import GpuEntry, RunFile, RunResult, Status, read_run_file_or_empty
from kmatrix.records.states import PhaseLine, read_matrix_status
from kmatrix.records.tracking import SyncState, SyncStatus, read_track, sync_status
from kmatrix.records.train_config import TrainFields, budget_s
from kmatrix.status.cost import spent_in, spent_of, total_dollars
from kmatrix.status.disk_space import FullDisk, full_disk
from kmatrix.status.estimate import (
    EstimateSource,
    Measured,
    MeasuredRuns,
    Phase,
    Rest,
    ends_of,
    measured_before,
    one_attempt_s,
)
from kmatrix.status.state import RunState, overall
from kmatrix.status.status_file import current_result, recover_status
from kmatrix.status.watch import MetricsTail, alerts_of_run, first_known, start_of

FileTime = tuple[int, int, int]  # modification time (ns), size (bytes), inode
Signature = tuple[FileTime | bool | None, ...]
# A file may change again without a new modification time until the clock of its file system has advanced, as git's
# "racy" index entries: https://git-scm.com/docs/racy-git
COARSE_S = 2.0  # the longest resolution of such a clock: FAT
FINE_S = 0.1  # of file systems with parts of a second: a tick of the kernel, at most 10 ms, with a margin
TO_COME = (Status.RUNNING, Status.PLANNED, Status.STOPPED)


class Overview:
    """Read the view of a matrix repeatedly; each call reads only the new metrics of its runs."""

    def __init__(self, matrix: MatrixDir, statuses: Collection[Status] = ()) -> None:
        """Create the overview of a matrix. statuses: show only runs with one of these; none: all."""
        self._matrix, self._statuses = matrix, statuses
        self._tails: dict[tuple[str, int], MetricsTail] = {}
        self._records: dict[str, RunFile] = {}  # run -> its run.json
        self._runs = _RunList()
        self._earlier: list[Measured] | None = None  # runs of other matrices, read when an estimate needs them

    def poll(self, now: float | None = None) -> MatrixView:
        """Return the current view. Raises SchemaError if a newer kmatrix wrote the matrix."""
        now = time.time() if now is None else now
        running = self._matrix.is_held()
        rerun = runs_to_archive(self._matrix)
        found = [
            self._view(known, now, running=running, rerun=known.name in rerun)
            for known in self._runs.read(self._matrix, now)
        ]
        if not running and (missing := set(self._matrix.missing())):
            found = [replace(view, missing=view.name in missing) for view in found]
        views = self._estimated(found)
        record = read_matrix_status(self._matrix)
        left = [view.ends_s for view in views if view.status in TO_COME]
        # One run without an estimate makes the end of the matrix unknown.
        left_s = max(s for s in left if s is not None) if left and None not in left else None
        return MatrixView(
            name=self._matrix.name,
            path=self._matrix.path,
            status=Status.RUNNING if running else overall([view.status for view in views]),
            running=running,
            started=record.started,
            ended=None if running else record.ended,
            left_s=left_s,
            ends=None if left_s is None else now + left_s,
            dollars=total_dollars(view.dollars for view in views),
            all_dollars=_all_dollars(views),
            runs=tuple(view for view in views if not self._statuses or view.status in self._statuses),
            gpus=tuple(gpus_now(self._matrix, self._gpus(record.gpus), views, now)),
            full_disk=self._full_disk(views) if running else None,
        )

    def _full_disk(self, views: Sequence[RunView]) -> FullDisk | None:
        with suppress(RecordError):  # a damaged matrix.json: the folder of checkpoints is unknown
            names = [view.name for view in views if view.status is Status.RUNNING]
            return full_disk(self._matrix, [self._matrix.run(name) for name in names])
        return None

    def _gpus(self, listed: Sequence[GpuEntry] | None) -> Sequence[GpuEntry]:
        """Return the GPUs of the runner, or those of the plan if the matrix never ran. listed: by the runner."""
        if listed is not None:
            return listed
        planned = [record.provenance.get("gpus") or [] for record in self._records.values()]
        return max(planned, key=len, default=[])

    def _view(self, known: _KnownRun, now: float, *, running: bool, rerun: bool) -> RunView:
        """Return the view of a run, read again only if a file of it has changed."""
        signature = (running, rerun, _changed(known.folder), _changed(known.status), _changed(known.metrics))
        if not known.files.must_read(signature, now) and known.view is not None:
            return known.view
        known.view = None  # until it was read, which may fail
        self._records.pop(known.name, None)  # it may have been made again
        view = self._run(known.run, now, running=running)
        if view.status not in TO_COME:
            view = self._completed(view)
        # A tracker process can end without a change of a file.
        if view.status is Status.RUNNING or any(sent.state is not SyncState.DONE for sent in view.trackers):
            known.files.read_again()
        known.view = view
        return view

    def _run(self, run: RunDir, now: float, *, running: bool) -> RunView:
        state = recover_status(run, has_runner=running)
        if run.name not in self._records:
            self._records[run.name] = read_run_file_or_empty(run)
        record, train = self._records[run.name], self._records[run.name].train

        # The result of an attempt that ended, else the newest metrics.
        result = current_result(run, state)
        known = result or RunResult()
        tail = self._tail(run, state, train, has_result=known.final_val_loss is not None)
        live = state.status is Status.RUNNING
        memory = () if state.status is Status.PLANNED else _memory(run, live=live)
        fullest = max(memory, key=lambda device: device.most, default=None)
        last = state.last
        spent = spent_of(state, train, now)
        elapsed = spent.wall_s if state.attempts else None
        step = result.step if result else first_known(tail.step, tail.start if live else None)
        left = _left(run, tail, train, elapsed, now) if live else None
        return RunView(
            name=run.name,
            status=state.status,
            kind=last.kind if last else None,
            reason=state.reason,
            attempt=state.number,
            micro_batch=last.micro_batch if last else None,
            step=step,
            max_iters=train.max_iters,
            loss=result.final_train_loss if result else tail.loss,
            val_loss=first_known(known.final_val_loss, tail.val_loss),
            tokens_per_second=result.tokens_per_second if result else tail.tokens_per_second,
            mfu=result.mfu if result else (None if tail.mfu is None else tail.mfu / 100.0),
            ranks=train.num_gpus,
            device=train.device or "",
            memory_mib=fullest.most if fullest else None,
            memory_total_mib=fullest.total if fullest else None,
            memory=memory,
            gpus=last.gpus if last else (),
            elapsed_s=first_known(elapsed, known.seconds),
            wall_s=spent.wall_s,
            gpu_hours=spent.gpu_hours,
            worked_s=first_known(one_attempt_s(state.attempts, now), known.seconds, tail.elapsed_s),
            attempt_s=last.duration_s(now) if live and last else None,
            left_s=left,
            left_from=None if left is None else EstimateSource.OWN,
            epochs=_epochs(record, step),
            all_epochs=_epochs(record, train.max_iters),
            ended_by=known.ended_by,
            alerts=tuple(alert.text for alert in alerts_of_run(run) if alert.until is None) if live else (),
            reused_from=state.reused_from,
            trackers=_trackers(run, record, live=live),
        )

    def _tail(self, run: RunDir, state: RunState, train: TrainFields, *, has_result: bool) -> MetricsTail:
        number = state.number if state.last else state.archived + 1  # a result that is being archived does not count
        # A tail per attempt: all attempts append to one file, and a tail counts only the lines of its own.
        tail = self._tails.get((run.name, number))
        if tail is None:
            resumes = state.status is Status.RUNNING and number > 1  # else the lines say where it is
            start = start_of(run, state.last.resume) if resumes and state.last else None
            tail = MetricsTail(run.metrics, attempt=number, max_iters=train.max_iters, whole=True, start=start)
            self._tails[run.name, number] = tail
        if not has_result:  # else the metrics add nothing
            tail.read()
        return tail

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

    def _estimated(self, views: Sequence[RunView]) -> list[RunView]:
        """Return the views with the time left, the cost, and the start and end of open runs."""
        here = MeasuredRuns(self._measured(views))
        left = {view.name: self._left(view, here) for view in views if view.status in TO_COME}
        spans = self._spans([(view, left[view.name][0]) for view in views if view.name in left])
        return [
            self._completed(view, *left[view.name], *spans[view.name]) if view.name in left else view for view in views
        ]

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
        # A stopped run resumes from its checkpoint; a running run has spent part of the time already.
        done = (view.step or 0) / view.max_iters if view.status is Status.STOPPED and view.max_iters else 0.0
        left = max(0.0, known.seconds * (1 - done) - (view.attempt_s or 0.0))
        limit = budget_s(train)
        if limit is not None:
            left = min(left, max(0.0, limit - (view.elapsed_s or 0.0)))
        return left, known.source

    def _completed(
        self,
        view: RunView,
        left_s: float | None = 0.0,
        left_from: EstimateSource | None = None,
        starts_s: float | None = None,
        ends_s: float | None = None,
    ) -> RunView:
        """Return the view with its estimate, and with spent and total cost if a GPU hour has a price."""
        spent, train = view.wall_s, self._train(view)
        whole = None if left_s is None or spent is None else spent + left_s
        # One call: a view has so many fields that several copies of each would be most of the time of a poll.
        return replace(
            view,
            left_s=left_s if view.status in TO_COME else None,
            left_from=left_from,
            starts_s=starts_s,
            ends_s=ends_s,
            dollars=spent_in(spent, train).dollars,
            all_dollars=spent_in(whole, train).dollars,
        )

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

    def _train(self, view: RunView) -> TrainFields:
        return self._records[view.name].train


class _RunList:
    """The runs of a matrix, listed again only if its directory has changed."""

    def __init__(self) -> None:
        self._files = _Files()
        self._runs: dict[str, _KnownRun] = {}

    def read(self, matrix: MatrixDir, now: float) -> Collection[_KnownRun]:
        """Return the runs in order. now: Unix seconds."""
        if self._files.must_read((_changed(str(matrix.path)),), now) or not self._runs:
            known, self._runs = self._runs, {}
            self._runs = {name: known.get(name) or _KnownRun(run) for run in matrix.all_runs() for name in [run.name]}
        return self._runs.values()


class _KnownRun:
    """A run with its last view. Its paths are texts, because thousands are looked at per second."""

    __slots__ = ("files", "folder", "metrics", "name", "run", "status", "view")

    def __init__(self, run: RunDir) -> None:
        self.run, self.name = run, run.name
        self.folder, self.status, self.metrics = str(run.path), str(run.status), str(run.metrics)
        self.files = _Files()
        self.view: RunView | None = None


class _Files:
    """Whether files must be read again, by their signature."""

    __slots__ = ("_final", "_signature", "_since")

    def __init__(self) -> None:
        self._signature: Signature = ()
        self._since = 0.0  # monotonic time at which the signature was first seen
        self._final = False  # whether no change since the last reading can have left the signature as it is

    def must_read(self, signature: Signature, now: float) -> bool:
        """Return whether files must be read, which the caller then does. now: Unix seconds.

        A file that was just written is read a second time after the resolution of its modification time has passed.
        """
        if self._final and signature == self._signature:
            return False
        at = time.monotonic()  # after the signature was taken, and before the files are read
        if signature != self._signature:
            self._signature, self._since = signature, at
        self._final = _is_final(signature, now, at - self._since)
        return True

    def read_again(self) -> None:
        """Read the files the next time, whatever their signature says."""
        self._final = False


def _changed(path: str) -> FileTime | None:
    """Return the time, size and inode of a file or directory, None without one.

    Files that are replaced change the time of their directory.
    """
    try:
        status = os.stat(path)  # noqa: PTH116  (texts, not paths: thousands of calls per second)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_final(signature: Signature, now: float, seen_s: float) -> bool:
    """Return whether any change of files from now on changes their signature.

    now: Unix seconds. seen_s: how long the signature has been seen, which does not depend on the clock of a server.
    """
    times = [one[0] for one in signature if isinstance(one, tuple)]
    return all(
        # Times in whole seconds are those of a coarse file system, or were set by a program.
        ns < (now - COARSE_S) * 1e9 or seen_s >= (FINE_S if ns % 1_000_000_000 else COARSE_S)
        for ns in times
    )


def _trackers(run: RunDir, record: RunFile, *, live: bool) -> tuple[SyncStatus, ...]:
    """Return the status of each tracker of a run; pending steps are counted if no process uploads them now."""
    # The common case, without reading the metrics of the run.
    if not run.track.exists() and not record.tracking.trackers:
        return ()
    return read_track(run) if live else sync_status(run)


def _memory(run: RunDir, *, live: bool) -> tuple[DeviceMemory, ...]:
    """Return the maximum memory of each device, from the summary of the recording.

    live: the run is active. Its summary may be a minute old, of before the first step: the newest values count, too.
    """
    summary = decode_optional(run.gpu_summary, _Summary) or _Summary()
    newest = _newest_memory(run) if live else {}
    return tuple(
        DeviceMemory(
            device=str(place if gpu.gpu_index is None else gpu.gpu_index),
            most=max(gpu.memory_used.max, newest.get(gpu.gpu_index, 0.0)),
            total=gpu.memory_total,
        )
        for place, gpu in enumerate(summary.gpus)
        if gpu.memory_used is not None and gpu.memory_used.max is not None
    )


def _newest_memory(run: RunDir) -> dict[object, float]:
    """Return the memory (MiB) in the last entry of the recording, by the index of the device."""
    entry = last_entry(run.gpu_stats_multi) or {}
    devices = [each for each in entry.get("multi_gpu_data") or [] if isinstance(each, dict)]
    used = [(each.get("gpu_index"), each.get("memory_used")) for each in devices]
    return {index: value for index, value in used if isinstance(index, int) and isinstance(value, int | float)}


class _Statistics(Record, frozen=True, kw_only=True):
    max: Amount | None = None


class _Device(Record, frozen=True, kw_only=True):
    gpu_index: Count | None = None
    memory_used: _Statistics | None = None  # MiB
    memory_total: Amount | None = None  # MiB


class _Summary(Record, frozen=True, kw_only=True):
    """The memory in gpu_summary.json."""

    gpus: tuple[_Device, ...] = ()


def _epochs(record: RunFile, steps: int | None) -> float | None:
    """Return the number of epochs in this many steps, None if the size of the data is unknown."""
    if steps is None or record.train.tokens_per_step is None or not record.train_tokens:
        return None
    return steps * record.train.tokens_per_step / record.train_tokens


def _left(run: RunDir, tail: MetricsTail, train: TrainFields, elapsed: float | None, now: float) -> float | None:
    """Return the time left (s) until the last step, or until the budget is spent, whichever is first."""
    left = tail.left_s(_phases(run), train, tail.since_s(now)) if tail.recent or tail.earlier else None
    limit = budget_s(train)
    if limit is not None and elapsed is not None:
        rest = max(0.0, limit - elapsed)
        return rest if left is None else min(left, rest)
    return left


def _phases(run: RunDir) -> list[Phase]:
    """Return the phases of a run without training."""
    return [Phase.of(line) for line in decode_lines(run.phases, PhaseLine)]


def _all_dollars(views: Sequence[RunView]) -> float | None:
    """Return the cost of all runs with a price at their end, None if one of them is unknown."""
    priced = [view.all_dollars for view in views if view.dollars is not None]
    return None if None in priced else total_dollars(priced)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The maximum memory use of one device."""

    device: str
    most: float  # MiB
    total: float | None  # MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """One GPU of the machine, by the newest recording of a run on it. Unknown values are None."""

    index: int | None
    name: str
    uuid: str
    run: str = ""  # the run that uses it, "" for none
    utilization: float | None = None  # percent
    memory_used: float | None = None  # MiB
    memory_total: float | None = None  # MiB
    power: float | None = None  # watts
    temperature: float | None = None  # degrees C
    at: float | None = None  # Unix seconds of these values
    out: str = ""  # why no run may use it, "" if runs may


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The current values of one run. Unknown values are None."""

    name: str
    status: Status
    kind: str | None = None
    reason: str = ""
    attempt: int = 0
    micro_batch: int | None = None
    step: int | None = None
    max_iters: int | None = None
    loss: float | None = None  # nats/token, training
    val_loss: float | None = None  # nats/token
    tokens_per_second: float | None = None
    mfu: float | None = None  # 0 to 1
    ranks: int | None = None
    device: str = ""
    memory_mib: float | None = None  # MiB, maximum of its fullest device
    memory_total_mib: float | None = None  # MiB, of that device
    memory: tuple[DeviceMemory, ...] = ()
    gpus: tuple[str, ...] = ()  # UUIDs, of its last attempt
    elapsed_s: float | None = None  # of all attempts
    worked_s: float | None = None  # of the attempts that led to its weights, without lost work
    wall_s: float | None = None  # of all attempts in this matrix, from launch to end; 0 of a reused run
    gpu_hours: float | None = None  # held in this time; None on the CPU
    attempt_s: float | None = None  # of the running attempt
    left_s: float | None = None  # of its own time, without waiting
    left_from: EstimateSource | None = None
    starts_s: float | None = None  # seconds from now
    ends_s: float | None = None  # seconds from now
    epochs: float | None = None
    all_epochs: float | None = None
    dollars: float | None = None  # spent
    all_dollars: float | None = None  # in total
    ended_by: str | None = None  # why a finished run ended early
    alerts: tuple[str, ...] = ()  # active ones
    reused_from: str = ""
    missing: bool = False  # it has no run.json: `continue` makes it again
    trackers: tuple[SyncStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView:
    """The current values of a matrix."""

    name: str
    path: Path
    status: Status
    running: bool  # a runner holds it
    started: float | None  # Unix seconds
    ended: float | None  # Unix seconds
    left_s: float | None  # until its end, if it runs or is continued now; None if unknown for a run
    dollars: float | None  # spent on all runs with a price; None without one
    all_dollars: float | None  # at the end; None also if the time left of a run with a price is unknown
    runs: tuple[RunView, ...]
    ends: float | None = None  # Unix seconds of its end, if it runs or is continued now
    gpus: tuple[GpuView, ...] = ()  # of the machine, in the driver's order
    full_disk: FullDisk | None = None  # that its running runs wait for

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(run.status for run in self.runs)
        return {status.value: found[status] for status in Status if found[status]}


RANKS = "cpu-"  # prefix of the device names of ranks on the CPU in a recording
STALE_S = 30.0  # a recording is written each second: older values are outdated


def gpus_now(matrix: MatrixDir, known: Sequence[GpuEntry], runs: Sequence[RunView], now: float) -> list[GpuView]:
    """Return the GPUs with the newest values of the runs on them.

    known: index, name, uuid and `out` of the GPUs that runs may use, as the runner wrote them. Other GPUs in a
    recording (simulated ones) follow.
    """
    found = {str(gpu["uuid"]): _listed(gpu) for gpu in known if gpu.get("uuid")}
    for run in runs:
        if run.status is not Status.RUNNING:
            continue
        for uuid in run.gpus:
            found[uuid] = replace(found.get(uuid, GpuView(index=None, name="", uuid=uuid)), run=run.name)
        for entry in _recorded(matrix, run, now):
            uuid = str(entry.get("uuid") or f"GPU {entry.get('gpu_index')}")
            about = found.get(uuid, GpuView(index=entry.get("gpu_index"), name="", uuid=uuid))
            found[uuid] = _measured(about, entry, run.name)
    return sorted(found.values(), key=lambda gpu: (gpu.index is None, gpu.index or 0))


def _listed(gpu: GpuEntry) -> GpuView:
    index = gpu.get("index")
    return GpuView(index=index, name=str(gpu.get("name") or ""), uuid=str(gpu["uuid"]), out=str(gpu.get("out") or ""))


def _recorded(matrix: MatrixDir, run: RunView, now: float) -> list[dict[str, Any]]:
    """Return the newest values of the GPUs of a run; empty on the CPU, or if they are outdated."""
    entry = last_entry(matrix.run(run.name).gpu_stats_multi) or {}
    at = _unix(entry.get("timestamp"))
    # Values from before this attempt are of an earlier one, perhaps on other GPUs.
    if at is None or now - at > STALE_S or (run.attempt_s is not None and at < now - run.attempt_s):
        return []
    values = [gpu for gpu in entry.get("multi_gpu_data") or [] if isinstance(gpu, dict)]
    # A recording on the CPU lists its ranks as devices.
    return [{**gpu, "at": at} for gpu in values if not str(gpu.get("uuid")).startswith(RANKS)]


def _measured(about: GpuView, entry: Mapping[str, Any], run: str) -> GpuView:
    return replace(
        about,
        index=entry.get("gpu_index", about.index),
        name=str(entry.get("gpu_name") or about.name),
        run=run,
        at=entry["at"],
        utilization=entry.get("utilization"),
        memory_used=entry.get("memory_used"),
        memory_total=entry.get("memory_total"),
        power=entry.get("power"),
        temperature=entry.get("temperature"),
    )


def _unix(text: object) -> float | None:
    """Return the time of an entry in Unix seconds."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
