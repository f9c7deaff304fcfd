"""Texts about jobs on a cluster in status and estimate: where runs are, and why they wait, in the scheduler's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kmatrix.engines.ports import Phase, Seen
from kmatrix.errors import LaunchError
from kmatrix.records.matrix import LOCAL, TITLES
from kmatrix.records.runs import Status
from kmatrix.status.look import Look, look
from kmatrix.status.view import ENDED, RUNS, WAITS, JobView, MatrixView, RunView
from kmatrix.text import first_names, make_command, plural, time_of_day

WAITING = (Status.PLANNED, Status.STOPPED)  # statuses of a run whose job waits, or starts


def look_with_jobs(path: Path) -> tuple[Look, Mapping[str, JobView], str]:
    """Return a matrix, run -> its job on a cluster, and why its scheduler does not answer. It is asked once."""
    seen = look(path)
    if seen.plan.engine == LOCAL:
        return seen, {}, ""
    from kmatrix.engines import jobs, schedulers  # what only a cluster needs is a third of the time of a status

    try:
        scheduler = schedulers.scheduler_of(seen.plan)
        found = jobs.look(path, scheduler) if scheduler else {}
    except LaunchError as error:  # no answer, or no program to ask on this machine
        return seen, {}, ": ".join(filter(None, (error.what, error.why)))
    live = {run for run, job in found.items() if job.phase is Phase.RUNS}
    is_known = all(seen.states[run].status is Status.RUNNING for run in live)  # by their pulses
    return seen if is_known else look(path, live), {run: _view(job) for run, job in found.items()}, ""


def _view(job: Seen) -> JobView:
    return JobView(
        id=job.id,
        phase=job.phase.value,
        state=job.state,
        reason=job.reason,
        nodes=job.nodes,
        starts=job.starts,
        log=f"jobs/{job.number}/{job.task}.log",
    )


def counts(view: MatrixView) -> list[str]:
    """Return `jobs: 1 running, 3 waiting`, nothing without a live job."""
    found = Counter(run.job.phase for run in view.runs if run.job is not None)
    named = {"running": found[RUNS], "waiting": found[WAITS]}
    known = ", ".join(f"{number} {name}" for name, number in named.items() if number)
    return [f"jobs: {known}"] if known else []


def run_status(run: RunView) -> str:
    """Return the status of a run: that of its files, unless its job waits or starts."""
    if run.job is not None and run.status in WAITING and run.job.phase != ENDED:
        return "queued" if run.job.phase == WAITS else "starting"
    return str(run.status)


def place(view: MatrixView, run: RunView) -> str:
    """Return the hosts of a run on a cluster, or how many nodes it needs; "" on this machine."""
    if view.engine == LOCAL:
        return ""
    nodes = run.job.nodes if run.job is not None and run.job.phase == RUNS else ""
    return nodes or run.host or (plural(run.nodes, "node") if run.nodes > 1 else "")


def silence(view: MatrixView) -> str:
    """Return that the scheduler does not answer, in its words; "" if it does."""
    return f"{view.silent}; what follows is from the files of the runs" if view.silent else ""


def waits(view: MatrixView) -> Iterator[str]:
    """Yield why jobs wait or have ended, one line for all runs with the same reason and expected start."""
    found: dict[str, list[str]] = {}
    for run in view.runs:
        job = run.job
        if job is None or run.status not in WAITING or job.phase == RUNS:
            continue
        why = f"{job.state}: {job.reason}" if job.reason else job.state
        start = f", expected start {time_of_day(job.starts)}" if job.starts is not None else ""
        text = f"queued ({why}){start}" if job.phase == WAITS else f"without a job, the last one ended ({why})"
        found.setdefault(text, []).append(run.name)
    yield from (f"{first_names(names, 3)} {text}" for text, names in found.items())
    if view.engine != LOCAL and view.is_active and not view.silent and (names := without_job(view.runs)):
        again = make_command("continue", view.path)
        yield f"{plural(len(names), 'run')} without a job: the last job submits what is due, or {again}"


def without_job(runs: Sequence[RunView]) -> list[str]:
    """Return the runs that are to come and have no live job."""
    waiting = (run for run in runs if run.to_come and run.status in WAITING)
    return [run.name for run in waiting if run.job is None or run.job.phase == ENDED]


def queue_of(view: MatrixView) -> str:
    """Return why the end of a matrix on a cluster is unknown, "" if it is not because of its queue."""
    unknown = [run for run in view.runs if run.to_come and run.ends_s is None]
    if view.engine == LOCAL or not unknown or any(run.left_s is None for run in unknown):
        return ""
    if names := without_job(unknown):
        return f"{plural(len(names), 'run')} without a job"
    return f"{TITLES[view.engine]} expects no start of {plural(len(unknown), 'run')} yet"
