"""Other jobs that may have the runs of a share: of a newer submission, or with a claim that is still rewritten."""

from __future__ import annotations

import time
from collections.abc import Callable

from kmatrix.engines.allocation import Allocation
from kmatrix.records.jobs.claim import FRESH_S, PULSE_S, age_s, fresh_owner, is_listed
from kmatrix.records.jobs.files import (
    ShareOwner,
    SubmissionFile,
    is_cancelled,
    is_end_of,
    newest_shares,
    read_share_end,
    read_submission,
)
from kmatrix.records.jobs.paths import JobsDir, ShareDir
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.share.folder import RunningShare
from kmatrix.runner.share.log import say
from kmatrix.text import first_names

# A runner that lives rewrites its claim within this time, or sees a later one and leaves. It may live without its job:
# Slurm gives a job up, and starts it again, when the daemon of its batch script was killed.
LEAVE_S = PULSE_S + 2.0
LOOK_S = 1.0  # between two looks at a claim or a lock


def own_part(share: RunningShare) -> RunningShare:
    """Return the share with those of its runs that no newer submission lists; none if all have a newer one."""
    newest = newest_shares(MatrixDir(share.path))
    ours = tuple(name for name in share.names if newest.get(name, share).id == share.id)
    if ours and len(ours) < len(share.names):
        say(f"left to later submissions: {first_names([name for name in share.names if name not in ours])}")
    return RunningShare(share.path, share.submission, share.task, names=ours)


def has_been_cancelled(share: RunningShare, allocation: Allocation) -> bool:
    """Return whether the user's command has ended this job, or has given it up before it appeared."""
    jobs = JobsDir(MatrixDir(share.path))
    return is_listed(jobs.log) and is_cancelled(jobs, share.submission, allocation.job)


def newer_submission(share: RunningShare) -> str:
    """Return which submission has a run of this share now, "" for none."""
    newest = newest_shares(MatrixDir(share.path))
    newer = [found for name in share.names if (found := newest.get(name, share)).id != share.id]
    return f"submission {newer[0].submission} has its runs now" if newer else ""


def other_runner(share: RunningShare, allocation: Allocation, is_stopped: Callable[[], bool]) -> str:
    """Return which other runner has the share or its runs now, "" for none.

    A claim that is not rewritten is waited out, for at most FRESH_S, or LEAVE_S if the scheduler knows that its job has
    ended. is_stopped: this job is to end.
    """
    claims = (share, *_older_shares(share))
    return next((why for one in claims if (why := _runner_of(one, allocation, is_stopped))), "")


def let_former_leave(share: RunningShare, former: ShareOwner, is_stopped: Callable[[], bool]) -> None:
    """Wait until the former start of this job has seen the claim of this one: without a recorded end, it may live."""
    if has_ended(share, former):
        return
    say(f"start {former.restart + 1} of this job on {former.host} recorded no end: waiting until it is gone")
    began = time.monotonic()
    # On another host, its lock is not seen.
    while not is_stopped() and (time.monotonic() < began + LEAVE_S or share.is_held()):
        if time.monotonic() > began + 2 * LEAVE_S:
            return
        time.sleep(min(LOOK_S, LEAVE_S))


def former_claim(share: RunningShare) -> ShareOwner | None:
    """Return the last claim on the runs of a share, also of a job of an earlier submission; None without one."""
    found = (fresh_owner(one) for one in (share, *reversed(_older_shares(share))))
    return next((owner for owner in found if owner is not None), None)


def _older_shares(share: RunningShare) -> list[ShareDir]:
    """Return the shares of earlier submissions that have runs of this one, and were claimed.

    The job of a submission that was given up, because nobody knew it, may have started nevertheless.
    """
    names, found = set(share.names), []
    for folder in JobsDir(MatrixDir(share.path)).submissions():
        if folder.number < share.submission:
            submission = read_submission(folder) or SubmissionFile()
            found += [folder.share(entry.task) for entry in submission.shares if names & set(entry.runs)]
    return [one for one in found if is_listed(one.owner)]


def _runner_of(share: ShareDir, allocation: Allocation, is_stopped: Callable[[], bool]) -> str:
    """Return which other runner has one share now, "" for none."""
    first = fresh_owner(share)
    if first is None:
        return ""
    if first.job == allocation.job:
        newer = first.restart > allocation.restart
        return f"start {first.restart + 1} of this job has the share" if newer else ""
    age = age_s(share.owner)
    began, said = time.monotonic(), False
    deadline = began + max(0.0, FRESH_S - (age or 0.0))
    while time.monotonic() < deadline and not is_stopped() and not has_ended(share, first):
        if time.monotonic() >= began + LEAVE_S and allocation.is_over(first.job, first.nodes or (first.host,)):
            return ""
        if not said:
            say(f"job {first.job} had the share {age or 0.0:.0f} s ago and has no end: waiting for a sign of life")
            said = True
        time.sleep(min(LEAVE_S, max(0.1, deadline - time.monotonic())))
        now = fresh_owner(share)
        if now is not None and now != first and not has_ended(share, now):
            return f"job {now.job} on {now.host} runs the share"
    return "stopped while it waited for another job" if is_stopped() else ""


def has_ended(share: ShareDir, owner: ShareOwner) -> bool:
    """Return whether the start of a job that claimed a share has recorded its end."""
    return is_end_of(read_share_end(share) if is_listed(share.end) else None, owner)
