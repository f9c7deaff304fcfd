"""The state of a run, derived from the files on disk; and status.json, which the runner writes.

docs/status.md has the rules as a table. result.json is the truth about an attempt that ended, and status.json is the
runner's note: if it is missing, damaged or outdated, the state follows from the trainer's own files. Everything that
shows or needs the status of a run asks this module.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kmatrix.errors import LaunchError, RecordError, SchemaError, is_full
from kmatrix.own_file import open_to_read
from kmatrix.records.decode import as_json, decode, decode_optional
from kmatrix.records.files import last_lines, write_json
from kmatrix.records.jobs.ranks import RankState
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.plan import runs_to_archive
from kmatrix.records.runs import RunFile, RunResult, Status, metric_line, read_result, read_run_file
from kmatrix.records.states import AttemptRecord, RunStatusFile, read_run_status
from kmatrix.records.tracking import read_track
from kmatrix.status.alerts import Alert
from kmatrix.status.classify import classify
from kmatrix.status.disk_space import how_full, what_to_do
from kmatrix.status.state import Archived, Attempt, Ended, JobState, RunnerDied, RunState, Started, after


def recover_status(
    run: RunDir, *, has_runner: bool, record: RunFile | None = None, rerun: bool | None = None
) -> RunState:
    """Return the state of a run, without changing a file. A run is planned as soon as rerun.json names it.

    has_runner: a runner holds the matrix.  record: its run.json, if the caller has just read it.
    rerun: whether rerun.json names it, if the caller has just read that.
    Raises SchemaError if a newer kmatrix wrote a file.
    """
    state = state_of_files(run, has_runner=has_runner, record=record)
    if rerun is None:
        rerun = run.name in runs_to_archive(MatrixDir(run.path.parent))
    if not rerun:
        return state
    # Its result is not archived yet: the command was killed, or is at work.
    return after(state, Archived(max(state.number, last_number(run))))


def state_of_files(run: RunDir, *, has_runner: bool, record: RunFile | None = None) -> RunState:
    """Return the state of a run by its own files, also if its result is about to be archived.

    has_runner: a runner holds the matrix, so status.json is up to date. Without one, a run in state "running", or with
    traces of a later attempt, lost its runner: its last attempt ended by its result.json, or was stopped.
    record: as of `recover_status`.
    Raises SchemaError if a newer kmatrix wrote a file.
    """
    stored = read_run_status(run)
    known = RunState() if stored is None else state_of(stored)
    try:
        record = record or read_run_file(run)
    except SchemaError:
        raise
    except RecordError as error:
        return _without_plan(run, known, error)
    if known.status is Status.FINISHED or (has_runner and stored is not None):
        return _with_result(run, known)  # no attempt follows, or the runner knows of it
    # A runner can die between the start of an attempt and its entry: the trainer's own files then know of it.
    number = max(known.number, last_number(run))
    if number == known.number and known.status not in (Status.RUNNING, Status.STOPPED):
        return known
    last = known.last
    attempt = last if last and last.number == number else Attempt(number=max(number, 1))
    ended = _ended(run, record, attempt)
    has_finished = ended is not None and ended.status is Status.FINISHED
    if number == known.number and known.status is Status.STOPPED and has_finished:
        known = replace(known, status=Status.RUNNING)  # it outlived the runner, and finished after this was written
    if has_runner and ended is None:
        return after(known, Started(attempt))
    # No change of a run that was recorded as stopped, and is.
    return after(known, RunnerDied(number=attempt.number, ended=ended, last_seen=_last_seen(run)))


def _without_plan(run: RunDir, known: RunState, error: RecordError) -> RunState:
    """Return the state of a run whose run.json cannot be read: nothing can be trained or checked without it."""
    # An empty file was not flushed before a power failure.
    if not run.run_json.exists() or not run.run_json.stat().st_size:
        what = run.run_json.name if run.path.exists() else "its directory"
        return RunState(reason=f"{what} is missing")
    reason = f"{error.what}: {error.why}".replace(f"{run.path}/", "")
    return RunState(status=Status.FAILED, reason=reason, attempts=known.attempts, archived=known.archived)


def _with_result(run: RunDir, state: RunState) -> RunState:
    """Return the state, failed if it is finished but its result is missing: no number of the run is known."""
    if state.status is not Status.FINISHED:
        return state
    try:
        result = decode(run.result, RunResult)
    except SchemaError:
        raise
    except RecordError as error:
        reason = ": ".join(filter(None, (error.what, error.why))).replace(f"{run.path}/", "")
    else:
        if result.status == Status.FINISHED:
            return state
        reason = f"{run.result.name} says {result.status or 'nothing'}, {run.status.name} says {state.status}"
    return RunState(status=Status.FAILED, reason=reason, attempts=state.attempts, archived=state.archived)


def current_result(run: RunDir, state: RunState) -> RunResult | None:
    """Return the result of the last attempt, or None if it is still running or its trainer left no readable result."""
    if state.status in (Status.RUNNING, Status.PLANNED, Status.SKIPPED):
        return None
    result = read_result(run)
    if result is None or (result.status == Status.FAILED and result.step is None):
        return None  # the runner wrote the reason alone: the metrics have the numbers
    return result if state.reused_from or result.attempt == state.number else None


def state_of(record: RunStatusFile) -> RunState:
    """Return the state in a status.json."""
    return RunState(
        status=record.status,
        reason=record.reason or "",
        attempts=tuple(_attempt(entry) for entry in record.attempts),
        archived=record.set_aside or 0,
        reused_from=record.reused_from or "",
    )


def write_state(
    run: RunDir,
    state: RunState,
    *,
    job: JobState | None = None,
    log_tail: Sequence[str] = (),
    alerts: Sequence[Alert] = (),
) -> None:
    """Write status.json.

    job: the engine's view of the processes, whose pid is written while they run.  alerts: past and active ones.
    """
    last = state.last
    planned = read_run_file(run) if run.run_json.exists() else RunFile()
    record: dict[str, Any] = {
        "run_id": planned.run_id,
        "name": planned.name or run.name,  # a directory that is being made has another name
        "status": state.status,
        "kind": last.kind if last else None,
        "reason": state.reason or None,
        "attempt": state.number,
        "started": last.started if last else None,
        "ended": last.ended if last else None,
        "exit_code": last.exit_code if last else None,
        # Only while it runs: later the number may belong to another process.
        "pid": job.pid if job and state.status is Status.RUNNING else None,
        "log_tail": list(log_tail),
        "alerts": [alert.to_json() for alert in alerts],
        "links": {sent.tracker: sent.link for sent in read_track(run) if sent.link} if run.track.exists() else {},
        "attempts": [_entry(attempt) for attempt in state.attempts],
        "set_aside": state.archived,
        "reused_from": state.reused_from or None,
    }
    with writing(run.status):
        write_json(run.status, record)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of a full or read-only disk into a LaunchError that names the file, with a hint."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            why, hint = f"{error.strerror}: {how_full(path)}", what_to_do(path)
            raise LaunchError(f"cannot write {path}", why=why, hint=hint) from error
        raise LaunchError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            hint="check the permissions of that directory; finished runs are kept",
        ) from error


def _attempt(entry: AttemptRecord) -> Attempt:
    return Attempt(
        number=entry.attempt or 1,
        status=entry.status,
        resume=entry.resume or "none",
        micro_batch=entry.micro_batch,
        started=entry.started,
        ended=entry.ended,
        kind=entry.kind,
        reason=entry.reason or "",
        exit_code=entry.exit_code,
        clock=entry.clock,
        seconds=entry.seconds,
        gpus=entry.gpus,
        hosts=entry.hosts,
    )


def _entry(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "status": attempt.status,
        "kind": attempt.kind,
        "reason": attempt.reason or None,
        "resume": attempt.resume,
        "micro_batch": attempt.micro_batch,
        "started": attempt.started,
        "ended": attempt.ended,
        "exit_code": attempt.exit_code,
        "clock": as_json(attempt.clock),
        "seconds": attempt.seconds,
        "gpus": list(attempt.gpus),
        "hosts": list(attempt.hosts),
    }


def last_number(run: RunDir) -> int:
    """Return the number of the last attempt that wrote metrics or a result, 0 if none did."""
    numbers = []
    # Attempts are written in order: the last line decides.
    with suppress(OSError), open_to_read(run.metrics) as file:
        lines = (metric_line(text) for text in reversed(last_lines(file)) if text.endswith("\n"))
        newest = next((line for line in lines if line is not None), None)
        numbers += [newest.attempt] if newest else []
    if result := read_result(run):
        numbers.append(result.attempt or 0)
    return max(numbers, default=0)


def _ended(run: RunDir, record: RunFile, attempt: Attempt) -> Ended | None:
    """Return how an attempt ended by its result.json, or None if it left no readable result."""
    result = read_result(run)
    if result is None or not result.belongs_to(record.run_id, attempt.number):
        return None
    end = classify(run, attempt, None)
    return Ended(status=end.status, at=result.ended, kind=end.kind, reason=end.reason)


def _last_seen(run: RunDir) -> float | None:
    """Return when a file of the last attempt was written last (Unix seconds), None without such a file."""
    # The state of rank 0 is written every second, until its process exits. Of another host, the time in it counts: the
    # start of the attempt has the same clock, and the times of files may have that of a file server.
    state = decode_optional(run.rank_state(0), RankState)
    if state is not None and state.time and state.host not in ("", socket.gethostname()):
        return state.time
    times = []
    for path in (run.rank_state(0), run.metrics, run.output_log):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)
