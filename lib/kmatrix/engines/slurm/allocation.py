"""The Slurm job that this process runs in. Slurm may not answer: then the job goes on, and what is unknown stays so."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from sys import executable

from kmatrix.engines.allocation import StopCause
from kmatrix.engines.slurm.capacity import seconds_of
from kmatrix.engines.slurm.settings import read_settings
from kmatrix.engines.spread import Spread, Srun
from kmatrix.errors import LaunchError
from kmatrix.records.jobs.paths import ShareDir
from kmatrix.status.state import NODE_LOST, PREEMPTED, TIME_LIMIT

ASK_S = 12.0  # the programs of Slurm give up after about 10 s without a controller
EARLY_S = 60.0  # Slurm may send the signal of --signal so much earlier than asked (sbatch(1))
LATE_S = 5.0  # RunTime has whole seconds, and the end at the limit is late
NOTICE_S = 120  # default of SLURM_NOTICE
NEVER = frozenset({"", "None", "N/A", "Unknown", "(null)"})  # a time that has not come
# States of a job without processes (squeue(1), "JOB STATE CODES"). Not NODE_FAIL: nobody knows what a lost node does.
OVER = frozenset({
    "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "TIMEOUT",
})  # fmt: skip
# idle*: no answer. Of the other marks of sinfo(1), these are of nodes that do: planned, in maintenance, to be rebooted.
REACHED = re.compile(r"(idle|allocated|mixed|completing|reserved|planned|draining|drained)[-+$@]?")
ENDING = frozenset({"CANCELLED", "COMPLETING"})  # of a job whose processes end
Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(slots=True)
class SlurmJob:
    """A job, or a task of an array."""

    job: str
    number: str  # of this task alone, which steps are named after
    hosts: tuple[str, ...]
    restart: int = 0
    most_restarts: int | None = None
    notice_s: float = NOTICE_S
    replaces_nodes: bool = False
    stage_dir: str = ""
    kill_s: float | None = None
    run: Run = field(default=subprocess.run, repr=False)
    name: str = "Slurm"
    _ends: float | None = None  # monotonic seconds

    def begin(self) -> None:
        """Ask Slurm for what does not change: how it kills jobs, and when this one ends."""
        config = self._ask("scontrol", "show", "config")
        found = re.search(r"^KillWait\s*=\s*(\d+)", config or "", re.MULTILINE)
        self.kill_s = float(found[1]) if found else None
        self._look()

    def follow(self, share: ShareDir, runs: Sequence[str], say: Callable[[str], object]) -> int | None:  # noqa: ARG002
        """Return None: srun starts the agents of the other nodes."""
        return None

    def spread(self) -> Spread:
        """Return what starts runs on the nodes of this job."""
        return Srun(Path(executable), self.number, self.hosts)

    def left_s(self) -> float | None:
        """Return the time (s) until the limit of the job, None if it has none or Slurm did not tell."""
        return None if self._ends is None else self._ends - time.monotonic()

    def cause(self, *, noticed: bool) -> StopCause:
        """Return why the job was signalled."""
        about = self._look()
        left, state = self.left_s(), about.get("JobState", "")
        near = left is not None and left <= self.notice_s + EARLY_S
        # Slurm has queued it again by itself: after the death of a node, or by a command.
        again = int(about.get("Restarts") or 0) > self.restart
        if again and (lost := self._down()):
            reason = f"Slurm has lost {' and '.join(lost)}"
            return StopCause(kind=NODE_LOST, reason=reason, again=True, lost=lost)
        # Without a limit that is near, only a preemption is announced.
        preempted = about.get("PreemptTime", "") not in NEVER or (noticed and not near and left is not None)
        if preempted or state == "PREEMPTED":
            return StopCause(kind=PREEMPTED, reason=f"job {self.job} is preempted by a more urgent one", again=True)
        if noticed or (left is not None and left <= 0):
            return StopCause(kind=TIME_LIMIT, reason=f"the time limit of job {self.job} is near", again=True)
        if again:
            return StopCause(kind="signal", reason=f"job {self.job} was requeued", again=True)
        if state in ENDING:
            return StopCause(kind="signal", reason=f"job {self.job} was cancelled")
        reason = "asked to stop" if about else f"job {self.job} was signalled, and Slurm does not answer why"
        return StopCause(kind="signal", reason=reason)

    def is_cancelled(self) -> bool:
        """Return whether the user ends this start of the job. Slurm would queue it again all the same."""
        about, left = self._look(), self.left_s()
        at_limit = left is not None and left <= LATE_S
        ends = about.get("JobState", "") in ENDING and about.get("PreemptTime", "") in NEVER and not at_limit
        return ends and int(about.get("Restarts") or 0) == self.restart

    def requeue(self) -> str:
        """Queue the job again; Slurm kills this start of it."""
        try:
            done = self._run("scontrol", "requeue", self.job)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        # Pending: Slurm has queued it again by itself.
        if done.returncode == 0 or "pending" in done.stderr:
            return ""
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]

    def _down(self) -> tuple[str, ...]:
        """Return the hosts of this start that Slurm takes for dead."""
        states = self._node_states(self.hosts)
        return tuple(host for host in self.hosts if states.get(host, "").startswith(("down", "fail")))

    def silent(self, hosts: Collection[str]) -> list[str]:
        """Return which of these hosts of the job do not start a program."""
        return Srun(Path(executable), self.number, self.hosts).silent(hosts)

    def is_over(self, job: str, hosts: Collection[str]) -> bool:
        """Return whether no process of another job is left, by Slurm, which reaches its hosts.

        A job is completing until each of its nodes has reported the end of its processes, or is taken for dead.
        """
        state = self._about(job).get("JobState", "")
        if state not in OVER:
            return False
        states = self._node_states(hosts)
        return all(REACHED.fullmatch(states.get(host, "")) for host in hosts)

    def _about(self, job: str) -> Mapping[str, str]:
        """Return what Slurm knows about a job, empty without an answer."""
        answer = self._ask("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", answer or ""))

    def _node_states(self, hosts: Collection[str]) -> Mapping[str, str]:
        """Return host -> state in Slurm's words, empty without an answer."""
        answer = self._ask("sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T")
        lines = (line.split(None, 1) for line in (answer or "").splitlines())
        return {words[0]: words[1].strip() for words in lines if len(words) == 2}

    def _look(self) -> Mapping[str, str]:
        """Return what Slurm knows about the job, empty without an answer, and note when it ends."""
        about = self._about(self.job)
        limit, ran = seconds_of(about.get("TimeLimit", "")), seconds_of(about.get("RunTime", ""))
        # Both by the clock of the controller; of this start, not of the next one.
        if limit is not None and ran is not None and about.get("Restarts", "0") == str(self.restart):
            self._ends = time.monotonic() + limit - ran
        return about

    def _ask(self, *words: str) -> str | None:
        """Return the output of a question, None without an answer."""
        with suppress(OSError, subprocess.TimeoutExpired):
            done = self._run(*words)
            return done.stdout if done.returncode == 0 else None
        return None

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(words, capture_output=True, text=True, errors="replace", check=False, timeout=ASK_S)


