"""Is this matrix being run, is this run? The one owner of these questions, for this machine and for clusters.

On one machine, the kernel's lock on the matrix decides. On a cluster, locks and names lie: two nodes may hold the same
lock, and a file may look as it did half a minute ago. There, each run belongs to a share of the newest submission that
lists it, and three witnesses are heard: the scheduler (its last answer is poll.json), the claim of the runner in the
job, which is rewritten every few seconds, and the file in which that runner recorded its end. docs/status.md has the
rules as a table. The clocks of two hosts are never compared: ages are those of files on the same storage.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kmatrix.own_file import open_to_read
from kmatrix.records.jobs.claim import FRESH_S, storage_time
from kmatrix.records.jobs.files import (
    CANCELLED,
    CANCELLING,
    INTENT,
    SLURM,
    SUBMITTED,
    TITLES,
    EngineFile,
    JobView,
    PollFile,
    SchedulerPhase,
    ShareEnd,
    ShareOwner,
    SubmissionFile,
    is_at_home,
    is_copy,
    is_end_of,
    job_lines,
    read_engine,
    read_node,
    read_node_end,
    read_poll,
    read_share_end,
    read_share_owner,
    read_submission,
)
from kmatrix.records.jobs.paths import JobsDir, ShareDir, nodes_of
from kmatrix.records.paths import MatrixDir, RunDir

TRUST_S = 60.0  # an older answer of the scheduler does not count: nobody has asked lately
# Without a sign of life for so long, a node is named: files are written every 10 s, and caches of network storage may
# show them as they were 30 s ago.
QUIET_S = 45.0


class Activity(StrEnum):
    """Whether something is being run."""

    NONE = "none"  # nothing runs, and nothing will start by itself
    QUEUED = "queued"  # a job waits for its start, or for its next one
    RUNNING = "running"
    UNKNOWN = "unknown"  # the scheduler does not answer, and no runner has shown a sign of life lately


class Handover(StrEnum):
    """What the log of the submitter says about a share."""

    NO = "no"  # made, and not submitted
    INTENT = "intent"  # its submitter was killed, perhaps before sbatch
    YES = "submitted"
    CANCELLED = "cancelled"
    COPIED = "copied"  # by the matrix that this one is a copy of, which is still there
    ELSEWHERE = "elsewhere"  # for another path: the matrix was moved, or its original cannot be seen from here


class Trace(StrEnum):
    """What the files of a share say about the newest start of its job."""

    NOTHING = "nothing"  # it never started, or its claim is old and has no end: killed
    CLAIM = "claim"  # a runner rewrites its claim
    OVER = "over"  # the runner has recorded its end
    REQUEUED = "requeued"  # the same, and that the job starts again


OF_TRACE = {Trace.CLAIM: Activity.RUNNING, Trace.OVER: Activity.NONE, Trace.REQUEUED: Activity.QUEUED}
OF_PHASE = {
    SchedulerPhase.PENDING: Activity.QUEUED,
    SchedulerPhase.RUNNING: Activity.RUNNING,  # also while it starts, before its claim, and while it ends
    SchedulerPhase.ENDED: Activity.NONE,
    SchedulerPhase.UNKNOWN: Activity.NONE,
}


def share_activity(
    handover: Handover, scheduler: SchedulerPhase | None, trace: Trace, *, answers: bool, newer: bool
) -> Activity:
    """Return the activity of a share.

    scheduler: its view of the job in its last answer, None if the job is not in it.  answers: it has answered lately.
    newer: the files of the share are newer than the answer.
    """
    if handover is Handover.COPIED:  # jobs of the original, and so are the claims
        return Activity.NONE
    if handover is Handover.ELSEWHERE:  # a runner that writes here is one all the same
        return Activity.RUNNING if trace is Trace.CLAIM else Activity.NONE
    if trace is not Trace.NOTHING and (newer or scheduler is None or not answers):
        return OF_TRACE[trace]
    if not answers:
        # A script that the user has submitted is in no log: an earlier answer knew its job.
        unknown = handover in HANDED_OVER or (handover is Handover.NO and scheduler is not None)
        return Activity.UNKNOWN if unknown and scheduler is not SchedulerPhase.ENDED else Activity.NONE
    if scheduler is None:  # submitted after the answer
        return Activity.QUEUED if handover is Handover.YES else Activity.NONE
    # It has forgotten a job that has ended; a claim that is rewritten, or a new start to come, knows better.
    is_alive = scheduler is SchedulerPhase.UNKNOWN and trace in (Trace.CLAIM, Trace.REQUEUED)
    return OF_TRACE[trace] if is_alive else OF_PHASE[scheduler]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareState:
    """The activity of a share, and what is known about its job."""

    activity: Activity
    handover: Handover
    share: ShareDir | None = None  # None: no submission lists the run, or the matrix is of this machine
    view: JobView | None = None  # the scheduler's, None if unknown
    owner: ShareOwner | None = None
    end: ShareEnd | None = None  # of the newest start of its job, None while it runs
    quiet_s: float | None = None  # since the runner rewrote its claim; None without one

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of its job, the runner's first; empty if it does not run."""
        if self.activity not in (Activity.RUNNING, Activity.UNKNOWN):
            return ()
        if self.owner is not None and (self.owner.nodes or self.owner.host):
            return self.owner.nodes or (self.owner.host,)
        return self.view.nodes if self.view else ()


