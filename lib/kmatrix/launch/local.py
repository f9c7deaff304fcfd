"""The engine of one box: runs packed on its GPUs or its cores, each below a guard.

Job ids are the runs' names: nothing of a run outlives the runner, so there is nothing to find again.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen

from kmatrix.errors import KmatrixError
from kmatrix.launch.engine import GRACE_S, JobState, Phase, RunPlan
from kmatrix.launch.lock import try_lock
from kmatrix.launch.monitor import Monitor, end
from kmatrix.launch.pool import Pool
from kmatrix.launch.process import Tree, start
from kmatrix.launch.state import TIMEOUT
from kmatrix.launch.track import Trackers
from kmatrix.packing import Job, Limits, startable
from kmatrix.records import read_json

# On the CPU each step frees what the next one needs: glibc keeps up to 1 GiB of it instead of handing it back to the
# kernel page by page (docs/decisions/0003-attention-and-precision-on-the-cpu.md). 32 MiB is the most that it takes.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
MOST_RECORDERS = 5  # times that a killed recorder of a run is started anew
ONE = Limits(jobs=1)
NO_GPUS = "no gpus"  # kind of a run that waits for GPUs, or was given up for want of them
MARGIN_S = 5.0  # after the grace the guard kills; when it has not by then, the runner does


@dataclass(slots=True)
class _Job:
    plan: RunPlan
    state: JobState = field(default_factory=lambda: JobState(phase=Phase.PENDING))
    tree: Tree | None = None
    recorder: Popen[bytes] | None = None
    seen: tuple[str, ...] | None = ()  # GPUs that the recorder sees, () for all
    slot: int = 0  # place among the runs that go at the same time
    begun: float = 0.0  # monotonic seconds
    killed_by: float | None = None  # monotonic seconds
    waits_since: float | None = None  # monotonic seconds, for an earlier attempt


class LocalEngine:
    """Runs on this machine. No GPU is given to two runs at a time.

    python: the interpreter that has torch.  root: the project's.  torchrun: the launcher's command line,
    `python -m torch.distributed.run` unless given.  gpus: those that runs may get, or UUIDs in the driver's order.
    cores: for runs on the CPU.  limits: how many at a time; one unless given.  grace_s: how long a run
    that is stopped may take to save, in seconds.  monitor: how runs are recorded, None for not at all.
    trackers: what feeds those that runs have, None for nothing.
    """

    def __init__(
        self,
        python: Path,
        root: Path,
        torchrun: tuple[str, ...] | None = None,
        *,
        gpus: Sequence[str] | Pool = (),
        cores: int = 1,
        limits: Limits = ONE,
        grace_s: float = GRACE_S,
        monitor: Monitor | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        self._python, self._root, self._grace_s = python, root, grace_s
        self._pool = gpus if isinstance(gpus, Pool) else Pool.of(gpus)
        self._cores, self._limits = cores, limits
        self._monitor, self._trackers = monitor, trackers
        self._torchrun = torchrun or (str(python), "-m", "torch.distributed.run")
        self._jobs: dict[str, _Job] = {}

    def check(self, runs: Sequence[RunPlan]) -> list[str]:
        """Return what keeps these runs from running here, one sentence each."""
        problems = [] if os.access(self._python, os.X_OK) else [f"{self._python} is no program that can be run"]
        for name, count in Counter(run.name for run in runs).items():
            if count > 1:
                problems.append(f"{name}: {count} runs have this name")
        for run in runs:
            problems += [f"{run.name}: {problem}" for problem in _problems(run, len(self._pool.all))]
        return problems

    def plan(self, runs: Sequence[RunPlan]) -> str:
        """Return the command line of each run, with the environment that it does not share with this process.

        Any user of a shell can start a run with it. The engine starts the same line below its guard, on GPUs that are
        free then; here they are the first ones.
        """
        lines = []
        for run in (replace(run, gpus=self._pool.all[: run.ranks] if run.cuda else ()) for run in runs):
            changes = " ".join(f"{name}={shlex.quote(value)}" for name, value in self._changes(run).items())
            log = shlex.quote(str(run.dir.output_log))
            lines.append(f"# {run.name}")
            lines.append(f"cd {shlex.quote(str(self._root))} && {changes} {shlex.join(self._argv(run))} >>{log} 2>&1")
        return "\n".join(lines) + "\n" if lines else ""

    def submit(self, runs: Sequence[RunPlan]) -> dict[str, str]:
        """Queue runs. One that is queued, running or ended in the same attempt is left as it is."""
        for run in runs:
            known = self._jobs.get(run.name)
            if known is None or known.plan.attempt != run.attempt or known.state.phase is Phase.GONE:
                self._jobs[run.name] = _Job(run)
        return {run.name: run.name for run in runs}

    def poll(self, jobs: Mapping[str, str] | None = None) -> dict[str, JobState]:
        """Start what can, look after what runs, and return the states.

        In this order: the GPUs of a run that ended are given away at the next call, when its end was judged.
        """
        if self._trackers is not None:
            self._trackers.look()
        for job in self._next():
            self._start(job)
        for job in self._in(Phase.RUNNING):
            self._watch(job)
        return {name: job.state for name, job in self._jobs.items() if jobs is None or name in jobs}

    def cancel(self, jobs: Mapping[str, str] | None = None, *, now: bool = False) -> None:
        """Take back what has not started; ask the rest to save and end, or kill it now."""
        for name, job in self._jobs.items():
            if jobs is not None and name not in jobs:
                continue
            if job.state.phase is Phase.PENDING:
                job.state = replace(job.state, phase=Phase.GONE, cancelled=True)
            elif job.state.phase is Phase.RUNNING and job.tree is not None:
                job.state = replace(job.state, cancelled=True)
                if now:
                    self._end(job, job.tree.kill(), now=True)
                else:
                    self._stop(job)

    def _in(self, phase: Phase) -> list[_Job]:
        return [job for job in self._jobs.values() if job.state.phase is phase]

    def _next(self) -> list[_Job]:
        """Return the jobs that start now. Runs on GPUs and runs on the CPU are never beside each other."""
        running, queue = self._in(Phase.RUNNING), self._in(Phase.PENDING)
        if not queue:
            return []
        cuda = (running or queue)[0].plan.cuda
        waiting = [job for job in queue if job.plan.cuda == cuda]
        units = self._cores
        if cuda:
            self._pool.look(self._taken())
            units = len(self._pool.usable(self._taken()))
            waiting = [job for job in waiting if not self._is_too_wide(job, units)]
        names = startable(
            [self._packed(job) for job in waiting],
            [self._packed(job) for job in running],
            units,
            self._limits.on(gpus=cuda),
        )
        return [self._jobs[name] for name in names]

    def _taken(self) -> set[str]:
        return {gpu for job in self._in(Phase.RUNNING) for gpu in job.plan.gpus}

    def _is_too_wide(self, job: _Job, units: int) -> bool:
        """Whether a run needs more GPUs than there are now; it waits, or is given up where it would wait for ever."""
        ranks, whole = job.plan.ranks, len(self._pool.whole)
        if ranks <= units:
            job.state = replace(job.state, reason="") if job.state.kind == NO_GPUS else job.state
            return False
        out = "; ".join(f"{self._pool.name(uuid)} is {why}" for uuid, why in self._pool.out.items())
        phase = Phase.PENDING if ranks <= whole else Phase.GONE
        need = f"needs {ranks} GPU{'s' if ranks > 1 else ''}"
        reason = f"{need}, {units or 'none'} can be had now: {out}"
        job.state = replace(job.state, phase=phase, kind=NO_GPUS, reason=reason)
        return True

    def _packed(self, job: _Job) -> Job:
        """A job as the packing sees it: its GPUs or cores, and the seconds until its end."""
        plan, left = job.plan, job.plan.expected_s
        width = plan.ranks if plan.cuda else min(plan.ranks * plan.cpu_threads, self._cores)
        if left is not None and job.state.phase is Phase.RUNNING:
            left = max(0.0, left - (time.monotonic() - job.begun))
        return Job(name=plan.name, width=width, seconds=left)

    def _choose(self, plan: RunPlan) -> RunPlan:
        """Give a run GPUs that no other has."""
        if not plan.cuda:
            return plan
        return replace(plan, gpus=self._pool.place(plan.ranks, self._taken()))

    def _start(self, job: _Job) -> None:
        """Start a run, unless an earlier attempt of it still ends: then it waits, for as long as that may take."""
        plan, lock = self._choose(job.plan), None
        try:
            lock = try_lock(plan.dir.lock)
            if lock is None:
                self._wait_for_earlier(job)
                return
            log = plan.dir.output_log
            before = log.stat().st_size if log.exists() else 0
            begun = time.time()
            job.tree = start(
                self._argv(plan),
                cwd=self._root,
                env={**os.environ, **self._environment(plan)},
                log=log,
                python=self._python,
                grace_s=self._grace_s,
                lock=lock,
            )
        except (OSError, KmatrixError) as error:
            self._give_up(job, f"could not be started: {str(error).splitlines()[0]}")
            return
        finally:
            if lock is not None:
                os.close(lock)  # the guard has it now
        job.plan, job.begun = plan, time.monotonic()
        job.state = JobState(phase=Phase.RUNNING, pid=job.tree.pid, started=begun, gpus=plan.gpus, log_start=before)
        self._record(job)
        if self._trackers is not None:
            self._trackers.begin(plan, job.tree.pid)

    def _record(self, job: _Job) -> None:
        """Start the recorder of a run that has begun."""
        if self._monitor is None or job.state.pid is None:
            return
        others = [other for other in self._in(Phase.RUNNING) if other is not job]
        shared = self._limits.on(gpus=job.plan.cuda).jobs != 1
        taken = {gpu for other in others for gpu in other.seen or ()}
        job.seen = self._monitor.seen(job.plan, taken, shared=shared)
        job.slot = min(set(range(len(others) + 1)) - {other.slot for other in others})
        job.recorder = self._monitor.start(job.plan, job.state.pid, gpus=job.seen, slot=job.slot)

    def _wait_for_earlier(self, job: _Job) -> None:
        now = time.monotonic()
        job.state = replace(job.state, reason="waits for an earlier attempt to end")
        job.waits_since = job.waits_since if job.waits_since is not None else now
        if now - job.waits_since > self._grace_s + 2 * MARGIN_S:
            self._give_up(
                job, f"could not be started: an earlier attempt of it still runs ({job.plan.dir.lock} is held)"
            )

    def _give_up(self, job: _Job, reason: str) -> None:
        job.state = JobState(phase=Phase.ENDED, ended=time.time(), reason=reason)

    def _watch(self, job: _Job) -> None:
        tree, now, limit = job.tree, time.monotonic(), job.plan.timeout_s
        if tree is None:
            return
        code = tree.poll()
        if code is not None:
            self._end(job, code)
            return
        self._watch_recorder(job)
        if job.killed_by is not None and now > job.killed_by:
            self._end(job, tree.kill())
        elif limit and job.killed_by is None and now - job.begun > limit:
            job.state = replace(job.state, reason=f"took longer than {limit:g} s", kind=TIMEOUT)
            self._stop(job)

    def _watch_recorder(self, job: _Job) -> None:
        """Start a recorder anew that was killed; it goes on behind what was recorded. One that refused stays away."""
        recorder, monitor, pid = job.recorder, self._monitor, job.state.pid
        if recorder is None or monitor is None or pid is None or (recorder.poll() or 0) >= 0:
            return
        deaths = job.state.recorder_deaths + 1
        job.state = replace(job.state, recorder_deaths=deaths)
        again = deaths <= MOST_RECORDERS
        job.recorder = monitor.start(job.plan, pid, gpus=job.seen, slot=job.slot) if again else None

    def _stop(self, job: _Job) -> None:
        if job.tree is not None and job.killed_by is None:
            job.killed_by = time.monotonic() + self._grace_s + MARGIN_S
            job.tree.stop()

    def _end(self, job: _Job, code: int, *, now: bool = False) -> None:
        job.state = replace(job.state, phase=Phase.ENDED, ended=time.time(), exit_code=code)
        end(job.recorder)
        if self._trackers is not None:
            if now:
                self._trackers.kill(job.plan.dir)
            else:
                self._trackers.end(job.plan.dir)

    def _argv(self, run: RunPlan) -> list[str]:
        ranks = ["--standalone", f"--nproc-per-node={run.ranks}"]
        return [*self._torchrun, *ranks, *run.command, *run.arguments]

    def _changes(self, run: RunPlan) -> dict[str, str]:
        """What the environment of a run has that this process's need not have: none of it is secret."""
        return {
            **({} if run.cuda else KEEP_MEMORY),
            "CUDA_VISIBLE_DEVICES": ",".join(run.gpus),
            "OMP_NUM_THREADS": str(run.cpu_threads),
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join([str(self._root), str(self._root / "lib")]),
            "PYTHONUNBUFFERED": "1",
        }

    def _environment(self, run: RunPlan) -> dict[str, str]:
        """The changes, with the user's own PYTHONPATH behind ours."""
        changes, theirs = self._changes(run), os.environ.get("PYTHONPATH")
        if theirs:
            changes["PYTHONPATH"] += os.pathsep + theirs
        return changes


def _problems(run: RunPlan, gpus: int) -> Iterable[str]:
    if run.ranks < 1:
        yield f"{run.ranks} ranks: it needs at least one"
    if run.cuda and run.ranks > gpus:
        yield f"{run.ranks} ranks on {gpus} GPUs: each rank needs one of its own"
    if run.cpu_threads < 1:
        yield f"{run.cpu_threads} threads a rank: it needs at least one"
    if not os.access(run.dir.path, os.W_OK):
        yield f"{run.dir.path} is not there, or cannot be written"
        return
    try:
        record = read_json(run.dir.run_json)
    except KmatrixError as error:
        yield str(error).replace("\n", ";")
        return
    if record.get("run_id") != run.run_id:
        yield f"{run.dir.run_json} is of the run {record.get('run_id')}, not {run.run_id}"
