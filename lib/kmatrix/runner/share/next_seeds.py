"""The next seeds of a matrix: the job after all others submits them as long as the verdict wants further ones.

Which ones these are follows from the losses alone, as on one machine: nothing about a round is stored. This job only
takes the runs that were never submitted. Runs that were interrupted or cancelled wait for `continue`, as do the seeds
of a matrix that was stopped.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence

from kmatrix.engines.base import UnreachableError
from kmatrix.engines.schedulers import find_scheduler, is_setting
from kmatrix.errors import KmatrixError
from kmatrix.records.jobs.files import (
    CANCELLED,
    CANCELLING,
    EngineFile,
    SubmissionFile,
    given_up,
    is_at_home,
    job_lines,
    newest_shares,
    read_engine,
)
from kmatrix.records.jobs.paths import JobsDir, SubmissionDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.runner.execute import symbols
from kmatrix.runner.resume import ResumePlan, reopen
from kmatrix.runner.share.log import say
from kmatrix.runner.submit import (
    OtherSubmitterError,
    Submitter,
    occupied_runs,
    resolve_doubts,
    submit_plans,
    submitting,
)
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.state import RunPlan
from kmatrix.status.status_file import recover_status
from kmatrix.text import first_names, make_command, plural

# How long is it tried, and how often, if the scheduler does not answer, or another process submits. A start of this job
# whose node failed, or that was requeued, while it submitted, is taken for another process until its files are old.
TRY_S, AGAIN_S = 600.0, 15.0


def submit_next_seeds(matrix: MatrixDir, folder: SubmissionDir, submission: SubmissionFile) -> bool:
    """Submit the runs that the verdict wants next, and the job after them. Return False if that was not possible.

    folder, submission: of this job. A second start of it, and a command at the same time, submit no run twice.
    """
    deadline = time.monotonic() + TRY_S
    while True:
        try:
            with submitting(matrix) as submitter:
                _submit(submitter, folder.number, submission.arguments)
            return True
        except KmatrixError as error:
            why = ": ".join(filter(None, (error.what, error.why)))
            passes = isinstance(error, UnreachableError | OtherSubmitterError)
            if not passes or time.monotonic() > deadline:
                again = make_command("continue", matrix.path)
                say(f"error: cannot submit the next seeds from {socket.gethostname()}: {why}; on a login node: {again}")
                return False
            say(f"{why}; trying again")
            time.sleep(AGAIN_S)


def _submit(submitter: Submitter, number: int, arguments: Mapping[str, str]) -> None:
    """Submit the next seeds, if there are any. number, arguments: of the submission of this job."""
    jobs, matrix = submitter.jobs, submitter.jobs.matrix
    engine = read_engine(matrix)  # with the lock: a command may have changed the settings
    if why := _why_not(jobs, engine, number) or _spent(matrix, arguments):
        say(f"no further seeds are submitted: {why}")
        return
    assert engine is not None  # this job has read it before
    site = {name: text for name, text in arguments.items() if is_setting(engine.engine, name)}
    scheduler = find_scheduler(engine.engine, {**engine.settings, **site})
    resolve_doubts(submitter, engine, scheduler)
    plan = reopen(matrix, None)
    wanted = [one for one in plan.plans if one.name not in plan.requests]
    busy = occupied_runs(matrix, engine, scheduler, {one.name for one in wanted})
    new = [one for one in _never_submitted(matrix, wanted) if one.name not in busy]
    _explain(plan, new, busy)
    submit_plans(
        submitter,
        engine,
        scheduler,
        new,
        is_busy=bool(busy),
        seeds=True,
        arguments={name: text for name, text in arguments.items() if name not in site},
        site=site,
        on_submitted=lambda _, one, job: say(f"submitted job {job}: {_content(one)}"),
    )


def _why_not(jobs: JobsDir, engine: EngineFile | None, number: int) -> str:
    """Return why this job submits nothing, "" if it may."""
    if engine is None or not is_at_home(jobs.matrix, engine):
        return "the matrix was moved, or is a copy"
    lines = list(job_lines(jobs))
    own = next((place for place, line in enumerate(lines) if line.submission == number), -1)
    last = {line.submission: line for line in lines[own + 1 :]}
    if any(line.event in (CANCELLING, CANCELLED) and line.job for line in last.values()):
        return "the matrix was stopped"
    return ""


def _spent(matrix: MatrixDir, arguments: Mapping[str, str]) -> str:
    """Return that the budget of the matrix is spent, "" if it is not."""
    budget = MatrixBudget.of({**symbols(matrix), **arguments})
    runs = matrix.runs() if budget else []
    used = [(recover_status(run, has_runner=False), read_run_file_or_empty(run).train) for run in runs]
    spent = budget.spent(used, time.time())
    return f"the budget of the matrix is spent: {spent.text}" if spent else ""


def _never_submitted(matrix: MatrixDir, plans: Sequence[RunPlan]) -> list[RunPlan]:
    """Return those of these attempts whose runs had no job yet, and whose submission was not refused either."""
    shares, refused = newest_shares(matrix), given_up(JobsDir(matrix))
    return [one for one in plans if one.name not in shares or shares[one.name].submission in refused]


def _explain(plan: ResumePlan, new: Sequence[RunPlan], busy: Mapping[str, object]) -> None:
    for text in plan.rounds.decisions() if plan.rounds is not None else ():
        say(text)
    taken = {one.name for one in new} | busy.keys()
    if held := [one.name for one in plan.plans if one.name in plan.requests]:
        say(f"the verdict waits for {first_names(held)}: {plan.requests[held[0]].reason}")
    left = [one.name for one in plan.plans if one.name not in taken and one.name not in plan.requests]
    if left:
        say(f"the verdict waits for {first_names(left)}, interrupted or cancelled: `make continue` submits them again")
    if not plan.plans:
        say("the verdict needs no further seeds")


def _content(submission: SubmissionFile) -> str:
    runs = [run for share in submission.shares for run in share.runs]
    return f"{plural(len(runs), 'run')} ({first_names(runs)})" if runs else "the next seeds, or the report, after those"
