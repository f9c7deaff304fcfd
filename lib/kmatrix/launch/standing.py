"""How a run stands, in its status.json: written, read back, and put right where a runner died.

The truth of an ended attempt is its result.json. What a status.json lacks, because the runner died before it wrote it,
is taken from the trainer's own files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kmatrix.alerts import Alert
from kmatrix.errors import LaunchError, RecordError, SchemaError, is_full
from kmatrix.launch.engine import JobState, Phase, RunPlan
from kmatrix.launch.room import how_full, what_to_do
from kmatrix.launch.state import Attempt, Ended, RunnerDied, RunState, after
from kmatrix.launch.verdict import judge
from kmatrix.records import RunDir, Status, read_json, read_jsonl, write_json
from kmatrix.records.tracking import read_track

EMPTY: Mapping[str, Any] = {}


def settle(run: RunDir) -> RunState:
    """Return how a run stands that no runner has: what says "running" was left by one that died.

    Changes no file. A damaged status.json is left for a person to see; the result still counts.
    Raises SchemaError where a newer kmatrix wrote it.
    """
    try:
        state = read_state(run)
    except SchemaError:
        raise
    except (RecordError, KeyError, ValueError, TypeError) as error:
        state = RunState(status=Status.PLANNED)
        damaged = str(error).splitlines()[0]
    else:
        damaged = ""
    if state.status is Status.FINISHED:
        return state  # nothing comes behind it
    number = max(state.number, last_number(run))
    if state.status is Status.RUNNING or number > state.number:
        number = max(number, 1)
        state = after(state, RunnerDied(number=number, ended=_ended(run, number)))
    if damaged and state.status is not Status.FINISHED:
        return RunState(status=Status.FAILED, reason=damaged, attempts=_one(state, damaged))
    return state


def read_state(run: RunDir) -> RunState:
    """Return what status.json says; planned where there is none. Older files name their last attempt only."""
    record = read_json(run.status) if run.status.exists() else {}
    status, reason = Status(record.get("status", Status.PLANNED)), str(record.get("reason") or "")
    attempts = tuple(_attempt(entry) for entry in record.get("attempts") or [])
    if not attempts and "attempts" not in record and status not in (Status.PLANNED, Status.SKIPPED):
        attempts = (_attempt({**record, "status": status}),)
    return RunState(
        status=status,
        reason=reason,
        attempts=attempts,
        set_aside=int(record.get("set_aside") or 0),
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
    """Write status.json. job: what the engine knows of the processes; their pid stands there while they run.

    alerts: what the run was and is warned of.
    """
    last = state.last
    record = {
        "run_id": read_json(run.run_json).get("run_id") if run.run_json.exists() else None,
        "name": run.name,
        "status": state.status,
        "kind": last.kind if last else None,
        "reason": state.reason or None,
        "attempt": state.number,
        "started": last.started if last else None,
        "ended": last.ended if last else None,
        "exit_code": last.exit_code if last else None,
        "pid": job.pid if job and state.status is Status.RUNNING else None,
        "log_tail": list(log_tail),
        "alerts": [alert.to_json() for alert in alerts],
        "links": {sent.tracker: sent.link for sent in read_track(run) if sent.link},
        "attempts": [_entry(attempt) for attempt in state.attempts],
        "set_aside": state.set_aside,
        "reused_from": state.reused_from or None,
    }
    with writing(run.status):
        write_json(run.status, record)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a disk that is full or not ours into an error that names the file, and what to do."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            why, fix = f"{error.strerror}: {how_full(path)}", what_to_do(path)
            raise LaunchError(f"cannot write {path}", why=why, fix=fix) from error
        raise LaunchError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            fix="see who may write there; finished runs are kept",
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


def _one(state: RunState, reason: str) -> tuple[Attempt, ...]:
    return state.attempts or (Attempt(number=1, status=Status.FAILED, reason=reason),)


def last_number(run: RunDir) -> int:
    """The number of the last attempt that left a trace: in its result, or in its metrics."""
    numbers = [int(line.get("attempt", 1)) for line in read_jsonl(run.metrics) if isinstance(line.get("step"), int)]
    with suppress(RecordError, ValueError, TypeError):
        numbers.append(int(read_json(run.result).get("attempt", 1)) if run.result.exists() else 0)
    return max(numbers, default=0)


def _ended(run: RunDir, number: int) -> Ended | None:
    """What the result of this attempt says; None where it left none that can be read."""
    try:
        result = read_json(run.result) if run.result.exists() else EMPTY
        run_id = str(read_json(run.run_json).get("run_id"))
    except RecordError:
        return None
    if result.get("attempt", 1) != number or result.get("run_id") != run_id:
        return None
    plan = RunPlan(name=run.name, run_id=run_id, dir=run, ranks=1, attempt=number)
    verdict = judge(plan, JobState(phase=Phase.ENDED))
    return Ended(status=verdict.status, at=result.get("ended"), kind=verdict.kind, reason=verdict.reason)