def job_hosts(listed: str, run: Run = subprocess.run) -> tuple[str, ...]:
    """Return the hosts of a list such as n[1-3,7], in its order. Raises LaunchError if Slurm does not expand it."""
    words: Sequence[str] = ["scontrol", "show", "hostnames", listed]
    try:
        done = run(words, capture_output=True, text=True, errors="replace", check=False, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"cannot read SLURM_JOB_NODELIST={listed}", why=str(error)) from None
    if done.returncode or not done.stdout.split():
        raise LaunchError(f"cannot read SLURM_JOB_NODELIST={listed}", why=done.stderr.strip() or "no host is in it")
    return tuple(done.stdout.split())


def this_job(environment: Mapping[str, str], settings: Mapping[str, str]) -> SlurmJob:
    """Return the job that this process runs in.

    Raises LaunchError outside of one, and ConfigError for an invalid setting.
    """
    number, listed = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not number or not listed:
        raise LaunchError(
            "this is not a job of Slurm", why="SLURM_JOB_ID or SLURM_JOB_NODELIST is not set", hint="submit it: sbatch"
        )
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    known = read_settings(settings)
    job = SlurmJob(
        # Of an array, the number alone would name all of its tasks: the last one has that of the array.
        job=f"{array}_{task}" if array and task else number,
        number=number,
        hosts=job_hosts(listed),
        restart=int(environment.get("SLURM_RESTART_COUNT") or 0),
        most_restarts=known.restarts if settings.get("SLURM_RESTARTS") else None,
        notice_s=known.notice_s,
        stage_dir=settings.get("STAGE_DIR", ""),
    )
    job.begin()
    return job
