"""Read a matrix as it is now: what `make status`, estimate, summary, continue and the jobs see. It writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix import locks
from kmatrix.errors import RecordError
from kmatrix.records import attempts
from kmatrix.records.control import Requests, requests_of, stop_of
from kmatrix.records.decode import decode
from kmatrix.records.files import names
from kmatrix.records.matrix import Plan, PlannedRun, read_plan
from kmatrix.records.runs import RunResult
from kmatrix.status.fold import Files, State, state_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A matrix, and the files and states of its runs."""

    path: Path
    plan: Plan
    files: Mapping[str, Files]
    states: Mapping[str, State]
    stop: str | None  # why nothing starts; None: nobody has stopped it
    requests: Requests = field(default_factory=Requests)


def look(path: Path, jobs: Collection[str] = ()) -> Look:
    """Return a matrix as it is now. jobs: runs whose jobs run on other hosts, as their scheduler says.

    A damaged file of a run fails this run alone. Raises RecordError if matrix.json or the requests are damaged.
    """
    plan, requests = read_plan(path), requests_of(path)
    files = {run.name: read_run(path, plan, run, requests, jobs) for run in plan.runs}
    states = {run.name: state_of(files[run.name], spare=run.selected) for run in plan.runs}
    return Look(path=path, plan=plan, files=files, states=states, stop=stop_of(path), requests=requests)


def read_run(
    path: Path, plan: Plan, run: PlannedRun, requests: Requests, jobs: Collection[str] = (), *, has_lock: bool = False
) -> Files:
    """Return what the files of a run say. has_lock: the caller has its lock, so nobody else on this host trains it."""
    folder, train = path / run.name, plan.train_of(run)
    found: tuple[attempts.Attempt, ...] = ()
    result, saved, is_live, damage = None, 0, False, ""
    try:
        if found := attempts.read_all(folder):
            result = decode(f"{folder}/result.json", RunResult) if "result.json" in names(folder) else None
            last, is_done = found[-1], result is not None and result.status == "finished"
            trains = run.name in jobs or locks.is_held(folder / ".lock") or attempts.beats(folder, last)
            is_live = last.end is None and not has_lock and trains
            saved = 0 if is_done else saved_step(plan.checkpoints_of(path, run))
    except RecordError as error:
        found, result, damage = (), None, f"{error.what}: {error.why}".replace(f"{folder}/", "")
    return Files(
        run_id=run.run_id, train=train, micro_batch=int(train.get("batch_size") or 1), attempts=found, result=result,
        saved=saved, is_live=is_live, request=requests.runs.get(run.name), again=requests.again.get(run.name),
        damage=damage,
    )  # fmt: skip


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a folder: one exists if its description does, written last."""
    found = (name[5:-5] for name in names(folder) if name.startswith("step_") and name.endswith(".json"))
    return max((int(step) for step in found if step.isdecimal()), default=0)
