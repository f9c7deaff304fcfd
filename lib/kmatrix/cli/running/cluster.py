"""Submit the runs of a matrix to its cluster, and follow them."""

from __future__ import annotations

from pathlib import Path

from kmatrix.cli.commands import Arguments, yes
from kmatrix.cli.progress import Display
from kmatrix.clock import clock
from kmatrix.engines import jobs
from kmatrix.engines.jobs import ClusterJobs
from kmatrix.engines.kubernetes import Kubernetes
from kmatrix.engines.ports import Scheduler, UnreachableError
from kmatrix.engines.schedulers import scheduler_for
from kmatrix.experiment.plan import Plan
from kmatrix.records.control import requests_of, stop_of
from kmatrix.records.matrix import read_plan
from kmatrix.records.paths import MatrixDir, below_root
from kmatrix.records.runs import Status
from kmatrix.runner.conclude import report
from kmatrix.runner.controller import controller_of, exit_status
from kmatrix.status.look import Look, look
from kmatrix.status.wanted import SEED_AXIS, wanted
from kmatrix.text import make_command, plural

FOLLOW_S = 5.0  # between two looks


def check_plan(plan: Plan) -> list[str]:
    """Return a line per submission of a plan. Raises LaunchError if the cluster would refuse or never start one."""
    scheduler = scheduler_for(plan.config.engine, plan.matrix.runs[0].values)
    if isinstance(scheduler, Kubernetes):
        folders = [below_root(path).resolve() for path in (plan.config.results_dir, plan.config.data_dir)]
        for problem in scheduler.check_paths(folders):
            raise problem
    first = {str(seed) for seed in plan.verdict.seeds[: plan.verdict.seeds_min]} if plan.verdict.seeds_auto else set()
    names = {one.name for one in plan.runs if not first or dict(one.run.axes).get(SEED_AXIS) in first}
    shapes = {name: shape for name, shape in plan.jobs.items() if name in names}
    return [f"{scheduler.name}: {line}" for line in jobs.describe(shapes, scheduler)]


def show_jobs(plan: Plan) -> None:
    """Print the jobs that a plan would be submitted as. Raises LaunchError if the cluster has no place for one."""
    for line in check_plan(plan):
        print(line)
    if plan.verdict.seeds_auto:
        print(f"these are the first seeds; a last job submits the next ones, up to {plural(len(plan.runs), 'run')}")


def submit(matrix: MatrixDir, arguments: Arguments) -> int:
    """Submit what is due; follow it with WAIT=1. Return the exit status.

    Raises LaunchError if a job would never start, UnreachableError without an answer of the scheduler.
    """
    ours = _submit(matrix.path)
    if not ours.submitted:
        print("nothing was submitted: what is left has jobs that wait or run, or waits for you")
    print(f"  watch:    {make_command('status', matrix.path)}")
    print(f"  stop:     {make_command('stop', matrix.path)}")
    print(f"  continue: {make_command('continue', matrix.path)}")
    if not yes(arguments, "WAIT"):
        return 0
    seen = follow(matrix.path, ours)
    report(matrix, draw=False)
    return exit_status(seen, wanted)


def run_trials(matrix: MatrixDir) -> None:
    """Run the trials of a preflight in jobs, and wait for them."""
    follow(matrix.path, _submit(matrix.path))


def _submit(path: Path) -> ClusterJobs:
    ours = ClusterJobs(path=path, scheduler=_scheduler(path))
    controller_of(path, ours).step(ours.poll())
    return ours


def _scheduler(path: Path) -> Scheduler:
    plan = read_plan(path)
    return scheduler_for(plan.engine, {**plan.common.symbols, **requests_of(path).settings})


def follow(path: Path, ours: ClusterJobs) -> Look:
    """Show a matrix until no job lives and nothing is due; return it then. Ctrl+C ends the look, not the jobs."""
    with Display() as display:
        while True:
            try:
                live = ours.poll()
            except UnreachableError as error:
                live = {"": False}
                print(f"note: {error}", flush=True)
            seen = look(path, [run for run, runs in live.items() if runs])
            display(seen)
            states = [seen.states[run] for run in wanted(seen)]
            due = stop_of(path) is None and any(state.is_due for state in states)
            if not live and not due and not any(state.status is Status.RUNNING for state in states):
                return seen
            clock.sleep(FOLLOW_S)
