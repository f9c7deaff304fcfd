"""Ask accounting what the jobs of a matrix were allocated, and keep its answer for the report."""

from __future__ import annotations

import time
from contextlib import suppress

from kmatrix.engines.base import Scheduler
from kmatrix.engines.polling import known_jobs
from kmatrix.engines.schedulers import find_scheduler
from kmatrix.errors import KmatrixError
from kmatrix.records.jobs.files import is_at_home, job_lines, read_engine
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.jobs.usage import keep_usage
from kmatrix.records.paths import MatrixDir


def refresh_usage(
    matrix: MatrixDir,
    *,
    scheduler: Scheduler | None = None,
) -> str:
    """Ask accounting for the hours of a matrix, and keep them; return why it does not answer, "" if it does.

    scheduler: as for `polling.refresh`. A matrix of this machine, and a copy, have nothing to ask for.
    Raises RecordError if engine.json is damaged.
    """
    engine, jobs = read_engine(matrix), JobsDir(matrix)
    if engine is None or not is_at_home(matrix, engine):
        return ""
    first = min((line.time for line in job_lines(jobs)), default=None)
    try:
        asked = scheduler or find_scheduler(engine.engine, engine.settings)
        wanted = known_jobs(matrix, engine, asked)
        since_s = 0.0 if first is None else max(0.0, time.time() - first)
        found = asked.usage(wanted, since_s=since_s) if wanted else {}
    except KmatrixError as error:
        return error.why or error.what
    with suppress(OSError):  # a matrix that this user may only read: the report counts on the files of the jobs
        keep_usage(jobs, found)
    return ""
