"""The state of a run in its status.json: write it, read it, recover it after the runner died.

result.json is the truth about an attempt that ended. If the runner died before it wrote status.json, the state is
recovered from the trainer's own files. Everything that shows or needs the status of a run asks this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kmatrix.errors import LaunchError, RecordError, SchemaError, is_full
from kmatrix.records.files import json_object, last_lines, read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult, Status, read_result, read_run_file, read_run_file_or_empty
from kmatrix.records.tracking import read_track
from kmatrix.status.alerts import Alert
from kmatrix.status.classify import classify
from kmatrix.status.disk_space import how_full, what_to_do
from kmatrix.status.state import Attempt, Ended, JobState, RunnerDied, RunState, after


def recover_status(run: RunDir, *, has_runner: bool) -> RunState:
    """Return the state of a run, without changing a file.

    has_runner: a runner holds the matrix, so status.json is up to date. Without one, a run in state "running", or with
    traces of a later attempt, lost its runner: its last attempt ended by its result.json, or was stopped.
    A damaged status.json makes the run failed, with the damage as the reason, unless its result says finished.
    Raises SchemaError if a newer kmatrix wrote the file.
    """
    try:
        state, damage = read_state(run), ""
    except SchemaError:
        raise
    except (RecordError, KeyError, ValueError, TypeError) as error:
        state, damage = RunState(), str(error).splitlines()[0]
    if has_runner:
        return RunState(status=Status.FAILED, reason=damage) if damage else state
    if state.status is Status.FINISHED:
        return state  # no attempt follows
    # A runner can die between the start of an attempt and its entry: the trainer's own files then know of it.
    number = max(state.number, last_number(run))
    if state.status is Status.RUNNING or number > state.number:
        last = state.last
        attempt = last if last and last.number == number else Attempt(number=max(number, 1))
        state = after(state, RunnerDied(number=attempt.number, ended=_ended(run, attempt)))
    # The result of an attempt is worth more than the damaged cache of the runner.
    if damage and state.status is not Status.FINISHED:
        attempts = state.attempts or (Attempt(number=1, status=Status.FAILED, reason=damage),)
        return RunState(status=Status.FAILED, reason=damage, attempts=attempts)
    return state


def current_result(run: RunDir, state: RunState) -> RunResult | None:
    """Return the result of the last attempt, or None if it is still running or left no readable result."""
    if state.status in (Status.RUNNING, Status.PLANNED, Status.SKIPPED):
        return None
    result = read_result(run)
    return result if result and (state.reused_from or result.attempt_number == state.number) else None


def read_state(run: RunDir) -> RunState:
    """Return the state in status.json, planned without one. Older files have the last attempt only."""
    record = read_json(run.status) if run.status.exists() else {}
    status, reason = Status(record.get("status", Status.PLANNED)), str(record.get("reason") or "")
    attempts = tuple(_attempt(entry) for entry in record.get("attempts") or [])
    # Files of early versions describe the last attempt by the keys of the run itself.
    if not attempts and "attempts" not in record and status not in (Status.PLANNED, Status.SKIPPED):
        attempts = (_attempt({**record, "status": status}),)
    return RunState(
        status=status,
        reason=reason,
        attempts=attempts,
        archived=int(record.get("set_aside") or 0),
        reused_from=str(record.get("reused_from") or ""),
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
    record = {
        "run_id": read_run_file(run).run_id if run.run_json.exists() else None,
        "name": run.name,
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


def _attempt(entry: Mapping[str, Any]) -> Attempt:
    return Attempt(
        number=int(entry.get("attempt") or 1),
        status=Status(entry["status"]),
        resume=str(entry.get("resume") or "none"),
        micro_batch=entry.get("micro_batch"),
        started=entry.get("started"),
        ended=entry.get("ended"),
        kind=entry.get("kind"),
        reason=str(entry.get("reason") or ""),
        exit_code=entry.get("exit_code"),
        gpus=tuple(entry.get("gpus") or ()),
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
        "gpus": list(attempt.gpus),
    }


def last_number(run: RunDir) -> int:
    """Return the number of the last attempt that wrote metrics or a result, 0 if none did."""
    numbers = []
    # Attempts are written in order: the last line decides.
    with suppress(OSError), run.metrics.open("rb") as file:
        lines = (json_object(text) for text in reversed(last_lines(file)) if text.endswith("\n"))
        newest = next((line for line in lines if line and isinstance(line.get("step"), int)), None)
        numbers += [int(newest.get("attempt", 1))] if newest else []
    if result := read_result(run):
        numbers.append(result.attempt_number)
    return max(numbers, default=0)


def _ended(run: RunDir, attempt: Attempt) -> Ended | None:
    """Return how an attempt ended by its result.json, or None if it left no readable result."""
    result = read_result(run)
    if result is None or not result.belongs_to(read_run_file_or_empty(run).run_id, attempt.number):
        return None
    end = classify(run, attempt, None)
    return Ended(status=end.status, at=result.ended, kind=end.kind, reason=end.reason)
