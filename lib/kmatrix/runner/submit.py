"""Hand the pending runs of a matrix to the scheduler of a cluster, so that no run ever has two jobs.

A submission is made in this order: its folder, complete as soon as it is listed; the line `intent`; the call of the
scheduler; the line `submitted`. A kill between two of them leaves a submission in doubt. The next command resolves it
before it does anything else: the scheduler knows the job by its label, or the runner in the job has left its claim, or
the submission is given up, and its runs get a new one. A runner that finds a newer submission of its runs leaves.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.engines.base import JobRules, Scheduler, UnreachableError
from kmatrix.engines.polling import known_jobs, own_views
from kmatrix.errors import KmatrixError, LaunchError, RecordError, reason_of
from kmatrix.own_file import opener
from kmatrix.records.decode import as_json, decode, replaced
from kmatrix.records.files import end_torn_line, json_text, write_bytes, write_json
from kmatrix.records.jobs.claim import FRESH_S, age_s, fresh_owner
from kmatrix.records.jobs.files import (
    CANCELLED,
    CANCELLING,
    INTENT,
    LIVE,
    REPORT,
    SUBMITTED,
    EngineFile,
    JobLine,
    JobView,
    PollFile,
    SchedulerPhase,
    SubmissionFile,
    SubmitterFile,
    append_job_line,
    given_up,
    job_label,
    job_lines,
    newest_shares,
    read_submission,
    read_submitter,
    submitted_jobs,
    write_engine,
)
from kmatrix.records.jobs.paths import JobsDir, SubmissionDir
from kmatrix.records.lock import try_lock
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.shares import report_submission, submissions_of
from kmatrix.status.activity import Activity, MatrixActivity, ShareState
from kmatrix.status.state import RunPlan
from kmatrix.text import first_names, make_command, shown

# Arguments of a command that also hold for the seeds that are submitted after its runs.
OF_FURTHER_SEEDS = frozenset({"TRACKER", "SIMULATE", "BUDGET_HOURS", "BUDGET_DOLLARS"})
LOCK_S = 60.0  # wait for a submitter, or for an sbatch that has outlived its own
WAIT_S = 0.1  # between two tries
MOST_LOST = 3  # submissions in a row without their folders that are looked for
PULSE_S = 5.0  # between two writes of .submitter.json
# The scheduler may still be creating the job of a submitter that was killed: it is asked a second time.
DOUBT_S = 3.0


class OtherSubmitterError(LaunchError):
    """Another process submits jobs of the matrix now, or did until its host failed just now."""


@dataclass(slots=True)
class Submitter:
    """The right of this process to submit jobs of a matrix. No other process has it meanwhile, on no host."""

    jobs: JobsDir
    entry: SubmitterFile
    _over: threading.Event = field(default_factory=threading.Event)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise OtherSubmitterError if another host submits now, because this process was suspended for too long."""
        found = read_submitter(self.jobs)
        if found is None or found.token != self.entry.token:
            raise OtherSubmitterError(
                f"another process submits the jobs of {self.jobs.matrix.name} now",
                why="this one was suspended",
                hint=f"see its jobs with {make_command('status', self.jobs.matrix.path)}",
            )

    def keep(self) -> None:
        """Rewrite .submitter.json until `end`, so that other hosts see that this process lives."""
        while not self._over.wait(PULSE_S):
            with suppress(OSError, LaunchError), self._writing:
                if self._over.is_set():  # it would come back after its removal, and keep other hosts waiting
                    return
                self.check()
                self.entry = replaced(self.entry, counter=self.entry.counter + 1)
                write_json(self.jobs.submitter, as_json(self.entry), durable=False)

    def end(self) -> None:
        """Stop rewriting the file, and remove it."""
        self._over.set()
        with suppress(OSError, LaunchError), self._writing:
            self.check()
            self.jobs.submitter.unlink()


