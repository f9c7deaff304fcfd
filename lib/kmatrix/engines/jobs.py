"""Submit runs to a scheduler, and find their jobs again by name: the scheduler alone knows which jobs exist.

jobs/N/ of a matrix has `runs` (line k: the runs of task k; none: the job after all others), the script or manifest that
was submitted, and a log per task. mkdir gives N to one submitter. One that was killed leaves a folder without a job, or
a job that the next look finds by its name.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from kmatrix.engines.ports import Batch, Phase, Scheduler, Seen, Shape, UnreachableError, label_of
from kmatrix.records import files
from kmatrix.records.matrix import Plan, read_plan
from kmatrix.text import duration, plural

START_S = 600.0  # of a job before its first step: modules, torch, compilation
# Limit and step (s): time limits are rounded up, so that runs of similar length are one array, and short jobs stay so.
STEPS = ((3600, 600), (4 * 3600, 1800), (12 * 3600, 3600), (86400, 7200), (inf, 21600))


def submit(
    matrix: Path,
    scheduler: Scheduler,
    wanted: Mapping[str, Shape],
    say: Callable[[str], object],
    *,
    last: Shape | None = None,
    node: Shape | None = None,
) -> int:
    """Submit those of these runs that have no live job, the widest and longest first; return their number.

    say: called with one line per job.  last: of the job after all others, which takes the place of one that waits.
    node: a whole node, into which smaller runs are packed; None: each run is a job.
    Raises LaunchError before anything is made if a job would never start, or the scheduler does not answer.
    """
    live = [(job, runs) for job, runs in _jobs(matrix, scheduler) if job.phase is not Phase.ENDED]
    busy = {run for _, runs in live for run in runs}
    todo = {run: shape for run, shape in wanted.items() if run not in busy}
    lines = list(_packed(todo, node)) if node else [(shape, run) for run, shape in todo.items()]
    if problem := next(scheduler.check([*dict.fromkeys(shape for shape, _ in lines), *filter(None, [last])]), None):
        raise problem
    before = [job.id for job, runs in live if runs]
    for shape, tasks in _batches(lines, scheduler):
        before.append(_submit(scheduler, _new_batch(matrix, shape, tasks), say))
    waiting = [job for job, runs in live if not runs and job.phase is Phase.WAITS]
    newest = [job for job, _ in live][-1:]  # it waits for all others, if it waits as the last one
    if last is not None and before and (todo or newest != waiting[-1:]):
        _submit(scheduler, _new_batch(matrix, last, (), is_last=True), say, after=before)
        scheduler.cancel([job.id for job in waiting])
    return len(todo)


def describe(planned: Mapping[str, Shape], scheduler: Scheduler) -> list[str]:
    """Return one line per submission that these runs would be. Raises LaunchError if one of them would never start."""
    wanted, node = {run: scheduler.fit(shape) for run, shape in planned.items()}, scheduler.whole_node
    lines = list(_packed(wanted, node)) if node else [(shape, run) for run, shape in wanted.items()]
    if problem := next(scheduler.check([*dict.fromkeys(shape for shape, _ in lines), scheduler.last]), None):
        raise problem
    batches = _batches(lines, scheduler)
    return [content_of(Batch(folder=Path(), label="", shape=shape, runs=tuple(tasks))) for shape, tasks in batches]


def look(matrix: Path, scheduler: Scheduler) -> dict[str, Seen]:
    """Return run -> its job: the live one, else the newest that the scheduler knows. Raises UnreachableError."""
    return {run: job for job, runs in _jobs(matrix, scheduler) for run in runs}


def cancel(matrix: Path, scheduler: Scheduler) -> int:
    """Cancel the jobs of all runs; return their number. The last job still writes the report."""
    ids = [job.id for job, runs in _jobs(matrix, scheduler) if runs and job.phase is not Phase.ENDED]
    scheduler.cancel(ids)
    return len(ids)


def known_runs(matrix: Path) -> frozenset[str]:
    """Return the runs that ever had a job. Without an attempt, it waits or a person has cancelled it."""
    return frozenset(run for lines in _lines(matrix).values() for line in lines for run in line.split())


@dataclass(kw_only=True)
class ClusterJobs:
    """The jobs of a matrix on a cluster. It fulfils `kmatrix.runner.controller.Jobs`."""

    path: Path  # of the matrix
    scheduler: Scheduler
    say: Callable[[str], object] = print  # called with one line per job
    submitted: int = 0  # runs, by this object
    broken: tuple[str, ...] = ()  # a program that cannot begin is seen on one machine only

    def poll(self) -> dict[str, bool]:
        """Return run -> whether it runs, of live jobs. Raises UnreachableError."""
        jobs = look(self.path, self.scheduler).items()
        return {run: job.phase is Phase.RUNS for run, job in jobs if job.phase is not Phase.ENDED}

    def submit(self, runs: Sequence[str]) -> None:
        """Submit runs, with the job after all others. Raises LaunchError as the function `submit` does."""
        planned, scheduler = shapes(read_plan(self.path)), self.scheduler
        wanted = {run: scheduler.fit(planned[run]) for run in runs}
        last, node = scheduler.last, scheduler.whole_node
        self.submitted += submit(self.path, scheduler, wanted, self.say, last=last, node=node)

    def cancel(self, runs: Sequence[str]) -> None:
        """Ask the jobs of these runs to save and end. Raises UnreachableError."""
        jobs = look(self.path, self.scheduler) if runs else {}
        self.scheduler.cancel([job.id for run, job in jobs.items() if run in runs and job.phase is not Phase.ENDED])


def shapes(plan: Plan) -> dict[str, Shape]:
    """Return what each run needs per node: the threads of its ranks as CPUs, and the expected time (s)."""
    found = {}
    for run in plan.runs:
        train = plan.train_of(run)
        nodes = int(train.get("num_nodes") or 1)
        ranks = int(train.get("num_gpus") or 1) // nodes
        found[run.name] = Shape(
            nodes=nodes,
            gpus=ranks if train.get("device") == "cuda" else 0,
            cpus=ranks * int(train.get("cpu_threads") or 1),
            seconds=None if run.expected_s is None else int(run.expected_s),
        )
    return found


def time_limit(expected_s: float, factor: float = 1.5, around_s: float = START_S) -> int:
    """Return the time limit (s) of a run's job from its estimate, in whole minutes.

    >>> time_limit(1.0), time_limit(3600.0), time_limit(86400.0)
    (1200, 7200, 151200)
    """
    step = next(step for limit, step in STEPS if expected_s * factor + around_s <= limit)
    return int(-(-(expected_s * factor + around_s) // step) * step)


def content_of(batch: Batch) -> str:
    """Describe a submission: 6 runs in 3 jobs, each on 1 node with 2 GPUs, at most 2h00m."""
    if batch.is_last:
        return "the report, after all others"
    shape, runs = batch.shape, sum(len(line.split()) for line in batch.runs)
    packed = f" in {plural(len(batch.runs), 'job')}" if runs > len(batch.runs) else ""
    size = plural(shape.gpus, "GPU") if shape.gpus else plural(shape.cpus, "CPU")
    limit = f", at most {duration(shape.seconds)}" if shape.seconds else ""
    each = ", each" if runs > 1 else ""
    return f"{plural(runs, 'run')}{packed}{each} on {plural(shape.nodes, 'node')} with {size}{limit}"


def template(name: str) -> Any:
    """Return a template of what a scheduler gets. Filters: quote, of a shell, and yaml."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # scripts and manifests, not HTML
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["quote"] = lambda value: shlex.quote(str(value))
    made.filters["yaml"] = lambda value: json.dumps(value, ensure_ascii=False)  # JSON is YAML
    return made.get_template(name)


