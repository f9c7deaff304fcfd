"""The engine of one machine: runs are packed on its GPUs or cores, each under a guard process.

Job ids are the names of the runs: no process of a run outlives the runner, so jobs need not be found again.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen

from kmatrix.engines.base import GRACE_S
from kmatrix.engines.local.pool import Pool
from kmatrix.engines.local.preparation import start_preparation, why_it_failed
from kmatrix.engines.local.process import ProcessTree, start
from kmatrix.engines.local.recorder import RecorderLauncher, end
from kmatrix.engines.node_watch import NodeWatch
from kmatrix.engines.spread import AgentSettings, Local, Spread
from kmatrix.errors import KmatrixError
from kmatrix.packing import Limits, PackedJob, startable
from kmatrix.records.files import read_json
from kmatrix.records.jobs.files import NodeEnd
from kmatrix.records.paths import extended_path, program_environment
from kmatrix.records.run_lock import SPENT, TOKEN, begin_attempt, kill, members
from kmatrix.records.states import Clock
from kmatrix.status.state import DATA, NCCL, NODE_LOST, PREEMPTED, TIMEOUT, JobPhase, JobState, RunPlan
from kmatrix.text import plural
from kmatrix.track.processes import TrackerProcesses

# On the CPU each step frees memory that the next step needs: glibc keeps up to 1 GiB instead of returning it to the
# kernel page by page (docs/decisions/0003-attention-and-precision-on-the-cpu.md). 32 MiB is the maximum of the option.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
# Without it, MKL may divide a product differently from run to run. It costs no time and changes no bits
# (docs/decisions/0003-attention-and-precision-on-the-cpu.md).
SAME_BITS = {"MKL_CBWR": "AUTO"}
# On GPUs memory that is free in pieces can be used for a large tensor: less is lost to fragmentation.
# Source: PyTorch, CUDA semantics.
GROW_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
FORMER_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # the name of that variable before torch 2.9

MOST_RECORDERS = 5  # restarts of a killed recorder per run
ONE = Limits(jobs=1)  # default: one run at a time
NO_GPUS = "no gpus"  # kind of a run that waits for GPUs, or was given up because there are too few
MARGIN_S = 5.0  # the guard kills after the grace period; after this margin the runner does
KILLED_S = 10.0  # a process of an earlier attempt that lives so long after its kill is stuck in the kernel
LOOK_S = 1.0  # between two searches for the processes of an earlier attempt


@dataclass(slots=True)
class _Job:
    plan: RunPlan
    state: JobState = field(default_factory=lambda: JobState(phase=JobPhase.PENDING))
    tree: ProcessTree | None = None
    nodes: NodeWatch | None = None  # of a run whose nodes have agents
    code: int | None = None  # exit code of a run that ended badly, while its hosts are asked
    recorder: Popen[bytes] | None = None
    preparation: Popen[bytes] | None = None  # of streamed data
    unprepared: int | None = None  # exit status of a preparation that failed
    seen: tuple[str, ...] | None = ()  # GPUs that the recorder samples, () for all
    started_at: float = 0.0  # monotonic seconds
    kill_deadline: float | None = None  # monotonic seconds
    waits_since: float | None = None  # monotonic seconds, for an earlier attempt to end
    killed_at: float | None = None  # monotonic seconds: the processes of that attempt, for the first time
    looked_at: float = -math.inf  # monotonic seconds, for the processes of an earlier attempt


class LocalEngine:
    """Execute runs on this machine. A GPU is used by one run at a time."""

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
        recorders: RecorderLauncher | None = None,
        trackers: TrackerProcesses | None = None,
        spread: Spread | None = None,
        stage_dir: str = "",
    ) -> None:
        """Create an engine.

        python: interpreter with torch.  root: the checkout.  torchrun: command line of the launcher, default
        `python -m torch.distributed.run`.  gpus: usable ones, or their UUIDs in the driver's order.  cores: for runs on
        the CPU.  limits: of runs at the same time.  grace_s: time (s) that a stopped run has to save a checkpoint.
        recorders: starts the recorders, None for no recording.  trackers: starts the tracker processes, None for none.
        spread: starts runs on all of their nodes, None for this machine alone.  stage_dir: for copies of the data on
        each node, "" for none.
        """
        self.lost_hosts: list[str] = []  # that stopped answering while a run used them
        self._spread = spread or Local()
        self._settings = AgentSettings(grace_s=grace_s, recorders=recorders, stage_dir=stage_dir)
        self._python, self._root, self._grace_s = python, root, grace_s
        # The runner passes its own pool, so that a GPU that it quarantines is no longer handed out here.
        self._pool = gpus if isinstance(gpus, Pool) else Pool.of(gpus) if gpus else None
        self._cores, self._limits = cores, limits
        self._recorders, self._trackers = recorders, trackers
        self._torchrun = torchrun or (str(python), "-m", "torch.distributed.run")
        self._jobs: dict[str, _Job] = {}

    def check(self, runs: Sequence[RunPlan]) -> list[str]:
        """Return why these runs cannot run here, one sentence per problem."""
        problems = [] if os.access(self._python, os.X_OK) else [f"{self._python} is not an executable program"]
        for name, count in Counter(run.name for run in runs).items():
            if count > 1:
                problems.append(f"{name}: {count} runs have this name")
        for run in runs:
            problems += [f"{run.name}: {problem}" for problem in _problems(run, len(self._gpus))]
            if run.nodes > 1 and not self._spread.has_agents(run):
                problems.append(f"{run.name}: needs {run.nodes} nodes: submit it to a cluster")
        return problems

    def plan(self, runs: Sequence[RunPlan]) -> str:
        """Return the command line of each run, with the environment variables that are set for it.

        A shell can start a run with it. The engine starts the same command under its guard, on free GPUs; here, the
        first GPUs are shown.
        """
        lines = []
        for run in (replace(run, gpus=self._gpus[: run.ranks] if run.cuda else ()) for run in runs):
            changes = " ".join(f"{name}={shlex.quote(value)}" for name, value in self._changes(run).items())
            log = shlex.quote(str(run.dir.output_log))
            lines.append(f"# {run.name}")
            lines.append(f"cd {shlex.quote(str(self._root))} && {changes} {shlex.join(self._argv(run))} >>{log} 2>&1")
        return "\n".join(lines) + "\n" if lines else ""

    def submit(self, runs: Sequence[RunPlan]) -> dict[str, str]:
        """Queue runs. An attempt that is already queued, running or ended is not changed."""
        for run in runs:
            known = self._jobs.get(run.name)
            if known is None or known.plan.attempt != run.attempt or known.state.phase is JobPhase.GONE:
                self._jobs[run.name] = _Job(run)
        return {run.name: run.name for run in runs}

    def poll(self, jobs: Mapping[str, str] | None = None) -> dict[str, JobState]:
        """Start the runs that fit, watch the running ones, and return all states.

        Runs start before ended ones are noticed, so that GPUs are reused at the next call, after the end of the run was
        classified: a lost GPU is quarantined by then.
        """
        # A tracker process that was killed has to come back even while no run starts or ends.
        if self._trackers is not None:
            self._trackers.poll()
        for job in self._startable():
            self._start(job)
        for job in self._in(JobPhase.RUNNING):
            self._watch(job)
        return {name: job.state for name, job in self._jobs.items() if jobs is None or name in jobs}

    def cancel(self, jobs: Mapping[str, str] | None = None, *, now: bool = False) -> None:
        """Cancel pending runs; ask running ones to save a checkpoint and exit, or kill them now."""
        for name, job in self._jobs.items():
            if jobs is not None and name not in jobs:
                continue
            if job.state.phase is JobPhase.PENDING:
                job.state = replace(job.state, phase=JobPhase.GONE, cancelled=True)
            # Not yet ENDED: the run may still write a checkpoint and result.json, and only then is classified.
            elif job.state.phase is JobPhase.RUNNING and job.tree is not None:
                job.state = replace(job.state, cancelled=True)
                if now:
                    self._set_ended(job, self._kill(job, job.tree), now=True)
                else:
                    self._stop(job)

    @property
    def pool(self) -> Pool | None:
        """The GPUs of the engine, None on the CPU."""
        return self._pool

    @property
    def _gpus(self) -> tuple[str, ...]:
        return self._pool.all if self._pool is not None else ()

    def _in(self, phase: JobPhase) -> list[_Job]:
        return [job for job in self._jobs.values() if job.state.phase is phase]

    def _startable(self) -> list[_Job]:
        """Return the jobs that start now. Runs on GPUs and runs on the CPU never run at the same time."""
        running, queue = self._in(JobPhase.RUNNING), self._in(JobPhase.PENDING)
        if not queue:
            return []
        # Runs on the other device wait until none of these is running.
        cuda = (running or queue)[0].plan.cuda
        waiting = [job for job in queue if job.plan.cuda == cuda]
        units = self._cores
        if cuda and self._pool is not None:
            self._pool.poll(self._gpus_in_use())
            units = len(self._pool.usable(self._gpus_in_use()))
            waiting = [job for job in waiting if not self._is_too_wide(job, self._pool, units)]
        names = startable(
            [self._packed(job) for job in waiting],
            [self._packed(job) for job in running],
            units,
            self._limits.on(gpus=cuda),
        )
        return [self._jobs[name] for name in names]

    def _gpus_in_use(self) -> set[str]:
        return {gpu for job in self._in(JobPhase.RUNNING) for gpu in job.plan.gpus}

    def _is_too_wide(self, job: _Job, pool: Pool, units: int) -> bool:
        """Return whether a run needs more GPUs than are usable now. It waits, or is given up if it can never start."""
        ranks, most = job.plan.ranks_per_node, len(pool.not_quarantined)
        if ranks <= units:
            job.state = replace(job.state, reason="") if job.state.kind == NO_GPUS else job.state
            return False
        out = "; ".join(f"{pool.name(uuid)} is {why}" for uuid, why in pool.excluded.items())
        phase = JobPhase.PENDING if ranks <= most else JobPhase.GONE
        need = f"needs {plural(ranks, 'GPU')}"
        reason = f"{need}, {units} available: {out}"
        job.state = replace(job.state, phase=phase, kind=NO_GPUS, reason=reason)
        return True

    def _packed(self, job: _Job) -> PackedJob:
        """Return a job for the scheduler: its number of GPUs or cores, and the expected time until its end."""
        plan, left = job.plan, job.plan.expected_s
        # More threads than cores is allowed and only slow: without the cap, such a run would never fit.
        ranks = plan.ranks_per_node
        width = ranks if plan.cuda else min(ranks * plan.cpu_threads, self._cores)
        if left is not None and job.state.phase is JobPhase.RUNNING:
            left = max(0.0, left - (time.monotonic() - job.started_at))
        return PackedJob(name=plan.name, width=width, seconds=left)

    def _with_gpus(self, plan: RunPlan) -> RunPlan:
        """Return the plan with GPUs that no other run uses."""
        if not plan.cuda or self._pool is None or plan.nodes > 1:
            return plan
        return replace(plan, gpus=self._pool.place(plan.ranks, self._gpus_in_use()))

    def _start(self, job: _Job) -> None:
        """Start a run, or let it wait while processes of an earlier attempt still exit."""
        plan = self._with_gpus(job.plan)
        try:
            begun = self._launch(plan)
        except (OSError, KmatrixError) as error:  # ends this run only; the others may start
            self._give_up(job, f"could not be started: {str(error).splitlines()[0]}")
            return
        if begun is None:
            self._wait_for_earlier(job)
            return
        job.tree, at, before = begun
        job.plan, job.started_at = plan, time.monotonic()
        job.nodes = NodeWatch(plan, self._spread) if self._spread.has_agents(plan) else None
        job.state = JobState(
            phase=JobPhase.RUNNING,
            pid=job.tree.pid,
            started=at,
            clock=Clock.now(),
            gpus=plan.gpus,
            hosts=self._spread.hosts_of(plan),
            log_start=before,
        )
        self._start_recorder(job)
        job.preparation = start_preparation(plan, job.tree, python=self._python, root=self._root)
        if self._trackers is not None:
            self._trackers.begin(plan, job.tree.pid)

    def _launch(self, plan: RunPlan) -> tuple[ProcessTree, float, int] | None:
        """Start the processes of a run; return them, the time (Unix seconds) and the size of the log before (bytes).

        None if processes of an earlier attempt still hold the run.
        """
        taken = begin_attempt(plan.dir, plan.attempt)
        if taken is None:
            return None
        lock, token = taken
        try:
            log = plan.dir.output_log
            # Before the process exists: the patterns of failures search only what this attempt appends.
            before = log.stat().st_size if log.exists() else 0
            at = time.time()
            tree = start(
                self._argv(plan),
                cwd=self._root,
                env=program_environment(
                    self._root,
                    **self._changes(plan),
                    **{TOKEN: token, SPENT: str(plan.spent_s)},
                ),
                log=log,
                python=self._python,
                grace_s=self._grace_s,
                lock=lock,
            )
        finally:
            os.close(lock)  # the guard and torchrun hold it now
        return tree, at, before

    def _start_recorder(self, job: _Job) -> None:
        """Start the recorder of a run."""
        recorders, tree = self._recorders, job.tree
        if recorders is None or tree is None:
            return
        if job.nodes is not None:  # each agent has its own
            job.state = replace(job.state, records_gpus=job.plan.cuda)
            return
        others = [other for other in self._in(JobPhase.RUNNING) if other is not job]
        shared = self._limits.on(gpus=job.plan.cuda).jobs != 1
        taken = {gpu for other in others for gpu in other.seen or ()}
        job.seen = recorders.seen(job.plan, taken, shared=shared)
        job.state = replace(job.state, records_gpus=job.seen is not None and (job.plan.cuda or recorders.simulated))
        job.recorder = recorders.start(job.plan, tree, gpus=job.seen, since=job.state.started)

    def _wait_for_earlier(self, job: _Job) -> None:
        """Wait for the processes of an earlier attempt to exit, and kill those that do not."""
        now = time.monotonic()
        job.waits_since = job.waits_since if job.waits_since is not None else now
        # A search of all processes takes milliseconds, and a poll is due ten times per second.
        if now - job.looked_at < LOOK_S:
            return
        job.looked_at = now
        others = members(job.plan.dir)
        who = f": {', '.join(map(str, others))}" if others else f" ({job.plan.dir.lock} is locked)"
        job.state = replace(job.state, reason=f"waiting for an earlier attempt to exit{who}")
        # An earlier guard, or torchrun, kills its run after the grace period. Two margins, since its own kill may take
        # one; then the processes are stuck, or stopped, and would keep the run from starting forever.
        if now - job.waits_since <= self._grace_s + 2 * MARGIN_S:
            return
        # Counted from the kill: this process may have been suspended, or starved, in the meantime.
        job.killed_at = now if job.killed_at is None else job.killed_at
        if now - job.killed_at > KILLED_S:
            self._give_up(job, f"could not be started: an earlier attempt is still running{who}")
        else:
            kill(others)

    def _give_up(self, job: _Job, reason: str) -> None:
        job.state = JobState(phase=JobPhase.ENDED, ended=time.time(), reason=reason)

    def _watch(self, job: _Job) -> None:
        tree, now, limit = job.tree, time.monotonic(), job.plan.timeout_s
        if tree is None:
            return
        code = tree.poll() if job.code is None else job.code
        lost = self._lost(job, code)
        if code is not None:
            job.code = code
            if lost is not None:
                self._set_ended(job, code)
            return
        self._watch_recorder(job)
        if not lost and job.nodes is not None and (alone := job.nodes.overdue()) is not None:
            # Of its ranks, their own reports tell more.
            kind = PREEMPTED if alone.signals else NCCL
            if alone.signals or not alone.exits:
                job.state = replace(job.state, reason=_alone_text(alone), kind=kind)
            self._set_ended(job, self._kill(job, tree))
        elif lost or (job.kill_deadline is not None and now > job.kill_deadline):
            self._set_ended(job, self._kill(job, tree))
        elif limit and job.kill_deadline is None and now - job.started_at > limit:
            job.state = replace(job.state, reason=f"took longer than {limit:g} s", kind=TIMEOUT)
            self._stop(job)
        elif job.preparation is not None and job.unprepared is None and (failed := job.preparation.poll()):
            job.unprepared = failed  # `_set_ended` says why: the log is complete then
            self._stop(job)

    def _lost(self, job: _Job, code: int | None) -> Sequence[str] | None:
        """Return the hosts that a run has lost, and note them; None while they are asked after its end."""
        if job.nodes is None or job.state.cancelled or code == 0:
            return ()
        lost = job.nodes.poll() if code is None else job.nodes.after_end()
        if lost:
            reason = f"{' and '.join(lost)} {'does' if len(lost) == 1 else 'do'} not answer"
            job.state = replace(job.state, reason=reason, kind=NODE_LOST)
            self.lost_hosts += [host for host in lost if host not in self.lost_hosts]
        return lost

    def _kill(self, job: _Job, tree: ProcessTree) -> int:
        """Kill all processes of a run, on all of its nodes; return the exit code."""
        self._spread.kill(job.plan)
        return tree.kill()

    def _watch_recorder(self, job: _Job) -> None:
        """Restart a recorder that was killed, which appends to the recording; one that exited with an error is not."""
        recorder, recorders, tree = job.recorder, self._recorders, job.tree
        # poll() is None while it runs and negative after a signal. After an error of its own it would only fail again.
        if recorder is None or recorders is None or tree is None or (recorder.poll() or 0) >= 0:
            return
        deaths = job.state.recorder_deaths + 1
        job.state = replace(job.state, recorder_deaths=deaths)
        again = deaths <= MOST_RECORDERS
        start = job.state.started
        job.recorder = recorders.start(job.plan, tree, gpus=job.seen, since=start) if again else None

    def _stop(self, job: _Job) -> None:
        if job.tree is not None and job.kill_deadline is None:
            job.kill_deadline = time.monotonic() + self._grace_s + MARGIN_S
            if not self._spread.stop(job.plan):
                job.tree.stop()

    def _set_ended(self, job: _Job, code: int, *, now: bool = False) -> None:
        seconds = time.monotonic() - job.started_at
        # The wall clock may have been set meanwhile: an end is never before its start.
        ended = max(time.time(), job.state.started or 0.0)
        job.state = replace(job.state, phase=JobPhase.ENDED, ended=ended, seconds=seconds, exit_code=code)
        if job.unprepared is not None:
            job.state = replace(job.state, reason=why_it_failed(job.plan, job.state, job.unprepared), kind=DATA)
        # The recorder first: the tracker uploads its last samples.
        end(job.recorder)
        if self._trackers is not None:
            if now:
                self._trackers.kill(job.plan.dir)
            else:
                self._trackers.end(job.plan.dir)

    def _argv(self, run: RunPlan) -> list[str]:
        return self._spread.argv(run, self._torchrun, self._settings)

    def _changes(self, run: RunPlan) -> dict[str, str]:
        return trainer_variables(run, self._root)


def _alone_text(end: NodeEnd) -> str:
    """Return how a node ended before the others, which then waited for it."""
    signals = ", ".join(dict.fromkeys(end.signals))
    how = f"was sent {signals}" if signals else f"ended with exit status {end.exit_code}"
    return f"node {end.node} ({end.host}) {how}, and the other nodes waited for it"


def trainer_variables(run: RunPlan, root: Path) -> dict[str, str]:
    """Return the environment variables that are set for a run; none of them is secret. root: the checkout."""
    # UUIDs: indices change when a GPU is lost; empty hides all. On several nodes, those of the scheduler stay.
    gpus = {} if run.cuda and run.nodes > 1 else {"CUDA_VISIBLE_DEVICES": ",".join(run.gpus)}
    return {
        **(_allocator_of_gpus() if run.cuda else {**KEEP_MEMORY, **_unless_set(SAME_BITS)}),
        **run.environment,
        **_former_names(run.environment),
        **gpus,
        "OMP_NUM_THREADS": str(run.cpu_threads),  # else torchrun sets 1 if there are several ranks
        "OMP_WAIT_POLICY": "passive",  # spinning threads would take the cores of other ranks
        "PYTHONPATH": extended_path(root),
        "PYTHONUNBUFFERED": "1",  # the log is complete even if the process is killed
    }


def _unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the environment of the runner lacks: the user's values are kept, and recorded."""
    return {name: value for name, value in variables.items() if not os.environ.get(name)}