@contextmanager
def submitting(matrix: MatrixDir, *, wait_s: float = LOCK_S) -> Iterator[Submitter]:
    """Return a context in which no other process submits jobs of a matrix.

    Raises OtherSubmitterError if another one does, or if an sbatch of an earlier one still waits for its answer.
    """
    jobs = JobsDir(matrix)
    try:
        jobs.path.mkdir(exist_ok=True)
    except FileExistsError:
        raise LaunchError(f"{jobs.path} is not a directory", hint="restore it from a copy") from None
    lock = _lock(jobs, wait_s)
    try:
        submitter = _take(jobs)
        threading.Thread(target=submitter.keep, daemon=True, name="submitter").start()
        # Its programs inherit the lock: after a kill of this process, it is free when the last of them has ended.
        os.set_inheritable(lock, True)
        try:
            end_torn_line(jobs.log)
            yield submitter
        finally:
            submitter.end()
    finally:
        os.close(lock)


def _lock(jobs: JobsDir, wait_s: float) -> int:
    deadline = time.monotonic() + wait_s
    while (lock := try_lock(jobs.lock)) is None:
        if time.monotonic() > deadline:
            raise _in_use(jobs)
        time.sleep(WAIT_S)
    return lock


def _take(jobs: JobsDir) -> Submitter:
    """Write .submitter.json, which the storage gives to one process also where two nodes hold the same lock."""
    entry = SubmitterFile(host=socket.gethostname(), pid=os.getpid(), token=os.urandom(8).hex())
    while True:
        try:
            _write_once(jobs.submitter, json_text(as_json(entry)).encode(), entry.token)
            return Submitter(jobs, entry)
        except FileExistsError:
            other = read_submitter(jobs)
        except OSError as error:
            raise LaunchError(
                f"cannot write {jobs.submitter}", why=reason_of(error), hint="check the permissions of that directory"
            ) from error
        # On this host the lock decides: whoever wrote the file was killed.
        age = age_s(jobs.submitter)
        if age is not None and age < FRESH_S and (other is None or other.host != entry.host):
            raise _in_use(jobs)
        # Of two that replace it at once, one finds nothing to rename.
        old = jobs.submitter.with_name(f"{jobs.submitter.name}.{entry.token}.old")
        with suppress(FileNotFoundError):
            jobs.submitter.rename(old)
            old.unlink()


def _write_once(path: Path, content: bytes, token: str) -> None:
    """Write a file that must not exist, complete or not at all. Raises FileExistsError if it does.

    token: random, for the name of the file before it is complete.
    """
    # By a link: a process that was killed between O_EXCL and its first byte would leave a file that names nobody.
    partial = path.with_name(f"{path.name}.{token}")
    try:
        with open(partial, "xb", opener=opener) as file:
            file.write(content)
        try:
            path.hardlink_to(partial)
        except FileExistsError:
            raise
        except OSError:  # storage without hard links
            with open(path, "xb", opener=opener) as file:
                file.write(content)
    finally:
        partial.unlink(missing_ok=True)


def _in_use(jobs: JobsDir) -> OtherSubmitterError:
    other = read_submitter(jobs)
    who = f"process {other.pid} on {other.host}" if other and other.pid else "another process"
    return OtherSubmitterError(
        f"jobs of {jobs.matrix.name} are being submitted by {who}",
        why="two submitters would submit each run twice",
        hint=f"wait for it; after a crash of that host, this ends within {FRESH_S:g} s",
    )


