"""The text about jobs on a cluster in status and estimate: where runs are, why they wait, what to type next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmatrix.records.jobs.files import SLURM
from kmatrix.records.runs import Status
from kmatrix.status.activity import Activity
from kmatrix.status.run_jobs import MatrixJobs
from kmatrix.status.state import NO_PROGRESS
from kmatrix.status.view.matrix_view import TO_COME, MatrixView, RunView
from kmatrix.text import duration, first_names, host_names, make_command, plural, printable, shown, time_of_day

WAITING = (Status.PLANNED, Status.STOPPED)  # statuses of a run whose job waits, or starts


def counts(jobs: MatrixJobs) -> str:
    """Return `jobs: 1 running, 3 waiting`, "" without one."""
    named = {"running": jobs.running, "waiting": jobs.waiting, "unknown": jobs.unknown}
    known = ", ".join(f"{number} {name}" for name, number in named.items() if number)
    return f"jobs: {known}" if known else ""


def run_status(run: RunView) -> str:
    """Return the status of a run: that of its files, unless its job waits or starts."""
    if run.job is not None and run.status in WAITING:
        if run.job.activity is Activity.QUEUED:
            return "queued"
        if run.job.is_starting:
            return "starting"
    return str(run.status)


def place(run: RunView) -> str:
    """Return the hosts of a run, `n1,n2`, or how many nodes it needs; "" on one machine."""
    if run.job is None:
        return ""
    hosts = run.job.hosts or (() if run.status in TO_COME else run.hosts)
    if hosts:
        return host_names(hosts)
    return plural(run.job.nodes, "node") if run.job.nodes > 1 else ""


def silence(view: MatrixView) -> str:
    """Return that the scheduler does not answer, in its words; "" if it does."""
    if view.jobs is None or not view.jobs.silent:
        return ""
    what = f"{view.jobs.scheduler} does not answer: {view.jobs.silent}"
    return f"{what}; the steps below are from the runs' own files"


def troubles(view: MatrixView) -> Iterator[str]:
    """Yield what is wrong with the jobs of running runs: suspended ones, and hosts without a sign of life."""
    halted: dict[str, list[str]] = {}
    for run in view.runs:
        if run.job is not None and run.job.halts:
            halted.setdefault(run.job.halts, []).append(run.name)
    yield from (f"the job of {first_names(names)} {why}" for why, names in halted.items())
    quiet: dict[tuple[str, str], tuple[float, list[str]]] = {}
    for run in view.runs:
        for host, since in (run.job.quiet if run.job else {}).items():
            about = (host, run.job.reason if run.job else "")
            longest, names = quiet.setdefault(about, (since, []))
            quiet[about] = (max(longest, since), [*names, run.name])
    for (host, why), (since, names) in sorted(quiet.items()):
        yield f"node {host} has not answered for {duration(since)} ({first_names(names)})" + (f": {why}" if why else "")


def waits(view: MatrixView) -> Iterator[str]:
    """Yield why jobs wait or are unknown, one line for all runs with the same reason and expected start."""
    found: dict[tuple[str, bool], list[str]] = {}
    for run in view.runs:
        if run.job is not None and run.status in TO_COME:
            asked = view.jobs.left_out.get(run.name, "") if view.jobs else ""
            why = _why(run, view.jobs) + (f"; {asked}: its job ends as soon as it starts" if asked else "")
            found.setdefault((why, run.job.died_early), []).append(run.name)
    for (why, died_early), names in found.items():
        if why:
            log = f"; its log: {make_command('logs', view.path, RUN=names[0])}" if died_early else ""
            yield f"{first_names(names, 3)} {why}{log}"


def _why(run: RunView, jobs: MatrixJobs | None) -> str:
    """Return why the job of an open run does not run, "" if it does."""
    job = run.job
    if job is None:
        return ""
    if job.activity is Activity.RUNNING:
        return f"starting: {job.reason}" if job.is_starting and job.reason else ""
    if job.activity is Activity.UNKNOWN:
        about = jobs.scheduler if jobs else "the scheduler"
        return f"unknown: {about} does not answer, and no file of the job has changed for minutes"
    if job.activity is Activity.NONE:
        return f"without a job: {job.reason}" if job.reason else ""
    parts = [f"queued: {job.reason}" if job.reason else "queued"]
    parts += [f"expected start {time_of_day(job.starts)}"] if job.starts is not None else []
    parts += [f"lost {', '.join(job.lost)} before"] if job.lost else []
    return ", ".join(parts)


def attempts(run: RunView) -> str:
    """Return how the attempts of a run ended, and how often its job was started again; "" on one machine.

    `gpt2_adamw_2gpu: attempt 3; before: time limit, node lost (n2 does not answer); restart 2 of job 12_3`
    """
    if run.job is None or (not run.ends and not run.job.restarts):
        return ""
    parts = [f"attempt {run.attempt}"] if run.attempt else []  # 0: it waits for the other runs of its job
    if run.ends:
        last = f" ({run.last_end})" if run.last_end else ""
        parts.append(f"before: {', '.join(_runs_of(run.ends))}{last}")
    if run.job.restarts:
        why = f" ({run.job.before})" if run.job.before else ""
        parts.append(f"restart {run.job.restarts} of job {run.job.id}{why}")
    return f"{run.name}: {'; '.join(parts)}"


def _runs_of(kinds: Sequence[str]) -> Iterator[str]:
    """Yield `3 x time limit` for equal ends in a row."""
    row: list[str] = []
    for kind in [*kinds, ""]:
        if row and kind != row[0]:
            yield row[0] if len(row) == 1 else f"{len(row)} x {row[0]}"
            row = []
        row.append(kind)


def next_steps(view: MatrixView) -> Iterator[str]:
    """Yield what to type for runs without a job."""
    jobs = view.jobs
    if jobs is None:
        return
    again = make_command("continue", view.path)
    yield from _stuck(view, jobs)
    if jobs.original:
        former = printable(jobs.original)
        if not any(run.status in TO_COME for run in view.runs):
            return
        if jobs.is_copy:
            yield f"a copy: its jobs belong to {former}; submit its own: {again}"
        else:
            yield f"moved from {former}: {again} ends jobs that were submitted there, and submits its own"
    elif jobs.next_seeds in (Activity.QUEUED, Activity.RUNNING):
        yield f"job {jobs.next_job} submits the next seeds, if the verdict needs any, after the jobs of this round"
    elif not jobs.unsubmitted:
        return
    elif jobs.next_seeds is not None:
        why = f"; why: {printable(shown(view.path / jobs.next_log))}" if jobs.next_log else ""
        yield f"the next seeds have no job: {plural(jobs.unsubmitted, 'run')}{why}; submit: {again}"
    elif jobs.is_interrupted:
        yield f"the submission was interrupted: {plural(jobs.unsubmitted, 'run')} without a job; submit: {again}"


def _stuck(view: MatrixView, jobs: MatrixJobs) -> Iterator[str]:
    """Yield what to type for runs that failed because their jobs got nowhere."""
    idle: dict[str, list[str]] = {}
    for run in view.runs:
        if run.status is Status.FAILED and run.kind == NO_PROGRESS:
            idle.setdefault(run.job.before if run.job else "", []).append(run.name)
    for why, names in idle.items():
        retry = make_command("continue", view.path, RETRY_FAILED="1") + " SLURM_TIME=<longer>" * (jobs.engine == SLURM)
        what = f"{why}; change that" if why else "find out why"
        yield f"{first_names(names, 3)} got nowhere: {what}, then {retry}"


def queue_of(view: MatrixView) -> str:
    """Return why the end of a matrix on a cluster is unknown, "" if it is not because of its queue."""
    if view.jobs is None:
        return ""
    unknown = [run for run in view.runs if run.status in TO_COME and run.ends_s is None]
    if not unknown or any(run.left_s is None for run in unknown):
        return ""
    longest = duration(max(run.left_s or 0.0 for run in unknown))
    if without := sum(run.job is None or run.job.activity is Activity.NONE for run in unknown):
        return f"{plural(without, 'run')} without a job; the longest takes {longest}"
    return f"{view.jobs.scheduler} expects no start of {plural(len(unknown), 'run')} yet; the longest takes {longest}"
