"""Ask the scheduler for the jobs of a matrix, at most once in ten seconds for all processes, and keep its answer.

The answer is poll.json, which every command reads (`kmatrix.status.activity`). No answer is recorded as well: the
older answer stays, with the reason, because jobs do not end when their scheduler cannot be asked.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from kmatrix.engines.base import Scheduler, UnreachableError
from kmatrix.engines.schedulers import OWN_JOBS_ONLY, find_scheduler
from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.records.decode import replaced
from kmatrix.records.jobs.claim import age_s
from kmatrix.records.jobs.files import (
    HAVE_ENDED,
    EngineFile,
    JobView,
    PollFile,
    SchedulerPhase,
    SubmissionFile,
    is_at_home,
    job_label,
    other_submitter,
    read_engine,
    read_poll,
    read_submission,
    share_job,
    submitted_jobs,
    write_poll,
)
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.lock import try_lock
from kmatrix.records.paths import MatrixDir

EVERY_S = 10.0  # between two questions
WAIT_S = 30.0  # for another process that is asking now
TRY_S = 0.1  # between two tries


def refresh(
    matrix: MatrixDir,
    *,
    scheduler: Scheduler | None = None,
    now: bool = False,
) -> PollFile | None:
    """Return the newest answer of the scheduler about a matrix; None for a matrix of this machine, or a copy.

    scheduler: of the matrix; by default as engine.json says.  now: ask, however new the last answer is.
    Without `now`, jobs that had all ended by the last answer are not asked for again.
    Without an answer, `why_not` of the result is set, and the older jobs stay.
    Raises RecordError if engine.json is damaged.
    """
    engine, jobs = read_engine(matrix), JobsDir(matrix)
    if engine is None or not is_at_home(matrix, engine):
        return None
    if not now and (known := _recent(jobs)) is not None:
        return known
    if engine.engine in OWN_JOBS_ONLY and (user := other_submitter(matrix)):
        # Not written: it says nothing about the jobs, and the user whose jobs they are can ask.
        known = read_poll(jobs) or PollFile()
        return PollFile(jobs=known.jobs, why_not=f"it shows you only your own jobs, and these are those of {user}")
    lock = _lock(jobs)
    try:
        # Another process may have asked while this one waited.
        if not now and (known := _recent(jobs)) is not None:
            return known
        found = _ask(matrix, engine, lambda: scheduler or find_scheduler(engine.engine, engine.settings))
        with suppress(OSError):  # a matrix that this user may only read: the answer serves this command alone
            write_poll(jobs, found)
        return found
    finally:
        if lock is not None:
            os.close(lock)


class Asking:
    """Ask in the background, for a display that must not wait for a scheduler that does not answer."""

    def __init__(self, ask: Callable[[], PollFile | None]) -> None:
        """Ask a first time, and wait for the answer. ask: returns it, None for a matrix of this machine."""
        self._ask, self._newest, self._over = ask, ask(), threading.Event()
        if self._newest is not None:
            threading.Thread(target=self._keep, daemon=True, name="asking").start()

    def newest(self) -> PollFile | None:
        """Return the newest answer, None for a matrix of this machine."""
        return self._newest

    def end(self) -> None:
        """Stop asking."""
        self._over.set()

    def _keep(self) -> None:
        while not self._over.wait(EVERY_S):
            with suppress(KmatrixError, OSError):  # OSError: storage that does not answer for a while
                self._newest = self._ask()


def known_jobs(matrix: MatrixDir, engine: EngineFile, scheduler: Scheduler) -> dict[str, str]:
    """Return share id -> job, with the task of an array, of all shares that the scheduler has got.

    Also those whose submitter was killed before it had noted the job, and of scripts that the user has submitted.
    engine: engine.json of the matrix.  Raises UnreachableError without an answer.
    """
    jobs = JobsDir(matrix)
    noted, found = submitted_jobs(jobs), dict[str, str]()
    unnoted: dict[str, tuple[int, SubmissionFile]] = {}  # label -> number and submission
    for folder in jobs.submissions():
        submission = read_submission(folder)
        if submission is None:
            continue
        if job := noted.get(folder.number):
            found |= _tasks(folder.number, submission, job)
        else:
            unnoted[job_label(engine.id, folder.number)] = (folder.number, submission)
    for label, job in scheduler.find(list(unnoted)).items() if unnoted else ():
        found |= _tasks(*unnoted[label], job)
    return found


def own_views(scheduler: Scheduler, engine: EngineFile, jobs: Mapping[str, str]) -> dict[str, JobView]:
    """Return share id -> view of its job, of jobs with the label of this matrix; other jobs count as forgotten.

    The ids come from files, which may be damaged or somebody else's, and a scheduler uses its numbers again.
    jobs: share id -> job.  Raises UnreachableError without an answer.
    """
    found = {}
    for share, view in (scheduler.poll(jobs) if jobs else {}).items():
        if view.label in ("", job_label(engine.id, int(share.partition(".")[0]))):
            found[share] = replaced(view, label="") if view.label else view
        else:
            why = f"{scheduler.name} has another job with this id"
            found[share] = JobView(job=view.job, phase=SchedulerPhase.UNKNOWN, reason=why)
    return found


def _tasks(number: int, submission: SubmissionFile, job: str) -> dict[str, str]:
    return {f"{number}.{share.task}": share_job(job, submission, share.task) for share in submission.shares}


def _ask(matrix: MatrixDir, engine: EngineFile, find: Callable[[], Scheduler]) -> PollFile:
    """Return the scheduler's view of all jobs of a matrix; its older view, and the reason, if it does not answer."""
    known = read_poll(JobsDir(matrix)) or PollFile()
    try:
        scheduler = find()
        views = own_views(scheduler, engine, known_jobs(matrix, engine, scheduler))
        return PollFile(jobs={share: _with_reason(view, known.jobs.get(share)) for share, view in views.items()})
    except KmatrixError as error:  # it does not answer, or its client is not installed here
        return PollFile(jobs=known.jobs, why_not=_why_not(error))