def resolve_doubts(
    submitter: Submitter, engine: EngineFile, scheduler: Scheduler, *, doubt_s: float = DOUBT_S
) -> dict[int, str]:
    """Find the jobs of submissions that an earlier command has left in doubt, and give the others up.

    Return submission -> job of those that were submitted.

    Scripts that the user may submit by hand have no `intent`: they stay as they are until a newer submission.
    Raises UnreachableError, before anything is changed, if the scheduler does not answer.
    """
    need_submissions(submitter.jobs, engine)
    _need_all_folders(submitter.jobs, engine, scheduler)
    jobs, lines = submitter.jobs, list(job_lines(submitter.jobs))
    # `stop` was killed before it had cancelled them: what still runs is to start again after its time limit.
    for line in {line.submission: line for line in lines}.values():
        if line.event == CANCELLING and line.job:
            _note(submitter, SUBMITTED, line.submission, job=line.job, why="make stop was interrupted")
    known = {line.submission for line in lines if line.event in (SUBMITTED, CANCELLED)}
    intended = {line.submission for line in lines if line.event == INTENT}
    doubtful = {
        job_label(engine.id, folder.number): folder for folder in jobs.submissions() if folder.number not in known
    }
    if not doubtful:
        return {}
    found = dict(scheduler.find(list(doubtful)))
    if any(label not in found and folder.number in intended for label, folder in doubtful.items()):
        time.sleep(doubt_s)
        found |= scheduler.find([label for label in doubtful if label not in found])
    resolved = {}
    for label, folder in doubtful.items():
        # The claim first: a script that was submitted twice by hand has two jobs, of which one trains.
        if job := _claimed_job(folder) or found.get(label):
            _note(submitter, SUBMITTED, folder.number, job=job)
            resolved[folder.number] = job
        elif folder.number in intended:
            _note(submitter, CANCELLED, folder.number, why="the command was interrupted before it was submitted")
    return resolved


def _claimed_job(folder: SubmissionDir) -> str:
    """Return the job whose runner has claimed a share of a submission, "" if none has."""
    submission = read_submission(folder) or SubmissionFile()
    for entry in submission.shares:
        if owner := fresh_owner(folder.share(entry.task)):
            return owner.job.rpartition("_")[0] if len(submission.shares) > 1 else owner.job
    return ""


def need_submissions(jobs: JobsDir, engine: EngineFile) -> None:
    """Raise LaunchError if a submission.json is missing, damaged or of another matrix: what its job trains is unknown.

    engine: engine.json of the matrix.
    """
    for folder in jobs.submissions():
        try:
            found = decode(folder.submission_json, SubmissionFile)
            if not found.shares:
                raise RecordError(f"{folder.submission_json} is damaged: it has no shares")
            if found.label not in ("", job_label(engine.id, folder.number)):
                raise RecordError(f"{folder.submission_json} is of another matrix")
        except RecordError as error:
            job = submitted_jobs(jobs).get(folder.number, "")
            raise LaunchError(
                error.what,
                why=f"which runs job {job} trains is unknown" if job else "which runs its job trains is unknown",
                hint=f"restore it from a copy; or, after that job was cancelled, remove {shown(folder.path)}",
            ) from None


def _need_all_folders(jobs: JobsDir, engine: EngineFile, scheduler: Scheduler) -> None:
    """Raise LaunchError if the scheduler has a job of a submission without a folder, or of one of the next numbers.

    Its folder was removed: its runs would be submitted again, and nothing would distinguish the new job from it.
    """
    listed = {folder.number for folder in jobs.submissions()}
    noted = {line.submission: line.event for line in job_lines(jobs)}
    lost = [number for number, event in noted.items() if number not in listed and event != CANCELLED]
    newest = max(listed, default=0)
    numbers = [*lost, *range(newest + 1, newest + 1 + MOST_LOST)]
    if found := scheduler.find([job_label(engine.id, number) for number in numbers]):
        raise LaunchError(
            f"{shown(jobs.path)} has no folder for {first_names(found.values())}",
            why="it was removed, so which runs the job trains is unknown",
            hint=f"restore it from a copy, or cancel the job, and wait until {scheduler.name} has forgotten it",
        )


