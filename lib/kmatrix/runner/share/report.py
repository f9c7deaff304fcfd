"""The job after all others: it writes the report of the matrix, and runs the user's ON_FINISH command."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

from kmatrix.errors import KmatrixError
from kmatrix.records.files import write_json
from kmatrix.records.jobs.claim import fresh_owner, is_claimed, is_listed
from kmatrix.records.jobs.files import (
    CANCELLED,
    HAVE_ENDED,
    REPORT,
    SubmissionFile,
    job_lines,
    newest_shares,
    read_poll,
    read_share_end,
    read_submission,
)
from kmatrix.records.jobs.paths import JobsDir, ShareDir, SubmissionDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.states import read_matrix_status
from kmatrix.runner.execute import finish, symbols
from kmatrix.runner.rounds import unneeded_runs
from kmatrix.runner.share.log import say
from kmatrix.status.state import overall
from kmatrix.status.status_file import recover_status, writing
from kmatrix.text import plural

EXIT_NO_REPORT = 1


def write_report(matrix: MatrixDir, folder: SubmissionDir) -> int:
    """Write the status and the report of a matrix whose jobs have ended; return the exit status."""
    if (later := _later(JobsDir(matrix), folder.number)) is not None:
        say(f"submission {later} is newer: its own last job writes the report")
        return 0
    write_status(matrix)
    values, code = symbols(matrix), 0
    try:
        # Here, not at the top: 70 ms that each of the other jobs would wait, too.
        from kmatrix.report.analysis import analyse
        from kmatrix.report.write import draw_graphs, write_page, write_summary

        numbers = analyse(matrix)
        if values.get("AUTO_GENERATE_GRAPHS") == "y":
            draw_graphs(numbers)
        page = write_page(numbers)
        write_summary(numbers)
        say(f"wrote {page} and {matrix.summary.name}")
    except KmatrixError as error:
        say(f"error: {error}")
        code = EXIT_NO_REPORT
    command = str(values.get("ON_FINISH") or "")
    if why := finish(matrix, command):
        say(f"note: {why}")
    return code


def _later(jobs: JobsDir, number: int) -> int | None:
    """Return the newest submission if runs were submitted after this one, so that another report follows."""
    given_up = {line.submission for line in job_lines(jobs) if line.event == CANCELLED}  # no job, so no last one either
    later = [other for other in jobs.submissions() if other.number > number and other.number not in given_up]
    has_runs = any(found is not None and found.kind != REPORT for found in map(read_submission, later))
    return later[-1].number if has_runs else None


def wait_for_others(
    matrix: MatrixDir, folder: SubmissionDir, submission: SubmissionFile, *, poll_s: float = 0.0
) -> None:
    """Wait until the jobs before a report have ended by their files, where a scheduler has no order among jobs.

    A Job that was deleted, or whose pods were killed too often, leaves no file about its end. Then the last answer of
    the scheduler counts, which any command of the user has left in poll.json; or a later report.
    folder: of the report.  poll_s: time (s) between two looks; by default it grows with the number of shares.
    """
    jobs = JobsDir(matrix)
    left = [
        jobs.submission(number).share(entry.task)
        for number in submission.after
        for entry in (read_submission(jobs.submission(number)) or SubmissionFile()).shares
    ]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # process 1 of a pod ignores it otherwise
    newest = {share.id for share in newest_shares(matrix).values()}
    say(f"waits for {plural(len(left), 'share')}")
    while True:
        cancelled = {line.submission for line in job_lines(jobs) if line.event == CANCELLED}
        # A share whose runs have a newer one, or whose job was cancelled, is over unless its runner still saves.
        gone = _gone(jobs) | {share.id for share in left if share.id not in newest or share.submission in cancelled}
        left = [share for share in left if not _has_ended(share) and not (share.id in gone and _is_idle(share))]
        if not left or _later(jobs, folder.number) is not None:
            return
        time.sleep(poll_s or min(60.0, 2.0 + 0.1 * len(left)))


def _gone(jobs: JobsDir) -> set[str]:
    """Return the ids of the shares whose jobs have ended, or are gone, by the last answer of the scheduler."""
    poll = read_poll(jobs) if is_listed(jobs.poll) else None
    return {share for share, view in poll.jobs.items() if view.phase in HAVE_ENDED} if poll else set()


def _is_idle(share: ShareDir) -> bool:
    """Return whether no runner rewrites the claim of a share: the answer may be older than its job."""
    end, owner = read_share_end(share), fresh_owner(share)
    is_over = end is not None and owner is not None and (end.job, end.restart) == (owner.job, owner.restart)
    return is_over or not is_claimed(share)


def _has_ended(share: ShareDir) -> bool:
    """Return whether the last start of a share has ended, and no further one follows."""
    end = read_share_end(share) if is_listed(share.end) else None
    owner = fresh_owner(share)
    return end is not None and not end.requeued and (owner is None or end.restart >= owner.restart)


def write_status(matrix: MatrixDir) -> None:
    """Write status.json of a matrix whose jobs have ended, from the states of its runs."""
    known = {run.name: recover_status(run, has_runner=False) for run in matrix.runs()}
    states, missing = list(known.values()), [Status.PLANNED] * len(matrix.missing())
    counts = Counter([*(state.status for state in states), *missing])
    reserve = unneeded_runs(matrix, known)
    status = overall([*(state.status for name, state in known.items() if name not in reserve), *missing])
    now, former = time.time(), read_matrix_status(matrix)
    # Each by the clock of its host: as good as those of a cluster agree.
    begun = [state.attempts[0].started for state in states if state.attempts and state.attempts[0].started is not None]
    record = {"status": status, "started": former.started or min([*begun, now]), "ended": now}
    record |= {"counts": {status.value: counts[status] for status in Status if counts[status]}, "gpus": []}
    with writing(matrix.status):
        write_json(matrix.status, record)
    say(", ".join(f"{number} {status}" for status, number in counts.items() if number))
