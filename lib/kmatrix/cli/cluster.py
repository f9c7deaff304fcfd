"""Submit the runs of a matrix to its cluster."""

from __future__ import annotations

from pathlib import Path

from kmatrix.clock import clock
from kmatrix.engines import jobs
from kmatrix.engines.jobs import ClusterJobs
from kmatrix.engines.kubernetes import Kubernetes
from kmatrix.engines.schedulers import scheduler_for
from kmatrix.experiment.cluster.jobs import planned_jobs
from kmatrix.experiment.plan import Plan
from kmatrix.records.matrix import read_plan
from kmatrix.records.paths import MatrixDir, below_root
from kmatrix.runner.controller import controller_of
from kmatrix.status.wanted import SEED_AXIS
from kmatrix.text import plural

LOOK_S = 5.0  # between two questions to the scheduler


def check_plan(plan: Plan) -> list[str]:
    """Return a line per submission of a plan. Raises LaunchError if the cluster would refuse or never start one."""
    scheduler = scheduler_for(plan.config.engine, plan.runs[0].values)
    if isinstance(scheduler, Kubernetes):
        folders = [below_root(path).resolve() for path in (plan.config.results_dir, plan.config.data_dir)]
        for problem in scheduler.check_paths(folders):
            raise problem
    first = {str(seed) for seed in plan.verdict.seeds[: plan.verdict.seeds_min]} if plan.verdict.seeds_auto else set()
    names = {one.name for one in plan.runs if not first or dict(one.axes).get(SEED_AXIS) in first}
    shapes = {name: shape for name, shape in planned_jobs(plan).items() if name in names}
    return [f"{scheduler.name}: {line}" for line in jobs.describe(shapes, scheduler)]


def show_jobs(plan: Plan) -> None:
    """Print the jobs that a plan would be submitted as. Raises LaunchError if the cluster has no place for one."""
    for line in check_plan(plan):
        print(line)
    if plan.verdict.seeds_auto:
        print(f"these are the first seeds; a last job submits the next ones, up to {plural(len(plan.configs), 'run')}")


def submit(path: Path) -> ClusterJobs:
    """Submit what is due in a matrix; return its jobs.

    Raises LaunchError if a job would never start, UnreachableError without an answer of the scheduler.
    """
    plan = read_plan(path)
    ours = ClusterJobs(path=path, scheduler=scheduler_for(plan.engine, plan.common.symbols))
    controller_of(path, ours).step(ours.poll())
    return ours


def run_trials(matrix: MatrixDir) -> None:
    """Run the trials of a preflight in jobs, and wait for them."""
    ours = submit(matrix.path)
    while ours.poll():
        clock.sleep(LOOK_S)