def occupied_runs(
    matrix: MatrixDir, engine: EngineFile, scheduler: Scheduler, names: Collection[str]
) -> Mapping[str, JobView]:
    """Return run -> view of its job, of those of these runs whose newest job is pending or running, or may be.

    `MatrixActivity` decides, by an answer that is asked for here.
    Raises UnreachableError if the scheduler does not answer: then nothing is known of any.
    Raises LaunchError if a submission.json is missing or damaged.
    """
    need_submissions(JobsDir(matrix), engine)
    none = given_up(JobsDir(matrix))
    known = known_jobs(matrix, engine, scheduler).items()
    jobs = {share: job for share, job in known if int(share.partition(".")[0]) not in none}
    views = own_views(scheduler, engine, jobs)
    activity = MatrixActivity(matrix, PollFile(jobs=views), is_new=True)
    # A script that was submitted twice by hand has two jobs: the one that was not asked for may have the claim.
    claims = {state.share.id: state.owner.job for state in activity.shares() if state.share and state.owner}
    if others := {share: job for share, job in claims.items() if _is_over(views.get(share), besides=job)}:
        activity.refresh(PollFile(jobs=views | own_views(scheduler, engine, others)), is_new=True)
    wanted = frozenset(names)  # of thousands
    states = {run: activity.of(run) for run in newest_shares(matrix) if run in wanted}
    return {run: _job_of(state) for run, state in states.items() if state.activity is not Activity.NONE}


def _is_over(view: JobView | None, *, besides: str) -> bool:
    """Return whether the scheduler has no live job of a share, as far as it was asked. besides: a job."""
    return view is None or (view.phase not in LIVE and view.job != besides)


def _job_of(state: ShareState) -> JobView:
    """Return the job of a share that is not over: the scheduler's view of it, or what its claim tells."""
    if state.view is not None and state.view.phase in LIVE:
        return state.view
    phase = SchedulerPhase.PENDING if state.activity is Activity.QUEUED else SchedulerPhase.RUNNING
    job = state.owner.job if state.owner else state.view.job if state.view else ""
    return JobView(job=job, phase=phase, state="claimed")


def refuse_submissions(scheduler: Scheduler, submissions: Sequence[SubmissionFile]) -> None:
    """Raise LaunchError if the scheduler has no place for one of these submissions."""
    if problems := scheduler.check(submissions):
        raise LaunchError(f"{scheduler.name} cannot run this: {problems[0]}", why="; ".join(problems[1:]))


def submit_plans(
    submitter: Submitter,
    engine: EngineFile,
    scheduler: Scheduler,
    plans: Sequence[RunPlan],
    *,
    is_busy: bool,
    seeds: bool,
    arguments: Mapping[str, str],
    site: Mapping[str, str],
    on_submitted: Callable[[int, SubmissionFile, str], object] = lambda *_: None,
) -> None:
    """Submit these attempts, none of which has a job, and the report after all jobs of the matrix.

    is_busy: other runs have jobs.  seeds: the matrix has adaptive seeds.  arguments: of the command.
    site: settings that come from the environment of the user, which a job does not have.
    Raises LaunchError if the scheduler refuses one; those before it stay submitted.
    """
    rules = scheduler.rules() if plans or is_busy else JobRules()
    submissions = [replaced(one, arguments=dict(arguments)) for one in submissions_of(plans, rules)]
    if submissions:
        refuse_submissions(scheduler, submissions)
    write_engine(submitter.jobs.matrix, engine)
    # The report is one of a command that was interrupted, too.
    last = bool(submissions) or (is_busy and not has_report(submitter.jobs, engine, scheduler))
    further = {**site, **{name: text for name, text in arguments.items() if name in OF_FURTHER_SEEDS}}
    report = report_submission(rules, seeds=seeds, arguments=further if seeds else {}) if last else None
    hand_over(submitter, engine, scheduler, submissions, report=report, on_submitted=on_submitted)


def hand_over(
    submitter: Submitter,
    engine: EngineFile,
    scheduler: Scheduler,
    submissions: Sequence[SubmissionFile],
    *,
    report: SubmissionFile | None = None,
    on_submitted: Callable[[int, SubmissionFile, str], object] = lambda *_: None,
) -> dict[int, str]:
    """Submit these shares, and the report after all jobs of the matrix. Return submission -> job id.

    on_submitted: called after each, with its number and its job.
    Raises LaunchError if the scheduler refuses one; those before it stay submitted.
    """
    made: dict[int, str] = {}
    for submission in [*submissions, *([report] if report else [])]:
        known = submitted_jobs(submitter.jobs)
        if submission.kind == REPORT:  # after those of earlier commands, too: a job that has ended delays nothing
            submission = replaced(submission, after=_of_runs(submitter.jobs, known))  # noqa: PLW2901
        folder, written = prepare(submitter, engine, scheduler, submission)
        job = _submit(submitter, scheduler, folder, written, [known[number] for number in written.after])
        made[folder.number] = job
        on_submitted(folder.number, written, job)
    return made


