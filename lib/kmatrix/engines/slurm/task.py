"""Submit a task, a job of one node that trains nothing, and ask about it. The same task has one job at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kmatrix.engines.slurm.arrays import hosts_of
from kmatrix.engines.slurm.capacity import capacity
from kmatrix.engines.slurm.commands import refusal_of, sbatch, squeue
from kmatrix.engines.slurm.scheduler import ENDED, PENDING, is_live, no_partition, shape_problems, wait_text
from kmatrix.engines.slurm.script import JobPlace, Task, render_task
from kmatrix.engines.slurm.settings import SlurmSettings
from kmatrix.errors import LaunchError
from kmatrix.records.files import write_bytes
from kmatrix.records.jobs.claim import is_listed
from kmatrix.records.jobs.files import Shape
from kmatrix.records.lock import try_lock

MOST_CPUS = 16  # of a task; more would wait longer for a node


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """What Slurm says about the job of a task."""

    job: str = ""  # "": Slurm knows none
    is_live: bool = False  # it waits or runs
    message: str = ""  # why it waits, on which node it runs, or how it ended


def task_shape(settings: SlurmSettings) -> tuple[int, float | None]:
    """Return CPUs and time limit (s) of a task with these settings, None for the partition's default.

    Raises LaunchError if the cluster has no place for it, UnreachableError without an answer.
    """
    known = capacity()
    partition = known.partition(settings.partition)
    if known.partitions and partition is None:
        raise LaunchError(f"Slurm cannot run this: {no_partition(known, settings.partition)}")
    cpus = [kind.cpus for kind in partition.kinds if kind.cpus] if partition else []
    wanted = settings.cpus_per_gpu or min([MOST_CPUS, *cpus])
    seconds = settings.seconds or (partition.seconds if partition else None)
    shape = Shape(cpus_per_node=wanted, memory_mib=settings.memory_mib, seconds=seconds)
    problem = next(shape_problems(shape, partition, settings), "") if partition else ""
    if problem:
        raise LaunchError(f"Slurm cannot run this: {problem}")
    return wanted, seconds


def submit_task(task: Task, settings: SlurmSettings, place: JobPlace) -> tuple[str, bool]:
    """Return the job of a task, and whether it was submitted now: one that waits or runs is not submitted again.

    Raises LaunchError if Slurm refuses it, or if another process submits it now.
    """
    task.folder.mkdir(parents=True, exist_ok=True)
    lock = try_lock(task.folder / ".lock")
    if lock is None:
        raise LaunchError(f"another process submits {task.name} now", hint="repeat the command")
    try:
        if (known := view_task(task)).is_live:
            return known.job, False
        text = render_task(task, settings, place)
        if why := refusal_of(text):
            raise LaunchError(f"Slurm cannot run this: {why}")
        for path in (task.end, task.log):  # of an earlier job
            path.unlink(missing_ok=True)
        write_bytes(task.script, text.encode())
        os.set_inheritable(lock, True)  # sbatch keeps it, whatever ends this process
        return sbatch(task.script), True
    finally:
        os.close(lock)


def view_task(task: Task) -> TaskView:
    """Return what Slurm knows about the newest job of a task. Raises UnreachableError without an answer."""
    lines = [line for line in squeue() if line.comment == task.label and line.job.isdecimal()]
    live = [line for line in lines if is_live(line.state)]
    line = max(live or lines, key=lambda line: int(line.job), default=None)
    if line is None:
        return TaskView()
    if line.state in PENDING:
        return TaskView(job=line.job, is_live=True, message=wait_text(line.reason))
    if is_live(line.state):
        return TaskView(job=line.job, is_live=True, message=f"runs on {' '.join(hosts_of(line.nodes))}")
    return TaskView(job=line.job, message=ENDED.get(line.state) or line.state.lower())


def exit_status(task: Task) -> int | None:
    """Return the exit status that a task has written, None before its end."""
    if not is_listed(task.end):
        return None
    try:
        text = task.end.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdecimal() else 1