def _lines(matrix: Path) -> dict[str, list[str]]:
    """Return number of a submission -> its lines, one per task."""
    return {path.parent.name: path.read_text("utf-8").splitlines() for path in (matrix / "jobs").glob("[0-9]*/runs")}


def _jobs(matrix: Path, scheduler: Scheduler) -> list[tuple[Seen, list[str]]]:
    """Return the jobs of a matrix with their runs: those that ended, then live ones, each in their order."""
    lines = _lines(matrix)
    jobs = [job for job in scheduler.poll(label_of(matrix)) if job.number in lines]
    jobs.sort(key=lambda job: (job.phase is not Phase.ENDED, int(job.number)))
    return [(job, " ".join(lines[job.number][job.task : job.task + 1]).split()) for job in jobs]


def _batches(lines: Iterable[tuple[Shape, str]], scheduler: Scheduler) -> Iterator[tuple[Shape, list[str]]]:
    """Yield submissions. Wide and long jobs wait longest for nodes, so they come first."""
    groups: dict[Shape, list[str]] = {}
    for shape, line in lines:
        groups.setdefault(shape, []).append(line)
    for shape in sorted(groups, key=lambda one: (one.nodes * one.gpus, one.nodes, one.seconds or inf), reverse=True):
        most = scheduler.most if shape.nodes == 1 else scheduler.most_wide
        yield from ((shape, groups[shape][first : first + most]) for first in range(0, len(groups[shape]), most))


