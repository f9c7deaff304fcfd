"""Render the script that sbatch gets. Users look at it, and edit it: it says what it does."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.engines.slurm.settings import SlurmSettings
from kmatrix.errors import LaunchError
from kmatrix.records.jobs.files import REPORT, Shape, SubmissionFile
from kmatrix.records.jobs.paths import SubmissionDir
from kmatrix.records.paths import program_path
from kmatrix.text import plural

TEMPLATES = Path(__file__).parent
NODE_FLAGS = ("--nodel", "-w", "--nodef", "-F")  # --nodelist and --nodefile, which getopt_long(3) also takes shorter
# Characters that a value of a #SBATCH line may have without quotes: a blank ends a value, # starts a comment.
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=,@%+-&|()[]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Where the programs of a job are, on storage that all nodes share."""

    root: Path  # of the checkout
    python: Path  # interpreter with torch


def render_script(folder: SubmissionDir, submission: SubmissionFile, settings: SlurmSettings, place: JobPlace) -> str:
    """Return the script of a submission. Raises LaunchError if a path cannot be written into it."""
    directives = [directive(*flag) for flag in _flags(folder, submission, settings)]
    directives += [" ".join(_quoted(word) for word in flag) for flag in _extra_flags(submission, settings)]
    matrix = folder.share(0).path
    for path in (matrix, place.root, place.python, settings.setup or matrix):
        _quoted(str(path))  # a line break would end a comment of the script
    text: str = _template("job.sbatch.j2").render(
        number=folder.number,
        matrix=matrix,
        content=_content(submission),
        directives=directives,
        setup=settings.setup,
        path=program_path(place.root),
        root=place.root,
        python=place.python,
    )
    return text


def _memory(mib: int) -> str:
    return f"{mib}M" if mib else "0"


def _template(name: str) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # a shell script, not HTML: values are quoted for the shell
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(name)


def _content(submission: SubmissionFile) -> str:
    shape = submission.shape
    if submission.kind == REPORT:
        return f"{'the next seeds, or ' if submission.seeds else ''}the report, after all runs"
    runs = sum(len(share.runs) for share in submission.shares)
    each = plural(shape.nodes, "node")
    each += (
        f" with {plural(shape.gpus_per_node, 'GPU')}"
        if shape.gpus_per_node
        else f" with {plural(shape.cpus_per_node, 'CPU')}"
    )
    return f"{plural(runs, 'run')} in {plural(len(submission.shares), 'job')} of {each}"


def _flags(folder: SubmissionDir, submission: SubmissionFile, settings: SlurmSettings) -> Iterator[tuple[str, str]]:
    """Yield the flags of sbatch, those of SLURM_EXTRA_FLAGS excluded."""
    shape = submission.shape
    yield "--job-name", f"kmatrix-{folder.number}"
    yield "--comment", submission.label
    last = len(submission.shares) - 1
    if last > 0:
        most = f"%{settings.parallel_jobs}" if settings.parallel_jobs else ""
        yield "--array", f"0-{last}{most}"
    yield "--output", log_pattern(folder, array=last > 0)
    yield "--open-mode", "append"  # a job that starts again goes on with its log
    yield from _place(settings)
    yield "--nodes", str(shape.nodes)
    yield "--ntasks-per-node", "1"
    yield "--cpus-per-task", str(shape.cpus_per_node)
    if shape.gpus_per_node:
        yield _gpus(shape, settings)
    if shape.memory_mib is not None:
        yield "--mem", _memory(shape.memory_mib)
    # Packed runs have all CPUs that the smallest node has: a larger node would have room for other jobs.
    if (settings.exclusive or settings.pack_nodes) and submission.kind == "runs":
        yield "--exclusive", ""
    if shape.seconds is not None:
        yield "--time", time_text(shape.seconds)
    if submission.kind != REPORT:  # it has nothing to save, and would die from the signal
        yield "--signal", f"B:USR1@{settings.notice_s}"  # B: only the runner, not the ranks
    yield ("--requeue", "") if settings.restarts else ("--no-requeue", "")


def _extra_flags(submission: SubmissionFile, settings: SlurmSettings) -> Iterator[tuple[str, ...]]:
    """Yield SLURM_EXTRA_FLAGS; for the report, which has one node, without those that name the nodes of runs."""
    for flag in settings.extra_flags:
        if submission.kind != REPORT or not flag[0].startswith(NODE_FLAGS):
            yield flag


def _place(settings: SlurmSettings) -> Iterator[tuple[str, str]]:
    known = {
        "--partition": settings.partition,
        "--account": settings.account,
        "--qos": settings.qos,
    }
    yield from ((name, value) for name, value in known.items() if value)


def _gpus(shape: Shape, settings: SlurmSettings) -> tuple[str, str]:
    """Return the flag that asks for GPUs. There is one task per node, so per task and per node are the same."""
    words = [settings.gpu_type, str(shape.gpus_per_node)]
    name = "--gres" if settings.gpu_flag == "gres" else f"--{settings.gpu_flag}"
    return name, ":".join(word for word in (["gpu", *words] if name == "--gres" else words) if word)


def time_text(seconds: float) -> str:
    """Return a time limit as Slurm writes it, in whole minutes.

    >>> time_text(90), time_text(3600), time_text(187_200)
    ('00:02:00', '01:00:00', '2-04:00:00')
    """
    minutes = max(1, math.ceil(seconds / 60))
    days, hours, rest = minutes // 1440, minutes // 60 % 24, minutes % 60
    return (f"{days}-" if days else "") + f"{hours:02d}:{rest:02d}:00"


def log_pattern(folder: SubmissionDir, *, array: bool) -> str:
    """Return --output of a submission: slurm.log in the folder of each share.

    Raises LaunchError for a path that Slurm would read as something else (sbatch(1), "filename pattern").
    """
    path = folder.share(0).log
    if "\\" in str(path):
        raise LaunchError(f"{path}: a path with a backslash cannot be the log of a job", hint="use another RESULTS_DIR")
    parent = str(folder.path).replace("%", "%%")
    return f"{parent}/{'%a' if array else '0'}/{path.name}"


def directive(name: str, value: str) -> str:
    """Return a flag as it stands on an #SBATCH line."""
    return f"{name}={_quoted(value)}" if value else name


def _quoted(word: str) -> str:
    """Return a word of an #SBATCH line, in quotes if it needs them. Raises LaunchError if no quotes would help."""
    if not word.isprintable():
        raise LaunchError(f"{word!a} has control characters", hint="remove them")
    if set(word) <= PLAIN:
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
