"""A matrix that is there -> the attempts that are to be made: its run.json say all, .config says nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kmatrix.estimate import Measured, guess, whole_run
from kmatrix.gpu.nvml import Gpu
from kmatrix.launch.engine import RunPlan
from kmatrix.launch.history import measured_before, measured_here
from kmatrix.launch.standing import settle
from kmatrix.launch.state import HALVE, Attempt, RunState, next_attempt
from kmatrix.records import MatrixDir, RunDir, Status, read_json, write_json

TRAINER = ("-m", "gpt2.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """What is to be done in a matrix. skipped: run -> why it cannot run here.  stays: runs that are left as they are.

    plans: the attempts, in the matrix's order.
    """

    plans: tuple[RunPlan, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    stays: Mapping[str, RunState] = field(default_factory=dict)


def reopen(
    matrix: MatrixDir,
    gpus: Sequence[Gpu],
    *,
    names: Collection[str] | None = None,
    resume: str = "auto",
    retry_failed: bool = False,
    command: tuple[str, ...] = TRAINER,
) -> Going:
    """Return what is to be done so that the runs come to their end.

    gpus: those that may be used.  names: the runs that are meant, all unless given.
    resume: what an attempt behind the first begins from.  retry_failed: failed runs get another attempt, too;
    those that were killed get one anyway.
    """
    plans, skipped, stays = [], {}, {}
    here, earlier = measured_here(matrix), measured_before(matrix)
    for run in matrix.runs():
        state, record = settle(run), read_json(run.run_json)
        attempt = _attempt(state, record["train"], resume, retry_failed=retry_failed)
        if attempt is None or (names is not None and run.name not in names):
            stays[run.name] = state
        elif why := too_few_gpus(record["train"], len(gpus)) or _no_data(record["train"]):
            skipped[run.name] = why
        else:
            expected_s = _expected_s(record, here, earlier)
            plans.append(run_plan(run, record, attempt, command, expected_s))
    return Going(plans=tuple(plans), skipped=skipped, stays=stays)


def follow_move(matrix: MatrixDir) -> None:
    """Put right where checkpoints lie when the matrix was moved: those in the runs' own folders moved along."""
    for run in matrix.runs():
        record = read_json(run.run_json)
        place = Path(record["train"].get("checkpoint_dir") or run.checkpoints)
        moved = place.parts[-3:] == (matrix.name, run.name, run.checkpoints.name) and not place.parent.is_dir()
        if moved:
            train = {**record["train"], "checkpoint_dir": str(run.checkpoints.resolve())}
            write_json(run.run_json, {**record, "train": train})


def _expected_s(record: Mapping[str, Any], here: Sequence[Measured], earlier: Sequence[Measured]) -> float | None:
    """Return the seconds of a run for the order in which runs start. record: its run.json."""
    known = whole_run(record["train"], here, earlier, record.get("expected_s"))
    return guess(record["train"]) if known is None else known.seconds


def too_few_gpus(train: Mapping[str, Any], there: int) -> str:
    """Return why a run cannot run on a machine with so many GPUs, "" where it can."""
    ranks = int(train["num_gpus"])
    if train["device"] != "cuda" or ranks <= there:
        return ""
    return f"needs {ranks} GPUs, and there {'is' if there == 1 else 'are'} {there or 'none'}"


def _no_data(train: Mapping[str, Any]) -> str:
    """Data are prepared for runs that can run where a matrix is planned."""
    return "" if train.get("data_path", ".") else "its data were not prepared where it was planned: plan it here"


def run_plan(
    run: RunDir, record: Mapping[str, Any], attempt: Attempt, command: tuple[str, ...], expected_s: float | None
) -> RunPlan:
    """Return one attempt at a run. record: its run.json."""
    train = record["train"]
    return RunPlan(
        name=run.name,
        run_id=str(record["run_id"]),
        dir=RunDir(run.path.resolve()),
        ranks=int(train["num_gpus"]),
        cuda=train["device"] == "cuda",
        cpu_threads=int(train["cpu_threads"]),
        command=command,
        timeout_s=float(record.get("timeout_s") or 0),
        attempt=attempt.number,
        expected_s=expected_s,
        resume=attempt.resume,
        micro_batch=attempt.micro_batch,
    )


def _attempt(state: RunState, train: Mapping[str, Any], resume: str, *, retry_failed: bool) -> Attempt | None:
    return next_attempt(
        state,
        batch_size=int(train["batch_size"]),
        policy=str(train.get("oom_policy") or HALVE),
        resume=resume,
        retry_failed=retry_failed,
        retry_killed=True,
    )


def in_words(going: Going) -> list[str]:
    """Say what is to be done, a line for each run that goes on and for each kind of run that stays."""
    lines = [f"{plan.name}: {_beginning(plan)}" for plan in going.plans]
    lines += [f"{name}: skipped, {why}" for name, why in going.skipped.items()]
    for status in Status:
        count = sum(state.status is status for state in going.stays.values())
        if count:
            hint = ": RETRY_FAILED=1 tries again" if status is Status.FAILED else ""
            lines.append(
                f"{count} {status} {'stays' if count == 1 else 'stay'} as {'it is' if count == 1 else 'they are'}{hint}"
            )
    return lines


def _beginning(plan: RunPlan) -> str:
    """Say which attempt it is and what it begins from."""
    origins = {"none": "from the start", "auto": "from its last good checkpoint"}
    words = f"attempt {plan.attempt}, {origins.get(plan.resume, f'from {plan.resume}')}"
    return words + (f", micro-batch {plan.micro_batch}" if plan.micro_batch is not None else "")