def _with_reason(view: JobView, former: JobView | None) -> JobView:
    """Return the view of a job; of one that the scheduler has forgotten, with the reason of its end from before."""
    if view.phase is not SchedulerPhase.UNKNOWN or former is None or former.phase not in HAVE_ENDED:
        return view
    return replaced(view, reason=former.reason or view.reason, before=former.before)


def _why_not(error: KmatrixError) -> str:
    """Return why there is no answer, with what to do about it, such as to log in again."""
    if isinstance(error, UnreachableError):
        return error.why or error.what
    return ": ".join(filter(None, (error.what, error.why))) + (f" ({error.hint})" if error.hint else "")


def _recent(jobs: JobsDir) -> PollFile | None:
    """Return the last answer if it is new enough, or final; else None."""
    known = read_poll(jobs)
    if known is None:
        return None
    # Final only as long as nothing was submitted since: another submission has shares that the answer does not list.
    if not known.why_not and known.jobs and all(view.phase in HAVE_ENDED for view in known.jobs.values()):
        listed = {int(share.partition(".")[0]) for share in known.jobs}
        if {folder.number for folder in jobs.submissions()} <= listed:
            return known
    age = age_s(jobs.poll)
    return known if age is not None and age < EVERY_S else None


def _lock(jobs: JobsDir) -> int | None:
    """Return the lock of those who ask on this machine; None if it cannot be had, which only costs a question more."""
    deadline = time.monotonic() + WAIT_S
    try:
        while (lock := try_lock(jobs.poll_lock)) is None and time.monotonic() < deadline:
            time.sleep(TRY_S)
    except LaunchError:  # a folder that this user may only read, or storage without locks
        return None
    return lock