NOBODY = ShareState(activity=Activity.NONE, handover=Handover.NO)
HERE = ShareState(activity=Activity.RUNNING, handover=Handover.NO)  # by a runner on this machine
MAY_RUN = (Activity.RUNNING, Activity.UNKNOWN)
STRONGEST = (Activity.RUNNING, Activity.UNKNOWN, Activity.QUEUED)  # what decides for a matrix
HANDED_OVER = (Handover.YES, Handover.INTENT)
HANDOVERS = {
    INTENT: Handover.INTENT,
    SUBMITTED: Handover.YES,
    CANCELLING: Handover.YES,
    CANCELLED: Handover.CANCELLED,
}  # of events
OWNER, END = "owner.json", "end.json"  # names of ShareDir.owner and ShareDir.end
NOT_ASKED = "it was not asked lately"


class MatrixActivity:
    """The activity of a matrix and of its runs. Create it, `refresh` it before each further look, and ask it."""

    def __init__(self, matrix: MatrixDir, poll: PollFile | None = None, *, is_new: bool = False) -> None:
        """Read it. poll, is_new: as in `refresh`. Raises RecordError if engine.json is damaged."""
        self._matrix, self._jobs = matrix, JobsDir(matrix)
        self.engine: EngineFile | None = None  # None: this machine
        self._held, self._original, self._is_copy = False, "", False
        self._submissions: dict[str, SubmissionFile] = {}  # folder -> its file, which never changes
        self._runs: dict[str, _Share] = {}  # run -> its newest share
        self._shares: list[_Share] = []  # the same, each once
        self._next: _Share | None = None  # of the job that submits the next seeds after them; None: there is none
        self._handovers: dict[int, Handover] = {}  # of submissions
        self._given: PollFile | None = None
        self._poll = PollFile()
        self._poll_at: float | None = None  # Unix seconds of poll.json, by the clock of the storage
        self._now: float | None = None  # Unix seconds of the last refresh, by the clock of the storage; None: unknown
        self._answers = False  # the scheduler has, lately
        self._counts: Counter[Activity] | None = None
        self._refresh = 0  # number of refreshes
        self.refresh(poll, is_new=is_new)

    def refresh(self, poll: PollFile | None = None, *, is_new: bool = False) -> None:
        """Read what may have changed.

        poll: an answer that the scheduler has given lately; None: that of poll.json.
        is_new: it has given it just now, and poll.json has an older one.
        """
        self.engine, self._counts, self._refresh = read_engine(self._matrix), None, self._refresh + 1
        if self.engine is None:
            self._held = self._matrix.is_held()
            return
        self._original = "" if is_at_home(self._matrix, self.engine) else self.engine.path
        self._is_copy = bool(self._original) and is_copy(self.engine)
        self._read_submissions()
        self._now = _storage_time(self._jobs.path)
        before, self._poll_at = self._poll_at, self._now if is_new else _time_of(self._jobs.poll)
        if poll is not self._given or self._poll_at != before or self._poll_at is None:
            self._given = poll
            self._poll = poll or read_poll(self._jobs) or PollFile(why_not=NOT_ASKED)
            for share in [*self._shares, *([self._next] if self._next else [])]:
                share.state = None
        is_new = self._now is not None and self._poll_at is not None and self._now - self._poll_at < TRUST_S
        self._answers = (is_new or poll is not None) and not self._poll.why_not

    @property
    def activity(self) -> Activity:
        """The activity of the matrix: running if one of its runs is, else unknown or queued if one of them is."""
        if self.engine is None:
            return Activity.RUNNING if self._held else Activity.NONE
        found = self.counts()
        return next((one for one in STRONGEST if found[one]), Activity.NONE)

    @property
    def is_running(self) -> bool:
        """True if something runs, or may run."""
        return self.activity in MAY_RUN

    @property
    def scheduler(self) -> str:
        """The name of the scheduler as users read it, "" on this machine."""
        return "" if self.engine is None else TITLES.get(self.engine.engine, self.engine.engine)

    @property
    def why_silent(self) -> str:
        """The reason why the scheduler does not answer, in its words; "" if it does, or there can be no job."""
        if self.engine is None or self._answers or self._original:
            return ""
        if not any(one in HANDED_OVER for one in self._handovers.values()):
            return ""
        return self._poll.why_not or NOT_ASKED

    @property
    def original(self) -> str:
        """The path of the matrix that this one is a copy or a move of, and that its jobs belong to; "" for none."""
        return self._original

    @property
    def is_copy(self) -> bool:
        """True if that matrix is still there, so that the jobs are its own."""
        return self._is_copy

    def has_runner(self, run: str) -> bool:
        """Return whether a runner has this run, so that its status.json is up to date; also if that is unknown."""
        return self._held if self.engine is None else self.of(run).activity in MAY_RUN

    def of(self, run: str) -> ShareState:
        """Return the state of the share of a run."""
        if self.engine is None:
            return HERE if self._held else NOBODY
        share = self._runs.get(run)
        return NOBODY if share is None else self._state(share)

    def shares(self) -> Iterator[ShareState]:
        """Yield the states of the newest shares of all runs; none on this machine."""
        return (self._state(share) for share in self._shares)

    @property
    def next_seeds(self) -> ShareState | None:
        """The job that submits the next seeds of a matrix after all others, or writes the report; None without one."""
        return None if self._next is None else self._state(self._next)

    def counts(self) -> Counter[Activity]:
        """Return activity -> number of jobs on the cluster; each task of an array is one."""
        if self._counts is None:
            last = self.next_seeds
            self._counts = Counter(state.activity for state in [*self.shares(), *([last] if last else [])])
        return self._counts

    def quiet_hosts(self, run: RunDir, attempt: int) -> dict[str, float]:
        """Return host -> seconds without a sign of life, of the hosts of a running run that should give one.

        attempt: the number of the one that runs.
        """
        state, found = self.of(run.name), dict[str, float]()
        if self.engine is None or state.activity is not Activity.RUNNING or self._now is None:
            return found
        if state.owner is not None and state.end is None and (state.quiet_s or 0.0) > QUIET_S:
            found[state.owner.host] = state.quiet_s or 0.0
        for node in nodes_of(run):
            about, at = read_node(node), _time_of(node.node_json)
            if about is None or at is None or about.attempt != attempt or self._now - at <= QUIET_S:
                continue
            end = read_node_end(node)
            if end is None or end.attempt != attempt:  # else it is quiet because it has ended
                found[about.host] = self._now - at
        return found

    def age_s(self, path: Path) -> float | None:
        """Return the seconds from the writing of a file to the last refresh, by the clock of its storage.

        None if it is missing, or the storage cannot be asked for its time.
        """
        at = _time_of(path)
        return None if at is None or self._now is None else max(0.0, self._now - at)

    def _read_submissions(self) -> None:
        """Read the submissions that are new, and their log."""
        known = len(self._submissions)
        folders = self._jobs.submissions()
        for folder in folders:
            if folder.path.name not in self._submissions and (found := read_submission(folder)) is not None:
                self._submissions[folder.path.name] = found
        if len(self._submissions) != known:
            self._runs = {}
            for folder in folders:
                of_folder = str(folder.path)
                for entry in self._submissions.get(folder.path.name, SubmissionFile()).shares:
                    self._runs.update(dict.fromkeys(entry.runs, _Share(folder.share(entry.task), of_folder)))
            self._shares = list(dict.fromkeys(self._runs.values()))
            newest = next((folder for folder in reversed(folders) if folder.path.name in self._submissions), None)
            is_next = newest is not None and self._submissions[newest.path.name].seeds
            self._next = _Share(newest.share(0), str(newest.path)) if newest and is_next else None
        # Of several lines the last one counts: a job that was cancelled is not submitted again under its number.
        self._handovers = {
            line.submission: HANDOVERS.get(line.event, Handover.INTENT) for line in job_lines(self._jobs)
        }

    def _handover(self, share: ShareDir) -> Handover:
        if self._original:
            return Handover.COPIED if self._is_copy else Handover.ELSEWHERE
        return self._handovers.get(share.submission, Handover.NO)

    def _state(self, share: _Share) -> ShareState:
        if share.state is None or share.refresh != self._refresh:  # once per refresh
            share.refresh = self._refresh
            # A pending or ended job is looked at again after the next answer, or if its folder has changed.
            changed = _changed(share.folder)
            if share.state is None or share.state.activity in MAY_RUN or share.changed != changed:
                share.state, share.changed = self._look(share), changed
        return share.state

    def _look(self, known: _Share) -> ShareState:
        """Return the state of a share from its files and the last answer."""
        share = known.share
        handover = self._handover(share)
        view = None if self._original else self._poll.jobs.get(known.id)
        owner, end, at, quiet_s = self._files(known)
        is_fresh = quiet_s is not None and quiet_s < FRESH_S
        newer = at is not None and self._poll_at is not None and at > self._poll_at
        if end is None:
            trace = Trace.CLAIM if is_fresh else Trace.NOTHING
        else:
            # Slurm may not list a job for some seconds while it queues it again. Later, the job is gone.
            is_gone = self._answers and not newer and (view is None or view.phase is SchedulerPhase.UNKNOWN)
            may_start = not is_gone or (is_fresh and self.engine is not None and self.engine.engine == SLURM)
            trace = Trace.REQUEUED if end.requeued and may_start else Trace.OVER
        if trace is Trace.CLAIM and owner is not None and view is not None and view.job != owner.job:
            view = None  # of another job: the user has submitted the script twice
        activity = share_activity(
            handover,
            None if view is None else view.phase,
            trace,
            answers=self._answers,
            newer=newer,
        )
        return ShareState(
            activity=activity, handover=handover, share=share, view=view, owner=owner, end=end, quiet_s=quiet_s
        )

    def _files(self, known: _Share) -> tuple[ShareOwner | None, ShareEnd | None, float | None, float | None]:
        """Return the claim on a share, the end of its newest start, the time of the newer one, and the claim's age (s).

        The end is None while that start goes on. The time is in Unix seconds of the storage.
        """
        try:
            listed = os.listdir(known.folder)  # noqa: PTH208  (a list is fresh where a name may not be)
        except OSError:
            return None, None, None, None
        if OWNER not in listed and END not in listed:  # of thousands of jobs, most wait
            return None, None, None, None
        share = known.share
        owner = read_share_owner(share) if OWNER in listed else None
        end = read_share_end(share) if END in listed else None
        if owner is not None and not is_end_of(end, owner):
            end = None  # of an earlier start
        owner_at = None if owner is None else _time_of(share.owner)
        at = _time_of(share.end) if end is not None else owner_at
        return owner, end, at, None if owner_at is None or self._now is None else max(0.0, self._now - owner_at)


class _Share:
    """A share with its last state."""

    __slots__ = ("changed", "folder", "id", "refresh", "share", "state")

    def __init__(self, share: ShareDir, folder: str) -> None:
        self.share, self.id = share, share.id
        self.folder = f"{folder}/{share.task}"  # a text: a matrix has thousands of shares
        self.refresh = 0  # number of the refresh after which the state was looked at
        self.state: ShareState | None = None  # None: to be looked at
        self.changed: int | None = None  # modification time of its folder (ns)


def _changed(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116  (texts, not paths: thousands of calls per second)
    except OSError:
        return None


def _storage_time(folder: Path) -> float | None:
    """Return the time of the storage of a folder (Unix seconds), None if nothing can be written there."""
    try:
        return storage_time(folder)
    except OSError:
        return None


def _time_of(path: Path) -> float | None:
    """Return the modification time of a file (Unix seconds of its storage), None without one."""
    try:
        with open_to_read(path) as file:  # opened, because that asks a server of NFS for the attributes
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