def has_report(jobs: JobsDir, engine: EngineFile, scheduler: Scheduler) -> bool:
    """Return whether a job waits to write the report after all others that were submitted so far."""
    known = submitted_jobs(jobs)
    newest = max(_of_runs(jobs, known), default=0)
    waiting = {f"{number}.0": job for number, job in known.items() if number > newest}
    return any(view.phase in LIVE for view in own_views(scheduler, engine, waiting).values())


def _of_runs(jobs: JobsDir, known: Collection[int]) -> tuple[int, ...]:
    """Return the submissions among these that are not reports."""
    found = ((number, read_submission(jobs.submission(number))) for number in sorted(known))
    return tuple(number for number, submission in found if submission and submission.kind != REPORT)


def prepare(
    submitter: Submitter, engine: EngineFile, scheduler: Scheduler, submission: SubmissionFile
) -> tuple[SubmissionDir, SubmissionFile]:
    """Write the folder of a new submission with its script, and return both. It is complete, or not listed."""
    submitter.check()
    jobs = submitter.jobs
    number = max((folder.number for folder in jobs.submissions()), default=0) + 1
    folder = jobs.submission(number)
    submission = replaced(submission, label=job_label(engine.id, number))
    staged = SubmissionDir(folder.path.with_name(f".{folder.path.name}.new"))
    shutil.rmtree(staged.path, ignore_errors=True)  # of a process that was killed here
    staged.path.mkdir()
    for entry in submission.shares:  # the scheduler writes the output of a job into its folder, and does not make it
        os.mkdir(staged.path / str(entry.task))  # noqa: PTH102  (10,000 of them)
    for name, text in scheduler.render(folder, submission).items():
        write_bytes(staged.path / name, text.encode())
    write_json(staged.submission_json, as_json(submission))
    staged.path.rename(folder.path)
    return folder, submission


def _submit(
    submitter: Submitter,
    scheduler: Scheduler,
    folder: SubmissionDir,
    submission: SubmissionFile,
    after: Sequence[str],
) -> str:
    """Submit one submission, and note its job."""
    _note(submitter, INTENT, folder.number)
    try:
        job = scheduler.submit(folder, submission, after)
    except UnreachableError:  # in doubt: it may have been received
        raise
    except LaunchError as error:
        _note(submitter, CANCELLED, folder.number, why=error.what)
        raise
    _note(submitter, SUBMITTED, folder.number, job=job)
    return job


def cancel_jobs(submitter: Submitter, scheduler: Scheduler, jobs: Mapping[str, str], why: str) -> None:
    """Cancel jobs for the user. jobs: share id -> job, all that run or wait of their submissions.

    Noted before, too: a runner that is signalled looks whether its user has done it.
    Raises UnreachableError if the scheduler does not answer, and LaunchError if it refuses.
    """
    # The ids of arrays, also of scripts that were submitted by hand, whose ids are not noted.
    ids = {int(share.partition(".")[0]): job.partition("_")[0] for share, job in sorted(jobs.items())}
    numbers, known = sorted(ids), submitted_jobs(submitter.jobs)
    for number in numbers:
        _note(submitter, CANCELLING, number, job=ids[number], why=why)
    try:
        scheduler.cancel(list(jobs.values()))
    except KmatrixError as error:
        for number in numbers:  # the last line counts
            _note(submitter, SUBMITTED if number in known else INTENT, number, job=known.get(number), why=error.what)
        raise
    for number in numbers:
        _note(submitter, CANCELLED, number, job=ids[number], why=why)


def _note(submitter: Submitter, event: str, number: int, *, job: str | None = None, why: str | None = None) -> None:
    append_job_line(submitter.jobs, JobLine(event=event, submission=number, time=time.time(), job=job, why=why))
