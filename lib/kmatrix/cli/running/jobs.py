"""The jobs that a plan becomes on a cluster: check them and show them."""

from __future__ import annotations

from collections.abc import Sequence

from kmatrix.engines.base import Scheduler
from kmatrix.engines.schedulers import find_scheduler, settings_of
from kmatrix.errors import LaunchError
from kmatrix.experiment.cluster.jobs import planned_attempts
from kmatrix.experiment.plan import Plan
from kmatrix.records.jobs.files import (
    REPORT,
    EngineFile,
    Shape,
    SubmissionFile,
    read_engine,
)
from kmatrix.records.paths import MatrixDir, below_root
from kmatrix.runner.shares import parallel_notes, submissions_of, time_notes
from kmatrix.runner.submit import refuse_submissions
from kmatrix.status.outcomes import SEED_AXIS
from kmatrix.status.state import RunPlan
from kmatrix.text import duration, make_command, plural


def check_plan(scheduler: Scheduler, plan: Plan) -> list[str]:
    """Return notes about the jobs of a plan. Raises LaunchError if the cluster would refuse or never start one."""
    rules, plans = scheduler.rules(), _first_attempts(plan)
    folders = [below_root(path).resolve() for path in (plan.config.results_dir, plan.config.data_dir)]
    if problems := scheduler.check_paths(folders):
        raise LaunchError(problems[0], hint="set RESULTS_DIR and DATA_DIR to folders that the jobs see")
    submissions = submissions_of(plans, rules)
    refuse_submissions(scheduler, submissions)
    parallel = int(plan.runs[0].values.texts.get("PARALLEL_JOBS") or 0)
    return [*time_notes(plans, rules), *parallel_notes(submissions, parallel)]


def _first_attempts(plan: Plan) -> list[RunPlan]:
    """Return the attempts that are submitted at once: of adaptive seeds, those of the first ones."""
    attempts = planned_attempts(plan)
    if not plan.verdict.seeds_auto:
        return attempts
    first = {str(seed) for seed in plan.verdict.seeds[: plan.verdict.seeds_min]}
    names = {planned.name for planned in plan.runs if dict(planned.run.axes).get(SEED_AXIS) in first}
    return [one for one in attempts if one.name in names]


def show_jobs(plan: Plan) -> None:
    """Print the jobs that a plan would be submitted as. Raises LaunchError if the cluster has no place for one."""
    scheduler = find_scheduler(plan.config.engine, settings_of(plan.config.engine, plan.runs[0].values.texts))
    notes = check_plan(scheduler, plan)
    rules = scheduler.rules()
    for submission in submissions_of(_first_attempts(plan), rules):
        print(f"{scheduler.name}: {content_of(submission)}")
    which = ""
    if plan.verdict.seeds_auto:
        every_run, which = plural(len(plan.runs), "run"), ", with all seeds,"
        print(f"{scheduler.name}: these are the first seeds; a last job submits the next ones, up to {every_run}")
    every = submissions_of(planned_attempts(plan), rules)
    if most := _most_hours([submission.shape for submission in every for _ in submission.shares]):
        print(f"{scheduler.name}: {most}{which} if each job starts once and takes its whole time")
    for note in notes:
        print(f"note: {note}")


def _most_hours(shapes: Sequence[Shape]) -> str:
    """Return `at most 2.5 node-hours, 20 GPU-hours` of jobs of these shapes, "" if one has no time limit."""
    if not shapes or any(shape.seconds is None for shape in shapes):
        return ""
    nodes = sum(shape.nodes * (shape.seconds or 0.0) for shape in shapes) / 3600
    gpus = sum(shape.nodes * shape.gpus_per_node * (shape.seconds or 0.0) for shape in shapes) / 3600
    return f"at most {nodes:,.4g} node-hours" + (f", {gpus:,.4g} GPU-hours" if gpus else "")


def content_of(submission: SubmissionFile) -> str:
    """Return a submission as text: `3 runs, 3 tasks, each on 2 nodes with 4 GPUs per node, at most 1h00m`."""
    shape = submission.shape
    if submission.kind == REPORT:
        return f"{'the next seeds, or ' if submission.seeds else ''}the report, after all others"
    runs = sum(len(share.runs) for share in submission.shares)
    tasks = f", {len(submission.shares):,} tasks, each" if len(submission.shares) > 1 else ","
    each = plural(shape.gpus_per_node, "GPU") if shape.gpus_per_node else plural(shape.cpus_per_node, "CPU")
    limit = f", at most {duration(shape.seconds)}" if shape.seconds is not None else ""
    each += " per node" if shape.nodes > 1 else ""
    return f"{plural(runs, 'run')}{tasks} on {plural(shape.nodes, 'node')} with {each}{limit}"


def print_job_commands(matrix: MatrixDir) -> None:
    """Print the commands that watch, stop and continue the jobs of a matrix."""
    print(f"  watch:    {make_command('status', matrix.path)}")
    print(f"  stop:     {make_command('stop', matrix.path)}")
    print(f"  continue: {make_command('continue', matrix.path)}")


def engine_of(matrix: MatrixDir) -> EngineFile:
    """Return engine.json of a matrix of a cluster. Raises LaunchError for one of this machine."""
    engine = read_engine(matrix)
    if engine is None:
        raise LaunchError(f"{matrix.name} is a matrix of this machine", hint=make_command("continue", matrix.path))
    return engine