def _packed(todo: Mapping[str, Shape], node: Shape) -> Iterator[tuple[Shape, str]]:
    """Yield the shape and the line of each job: runs smaller than a node share one, and train at the same time."""
    free: dict[tuple[bool, int], list[list[str]]] = {}  # on GPUs, free GPUs or CPUs -> nodes
    nodes: list[list[str]] = []
    # The longest first: runs of similar length share a node, so that none keeps one alone for long.
    for run, shape in sorted(todo.items(), key=lambda item: -(item[1].seconds or inf)):
        on_gpus, size, room = bool(shape.gpus), shape.gpus or shape.cpus, node.gpus if shape.gpus else node.cpus
        if shape.nodes > 1 or size >= room:
            yield shape, run
            continue
        left = min((key[1] for key, found in free.items() if key[0] == on_gpus and key[1] >= size and found), default=0)
        names = free[on_gpus, left].pop() if left else []
        if not names:
            nodes.append(names)
        names.append(run)
        free.setdefault((on_gpus, (left or room) - size), []).append(names)
    for names in nodes:
        first = todo[names[0]]
        yield replace(first, gpus=node.gpus if first.gpus else 0, cpus=node.cpus), " ".join(names)


def _new_batch(matrix: Path, shape: Shape, tasks: Sequence[str], *, is_last: bool = False) -> Batch:
    """Make the folder of a submission. Raises OSError."""
    jobs = matrix.resolve() / "jobs"
    jobs.mkdir(exist_ok=True)
    highest = max((int(name) for name in files.names(jobs) if name.isdecimal()), default=0)
    for folder in (jobs / f"{number:04d}" for number in count(highest + 1)):
        files.before("mkdir", folder)
        with suppress(FileExistsError):  # of another submitter
            folder.mkdir()
            break
    files.write_text(folder / "runs", "".join(f"{line}\n" for line in tasks))
    return Batch(folder=folder, label=label_of(matrix), shape=shape, runs=tuple(tasks), is_last=is_last)


def _submit(scheduler: Scheduler, batch: Batch, say: Callable[[str], object], after: Sequence[str] = ()) -> str:
    name, text = scheduler.script(batch)
    files.write_text(batch.folder / name, text)
    files.before("submit", batch.folder)
    try:
        say(f"job {(job := scheduler.submit(batch, after))}: {content_of(batch)}")
        return job
    except UnreachableError as error:
        hint = f"`make continue` finds out whether {batch.name} was submitted"
        raise UnreachableError(error.what, why=error.why, hint=hint) from None
