"""The program of a job: python -m kmatrix.runner.share [--task N] MATRIX SUBMISSION."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kmatrix.engines.allocation import find_allocation, task_of
from kmatrix.errors import KmatrixError, LaunchError, is_full, path_problem, reason_of
from kmatrix.records.jobs.files import KUBERNETES, REPORT, read_engine, read_submission
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.share.folder import RunningShare
from kmatrix.runner.share.job import open_job
from kmatrix.runner.share.log import say
from kmatrix.runner.share.next_seeds import submit_next_seeds
from kmatrix.runner.share.report import wait_for_others, write_report

EXIT_REFUSED = 2
EXIT_NOT_SUBMITTED = 3  # the next seeds


def run_job(path: Path, number: int, task: int, environment: Mapping[str, str]) -> int:
    """Run the task of a submission; return the exit status of the job."""
    matrix = MatrixDir(path.resolve())
    folder = JobsDir(matrix).submission(number)
    engine, submission = read_engine(matrix), read_submission(folder)
    if engine is None or submission is None:
        missing = JobsDir(matrix).engine_json if engine is None else folder.submission_json
        raise LaunchError(
            f"{missing} is missing or damaged",
            why="this job was submitted for a matrix that was moved, deleted or damaged since",
            hint="make continue TARGET=<the matrix> submits its runs again",
        )
    if submission.kind == REPORT:
        if engine.engine == KUBERNETES:  # Slurm starts this job after the others
            wait_for_others(matrix, folder, submission)
        could_submit = not submission.seeds or submit_next_seeds(matrix, folder, submission)
        return write_report(matrix, folder) or (0 if could_submit else EXIT_NOT_SUBMITTED)
    names = next((entry.runs for entry in submission.shares if entry.task == task), ())
    share = RunningShare(matrix.path, number, task, names=names)
    allocation = find_allocation(engine.engine, environment, engine.settings)
    if (status := allocation.follow(share, names, say)) is not None:
        return status
    job = open_job(share, submission, allocation)
    job.signals.listen()
    return job.run()


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit status, 2 for an error that is not of a run."""
    parser = argparse.ArgumentParser(prog="python -m kmatrix.runner.share", description="Run a share of a matrix.")
    parser.add_argument("matrix", type=Path, help="the directory of the matrix")
    parser.add_argument("submission", type=int, help="number of the submission")
    parser.add_argument("--task", type=int, help="number of the share (default: that of the job, or 0)")
    arguments = parser.parse_args(argv)
    task = arguments.task
    if task is None:
        task = task_of(os.environ)
    try:
        return run_job(arguments.matrix, arguments.submission, task, os.environ)
    except KmatrixError as error:
        say(f"error: {error}")
        return EXIT_REFUSED
    except OSError as error:
        # The storage that the nodes share is full, or cannot be read or written by this one.
        why = f"{reason_of(error)}: {error.filename}" if is_full(error) else path_problem(error)
        if not why:
            raise
        say(f"error: {why}")
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
