"""Follow the jobs of a matrix on a cluster until none is left: WAIT=1, and a preflight."""

from __future__ import annotations

import time
from collections import Counter

from kmatrix.cli.targets import ask
from kmatrix.records.jobs.files import REPORT, SchedulerPhase, read_submission
from kmatrix.records.jobs.paths import JobsDir, SubmissionDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.runner.loop import EXIT_FAILED, EXIT_STOPPED
from kmatrix.runner.rounds import unneeded_runs
from kmatrix.status.activity import Activity, MatrixActivity
from kmatrix.status.status_file import recover_status
from kmatrix.text import make_command, shown

FOLLOW_S = 2.0  # between two looks at the files of the runs
LIVE = (SchedulerPhase.PENDING, SchedulerPhase.RUNNING)


def follow(matrix: MatrixDir, *, report: bool = True) -> int:
    """Print each run that starts or ends until no job is left; return the exit status of the runs.

    Ctrl+C stops following, not the jobs.  report: wait for the job that writes the report, too.
    """
    print("following the jobs; Ctrl+C stops following them, and they go on", flush=True)
    try:
        known = watch(matrix)
        if report:
            _wait_for_report(matrix)
    except KeyboardInterrupt:
        print(f"\nstopped following; the jobs go on: {make_command('status', matrix.path)}")
        return EXIT_STOPPED
    reserve = unneeded_runs(matrix, {run.name: recover_status(run, has_runner=False) for run in matrix.runs()})
    counts = Counter(status for name, status in known.items() if name not in reserve)
    print(", ".join(f"{counts[status]} {status}" for status in Status if counts[status]))
    if counts[Status.FAILED]:
        return EXIT_FAILED
    return EXIT_STOPPED if counts[Status.STOPPED] or counts[Status.PLANNED] else 0


def _wait_for_report(matrix: MatrixDir) -> None:
    """Wait until the job of the newest report has ended, or the scheduler does not answer."""
    job, has_seeds = "", False
    while (poll := ask(matrix)) is not None and not poll.why_not:
        reports = [folder.share(0) for folder in JobsDir(matrix).submissions() if _is_report(folder)]
        view = poll.jobs.get(reports[-1].id) if reports else None
        newest = read_submission(SubmissionDir(reports[-1].folder.parent)) if reports else None
        has_seeds = newest is not None and newest.seeds  # then `watch` has waited for it
        if view is None or view.phase not in LIVE:
            break
        if not job:
            job = view.job
            print(f"job {job} writes the report", flush=True)
        time.sleep(FOLLOW_S)
    if (job or has_seeds) and matrix.summary.exists():
        print(f"report: {shown(matrix.summary)}")


def _is_report(folder: SubmissionDir) -> bool:
    submission = read_submission(folder)
    return submission is not None and submission.kind == REPORT


def watch(matrix: MatrixDir) -> dict[str, Status]:
    """Print each run that starts or ends until no job is left; return run -> status."""
    known: dict[str, Status] = {}
    while True:
        is_first = not known
        activity = MatrixActivity(matrix, ask(matrix))
        for run in matrix.runs():
            state = recover_status(run, has_runner=activity.has_runner(run.name))
            # At the first look, the end of an earlier attempt is not repeated: the next one may wait.
            if known.get(run.name, state.status) is not state.status or (is_first and state.status is Status.RUNNING):
                why = f": {state.reason}" if state.reason else ""
                print(f"{run.name}: {state.status}{why}", flush=True)
            known[run.name] = state.status
        if activity.activity is Activity.NONE:
            return known
        time.sleep(FOLLOW_S)
