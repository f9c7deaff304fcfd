"""Slurm as a scheduler: check, render, submit, find, ask about and cancel the jobs of a matrix."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from kmatrix.engines.base import Capacity, JobRules, NodeKind, Partition
from kmatrix.engines.slurm import capacity as cluster
from kmatrix.engines.slurm.arrays import by_array, hosts_of, short_jobs, split_job, tasks_of
from kmatrix.engines.slurm.commands import QueueLine, refusal_of, sacct, sbatch, scancel, squeue
from kmatrix.engines.slurm.script import JobPlace, render_script, time_text
from kmatrix.engines.slurm.settings import SlurmSettings, read_settings
from kmatrix.packing import fewest_nodes
from kmatrix.records.jobs.files import LIVE, JobView, SchedulerPhase, Shape, SubmissionFile
from kmatrix.records.jobs.paths import SubmissionDir
from kmatrix.records.paths import ROOT
from kmatrix.text import duration, memory_size, plural

# States of squeue(1), "JOB STATE CODES".
PENDING = frozenset({
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
})  # fmt: skip
# Why a job waits (squeue(1), "JOB REASON CODES") -> a sentence.
WAITS = {
    "Resources": "waits for free nodes",
    "Priority": "other jobs come first",
    "None": "is not looked at yet",
    "Dependency": "waits until other jobs have ended",
    "DependencyNeverSatisfied": "waits for a job that will never end well: cancel it",
    "JobArrayTaskLimit": "as many jobs run as PARALLEL_JOBS allows",
    "BeginTime": "waits for its begin time: that of --begin, or about two minutes after a restart",
    "JobHeldUser": "is held: scontrol release starts it",
    "JobHeldAdmin": "is held by an administrator of the cluster",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionTimeLimit": "its time limit is above that of the partition: SLURM_TIME",
    "PartitionNodeLimit": "asks for more nodes than a job of the partition may have: NUM_NODES",
    "PartitionConfig": "asks for more than the partition has, or allows: it never starts",
    "BadConstraints": "no node has what it asks for",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a license",
    "InvalidAccount": "the account is not valid: SLURM_ACCOUNT",
    "InvalidQOS": "the quality of service is not valid: SLURM_QOS",
    "AccountNotAllowed": "the account may not use the partition: SLURM_ACCOUNT",
    "QOSNotAllowed": "the quality of service may not use the partition: SLURM_QOS",
    "NodeDown": "a node that it needs is down",
    "launch failed requeued held": "could not be started on its node, and is held: scontrol release tries again",
}
# Why a job in such a state does not run; its reason is about something else.
HALTS = {
    "CONFIGURING": "its nodes are being started",
    "RESV_DEL_HOLD": "its reservation was deleted, and it is held: scontrol release starts it",
    "SPECIAL_EXIT": "is held: scontrol release starts it",
    "SUSPENDED": "is suspended, with all of its processes: an administrator can resume it",
}
# The shape was checked before: then this is about nodes that are away, as after a restart of the controller.
NOT_AVAILABLE = "node configuration is not available"
AWAY = "too few of its nodes answer now; `sinfo -R` lists the others; repeat the command when they are back"
# Words of a refusal (slurm_errno.c) -> what to look at.
ABOUT = {
    "feature": "--constraint in SLURM_EXTRA_FLAGS",
    "reservation": "--reservation in SLURM_EXTRA_FLAGS",
    "account": "SLURM_ACCOUNT",
    "qos": "SLURM_QOS",
    "node name": "--nodelist and --exclude in SLURM_EXTRA_FLAGS",
}
START_S = 600.0  # of a job before its first step: modules, a copy of the data, torch, compilation
LIMITS = {"Assoc": "a limit of your account is reached", "QOS": "a limit of the quality of service is reached"}
# States of a job that has ended -> how.
ENDED = {
    "BOOT_FAIL": "its node could not be started",
    "CANCELLED": "was cancelled",
    "COMPLETED": "",
    "DEADLINE": "has missed its deadline",
    "FAILED": "ended with an error",
    "NODE_FAIL": "one of its nodes failed",
    "OUT_OF_MEMORY": "used more memory than it asked for: SLURM_MEMORY",
    "PREEMPTED": "was preempted",
    "REVOKED": "was taken away",
    "TIMEOUT": "reached its time limit",
}


class SlurmScheduler:
    """The Slurm of this machine, for the jobs of one matrix. It fulfils `engines.base.Scheduler`."""

    name = "Slurm"

    def __init__(self, symbols: Mapping[str, str], place: JobPlace | None = None) -> None:
        """Read the settings. symbols: symbol -> value.  place: of the programs of jobs; None: those of this process.

        Raises ConfigError for an invalid setting.
        """
        self.settings = read_settings(symbols, os.environ)
        self.place = place or JobPlace(root=ROOT, python=Path(sys.executable))
        self._capacity: Capacity | None = None

    def capacity(self) -> Capacity:
        """Return what the cluster has, of nodes with the wanted type of GPU. Asked once."""
        if self._capacity is None:
            self._capacity = cluster.capacity(self.settings.gpu_type)
        return self._capacity

    def rules(self) -> JobRules:
        """Return how jobs are cut from the runs of a matrix, by its settings and by its partition."""
        settings, known = self.settings, self.capacity()
        partition = known.partition(settings.partition)
        kinds = partition.kinds if partition else ()
        shares = [kind.cpus // kind.gpus for kind in kinds if kind.cpus and kind.gpus]
        cpus = [kind.cpus for kind in kinds if kind.cpus is not None and (kind.gpus or not shares)]
        return JobRules(
            most_tasks=known.most_tasks,
            memory_mib=settings.memory_mib,
            # Of the nodes with the fewest CPUs per GPU, so that a job may start on each of them.
            cpus_per_gpu=settings.cpus_per_gpu or max(1, min(shares)) if shares or settings.cpus_per_gpu else None,
            cpus_per_node=min(cpus, default=None),
            gpus_per_node=settings.gpus_per_node or (partition.gpus_per_node if partition else 0),
            whole_nodes=settings.exclusive or settings.pack_nodes,
            pack=settings.pack_nodes,
            has_times=True,
            seconds=settings.seconds,
            time_factor=settings.time_factor,
            around_s=START_S + settings.notice_s,
            most_seconds=partition.seconds if partition else None,
            default_seconds=partition.default_s if partition else None,
        )

    def check(self, submissions: Sequence[SubmissionFile]) -> list[str]:
        """Return why these submissions would be refused, or would never start: one sentence each, with the fix.

        Slurm itself accepts jobs that it never starts: 5 days on a partition of 2, or 9 nodes of 3 (22.05).
        """
        known = self.capacity()
        shapes = list(dict.fromkeys(one.shape for one in submissions))
        problems = list(dict.fromkeys(self._problems(known, submissions, shapes)))
        if not problems:
            example = {one.shape: one for one in submissions}
            problems = [f"sbatch refuses the job: {why}" for shape in shapes if (why := self._test(example[shape]))]
        return list(dict.fromkeys(problems))

    def check_paths(self, paths: Collection[Path]) -> list[str]:
        """Return none: nodes see the storage of the login node, and `make doctor` tries it."""
        del paths
        return []

    def _problems(
        self, known: Capacity, submissions: Sequence[SubmissionFile], shapes: Sequence[Shape]
    ) -> Iterator[str]:
        if self.settings.setup is not None and not self.settings.setup.is_file():
            yield f"SLURM_SETUP={self.settings.setup}: {_not_a_file(self.settings.setup)}"
        shortest = min((shape.seconds for shape in shapes if shape.seconds is not None), default=math.inf)
        if shortest <= self.settings.notice_s:
            yield (
                f"SLURM_NOTICE={self.settings.notice_s} is not less than the time limit of a job, {duration(shortest)}:"
                " its runs would be stopped at their start; pass a longer SLURM_TIME= or a smaller SLURM_NOTICE="
            )
        if not known.partitions:
            return  # the nodes are not shown to users here: Slurm decides
        partition = known.partition(self.settings.partition)
        if partition is None:
            yield no_partition(known, self.settings.partition)
            return
        if not partition.is_up:
            yield f"the partition {partition.name} is not up: jobs would wait; pass SLURM_PARTITION=<another>"
        for shape in shapes:
            yield from shape_problems(shape, partition, self.settings)
        longest = max((len(one.shares) for one in submissions), default=0)
        if known.most_tasks is not None and longest > known.most_tasks:
            yield f"an array of {longest:,} jobs: the cluster allows {known.most_tasks:,}"

    def _test(self, submission: SubmissionFile) -> str:
        """Return why Slurm refuses a submission, "" if it does not say so."""
        # The folder need not exist: the script is read from stdin, and nothing is started.
        folder = SubmissionDir(Path("/nonexistent/jobs/0001"))
        why = refusal_of(render_script(folder, submission, self.settings, self.place))
        fix = next((f"see {name}" for word, name in ABOUT.items() if word in why.lower()), "")
        return f"{why}: {AWAY}" if NOT_AVAILABLE in why else f"{why}; {fix}" if fix else why

    def render(self, folder: SubmissionDir, submission: SubmissionFile) -> dict[str, str]:
        """Return file name -> text of the script."""
        return {folder.sbatch.name: render_script(folder, submission, self.settings, self.place)}

    def submit(self, folder: SubmissionDir, submission: SubmissionFile, after: Sequence[str] = ()) -> str:
        """Submit the script of a submission, which is written; return the id of the job. See the protocol."""
        del submission  # the script is what counts: the user may have edited it
        options = [f"--dependency=afterany:{':'.join(after)}"] if after else []
        return sbatch(folder.sbatch, options)

    def find(self, labels: Collection[str]) -> Mapping[str, str]:
        """Return label -> job id, of the jobs that Slurm knows: also those that ended some minutes ago."""
        wanted = set(labels)
        lines = [line for line in squeue() if line.comment in wanted]
        # Those that run or wait last: of two jobs with one label, a script that was submitted twice, they count.
        lines.sort(key=lambda line: is_live(line.state))
        return {line.comment: split_job(line.job)[0] for line in lines}

    def poll(self, jobs: Mapping[str, str]) -> Mapping[str, JobView]:
        """Return share id -> view, with one question to Slurm, and one to accounting for jobs that it has forgotten."""
        wanted = by_array(jobs)
        found: dict[str, JobView] = {}
        lines = squeue()
        for line in lines:
            base = line.job.partition("_")[0]
            for task in tasks_of(line.job) if base in wanted else ():
                if (key := wanted[base].get(task)) is not None:
                    found[key] = _view(jobs[key], line)
        # Waiting tasks of an array that were cancelled together are one line with the id of the array alone; a share of
        # a job without an array is named with or without its task.
        for line in lines:
            for key in wanted.get(line.job, {}).values():
                found.setdefault(key, _view(jobs[key], line))
        aged = [key for key in jobs if key not in found]
        states = self._accounting([jobs[key] for key in aged]) if aged else {}
        for key in aged:
            found[key] = _aged_view(jobs[key], states.get(jobs[key], ""))
        return found

    def _accounting(self, jobs: Collection[str]) -> Mapping[str, str]:
        """Return job -> state of ended jobs, empty without accounting."""
        if not self.capacity().has_accounting:
            return {}
        found: dict[str, str] = {}
        for job, state in sacct(sorted({split_job(job)[0] for job in jobs})).items():
            base = job.partition("_")[0]
            found.update((base if task is None else f"{base}_{task}", state) for task in tasks_of(job))
        return found

    def cancel(self, jobs: Collection[str], *, now: bool = False) -> None:
        """Ask jobs to save checkpoints and end; pending ones end at once. now: kill them."""
        ids = short_jobs(jobs)
        if not ids:
            return
        if now:
            # Of KILL, Slurm makes a usual end: SIGTERM, and SIGKILL after KillWait (measured with 22.05.8). SIGALRM
            # reaches all processes at once; none of ours handles it.
            scancel(ids, "--signal=ALRM", "--full")
            scancel(ids)  # those that wait have no processes
            return
        # Without --state=PENDING: with it, 22.05 cancels all waiting tasks of the array, not only these.
        scancel(ids)


def phase_of(state: str) -> SchedulerPhase:
    """Return the phase of a job in a state of squeue or sacct."""
    if state in PENDING:
        return SchedulerPhase.PENDING
    # Others, also those that a later version adds, are of a job that has its nodes, as one that completes: a second job
    # for its runs would be worse than none.
    return SchedulerPhase.ENDED if state in ENDED else SchedulerPhase.RUNNING


def is_live(state: str) -> bool:
    """Return whether a job in this state waits or runs."""
    return phase_of(state) in LIVE


def _view(job: str, line: QueueLine) -> JobView:
    state = line.state.split()[0] if line.state else ""
    phase = phase_of(state)
    pending = phase is SchedulerPhase.PENDING
    halts = f"{HALTS[state]} ({state})" if state in HALTS else ""
    has_ended = phase is SchedulerPhase.ENDED
    reason = halts or (wait_text(line.reason) if pending else ENDED.get(state, "") if has_ended else "")
    return JobView(
        job=job,
        phase=phase,
        state=state,
        reason=reason,
        nodes=hosts_of(line.nodes),
        starts=line.start if pending else None,
        label=line.comment or "no comment",
    )


def _aged_view(job: str, state: str) -> JobView:
    if is_live(state):  # accounting is late: squeue does not know it any more
        state = ""
    if not state:
        return JobView(job=job, phase=SchedulerPhase.UNKNOWN, reason="Slurm does not know the job any more")
    return JobView(job=job, phase=SchedulerPhase.ENDED, state=state, reason=ENDED.get(state, ""))


def _not_a_file(path: Path) -> str:
    return "not a file" if path.exists() else "no such file"


def wait_text(reason: str) -> str:
    """Return why a job waits, as a sentence with Slurm's own word.

    >>> wait_text("Resources"), wait_text("QOSMaxGRESPerUser")
    ('waits for free nodes (Resources)', 'a limit of the quality of service is reached (QOSMaxGRESPerUser)')
    """
    word = reason.split(",", maxsplit=1)[0].strip("() ")
    text = WAITS.get(word) or next((text for start, text in LIMITS.items() if word.startswith(start)), "")
    return f"{text} ({reason.strip('()')})" if text else reason.strip("()")


def no_partition(known: Capacity, asked: str) -> str:
    """Return the sentence for a partition that does not exist, or a cluster without a default one."""
    names = ", ".join(sorted(one.name for one in known.partitions))
    if asked:
        return f"SLURM_PARTITION={asked}: the cluster has no such partition; known are {names}"
    return f"the cluster has no default partition: pass SLURM_PARTITION=<one of {names}>"


def shape_problems(shape: Shape, partition: Partition, settings: SlurmSettings) -> Iterator[str]:
    """Yield why jobs of a shape never start on a partition: one sentence each, with the fix."""
    where = f"the partition {partition.name}"
    if shape.seconds is not None and partition.seconds is not None and shape.seconds > partition.seconds:
        limit = time_text(partition.seconds)
        yield (
            f"SLURM_TIME={time_text(shape.seconds)} is above the limit of {where}: pass SLURM_TIME={limit}; "
            "runs that take longer save checkpoints, and their jobs start again"
        )
    if partition.most_nodes is not None and shape.nodes > partition.most_nodes:
        most = partition.most_nodes
        yield f"{plural(shape.nodes, 'node')} per run: {where} allows {most}; {_fewer_nodes(shape, partition, most)}"
    yield from _gpu_problems(shape, partition, settings, where)
    fitting = [kind for kind in partition.kinds if not shape.gpus_per_node or kind.gpus >= shape.gpus_per_node]
    if fitting:
        yield from _node_problems(shape, partition, fitting, where)


def _gpu_problems(shape: Shape, partition: Partition, settings: SlurmSettings, where: str) -> Iterator[str]:
    if not partition.kinds:
        wanted = f"GPUs of the type {settings.gpu_type}" if settings.gpu_type else "nodes"
        yield f"{where} has no {wanted}: `sinfo -o '%P %G'` lists the types; pass SLURM_GPU_TYPE= or SLURM_PARTITION="
    elif shape.gpus_per_node > partition.gpus_per_node:
        total, most = shape.gpus_per_node * shape.nodes, partition.gpus_per_node
        if not most:
            yield f"{where} has no GPUs: pass SLURM_PARTITION=<one with GPUs>, or DEVICE=cpu"
            return
        yield (
            f"{plural(shape.gpus_per_node, 'GPU')} on one node: nodes of {where} have {most}; "
            f"pass NUM_NODES={fewest_nodes(total, most)}"
        )


def _node_problems(shape: Shape, partition: Partition, fitting: Sequence[NodeKind], where: str) -> Iterator[str]:
    there = sum(kind.count for kind in fitting)
    what = f" with {plural(shape.gpus_per_node, 'GPU')}" if shape.gpus_per_node else ""
    if shape.nodes > there:
        nodes = plural(shape.nodes, "node")
        fix = _fewer_nodes(shape, partition, there)
        yield f"{nodes} per run: {where} has {plural(there, 'node')}{what}; {fix}"
    cpus = _most([kind.cpus for kind in fitting])
    if cpus is not None and shape.cpus_per_node > cpus:
        fix = (
            f"SLURM_CPUS_PER_GPU={max(1, cpus // shape.gpus_per_node)}"
            if shape.gpus_per_node
            else "a smaller CPU_THREADS="
        )
        yield f"{plural(shape.cpus_per_node, 'CPU')} per node: nodes of {where} have {cpus}; pass {fix}"
    memory = _most([kind.memory_mib for kind in fitting])
    limits = [size for size in (memory, partition.memory_mib) if size]
    if shape.memory_mib and limits and shape.memory_mib > min(limits):
        size, least = memory_size(min(limits) * 2**20), min(limits)
        fix = f"pass SLURM_MEMORY={least}M, or 0 for all"
        yield f"SLURM_MEMORY={shape.memory_mib}M: nodes of {where} have {size}; {fix}"


def _fewer_nodes(shape: Shape, partition: Partition, most: int) -> str:
    """Return what to pass for a run on at most this many nodes: with all of its ranks, if they fit there."""
    ranks = shape.nodes * shape.ranks_per_node
    fits = ranks % most == 0 and (not shape.gpus_per_node or ranks // most <= partition.gpus_per_node)
    return f"pass NUM_NODES={most}" if fits else f"pass NUM_GPUS={most * shape.ranks_per_node} NUM_NODES={most}"


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