def _allocator_of_gpus() -> dict[str, str]:
    """Return the options of PyTorch's allocator, unless the user's shell has options, under either name."""
    return {} if os.environ.get(FORMER_ALLOCATOR) else _unless_set(GROW_SEGMENTS)


def _former_names(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the former names of variables of a run that the user's shell sets, with the values of the run."""
    value = environment.get("PYTORCH_ALLOC_CONF")
    # torch 2.13 reads some options of its CUDA allocator under the former name first (c10/cuda/CUDAAllocatorConfig.h).
    return {FORMER_ALLOCATOR: value} if value and FORMER_ALLOCATOR in os.environ else {}


def _problems(run: RunPlan, gpus: int) -> Iterable[str]:
    if run.ranks < 1:
        yield f"{run.ranks} ranks: expected at least 1"
    if run.cuda and run.ranks_per_node > gpus:
        where = f"{run.ranks_per_node} of {run.ranks} ranks per node" if run.nodes > 1 else f"{run.ranks} ranks"
        yield f"{where} on {gpus} GPUs: each rank needs its own"
    if run.cpu_threads < 1:
        yield f"{run.cpu_threads} threads per rank: expected at least 1"
    if not os.access(run.dir.path, os.W_OK):
        yield f"{run.dir.path} is missing or not writable"
        return
    try:
        record = read_json(run.dir.run_json)
    except KmatrixError as error:
        yield str(error).replace("\n", ";")
        return
    if record.get("run_id") != run.run_id:
        yield f"{run.dir.run_json} belongs to run {record.get('run_id')}, expected {run.run_id}"
