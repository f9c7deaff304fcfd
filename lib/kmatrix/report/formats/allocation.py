"""Allocated hours of a matrix on a cluster, next to those of its attempts and of the training that counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kmatrix.records.jobs.files import SLURM
from kmatrix.records.jobs.usage import HOUR, MatrixUsage
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.text import UNKNOWN, WIDTH, columns, plural, table, wrap

ACCOUNTING = {SLURM: "sacct"}  # where allocated hours come from; elsewhere: the pods


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """Hours of nodes and GPUs. None: unknown, or not comparable with those of jobs."""

    nodes: float | None
    gpus: float | None  # None also on the CPU


def allocated(usage: MatrixUsage) -> Hours:
    """Return the hours that jobs held."""
    return Hours(nodes=usage.node_hours, gpus=usage.gpu_hours or None)


def in_attempts(usage: MatrixUsage, runs: Sequence[RunNumbers]) -> Hours:
    """Return the hours from the launch of each attempt to its end."""
    return _sum(usage, [(run, run.wall_s) for run in runs])


def trained(usage: MatrixUsage, runs: Sequence[RunNumbers]) -> Hours:
    """Return the hours of the training that led to the weights, without steps that were lost and repeated."""
    return _sum(usage, [(run, run.seconds) for run in runs])


def _sum(usage: MatrixUsage, times: Sequence[tuple[RunNumbers, float | None]]) -> Hours:
    """Return the hours of runs that were trained here. times: of each run, s."""
    known = [(run, seconds / HOUR) for run, seconds in times if seconds is not None and not run.reused_from]
    gpus = [hours * run.world_size for run, hours in known if run.device == "gpu" and run.world_size]
    return Hours(
        nodes=None if usage.is_packed else sum(hours * run.num_nodes for run, hours in known),
        gpus=sum(gpus) if usage.gpu_hours else None,
    )


def allocation_object(numbers: MatrixNumbers) -> dict[str, Any] | None:
    """Return the hours of a matrix for results.json, None on one machine and before its first job."""
    usage = numbers.usage
    if usage is None:
        return None
    found: dict[str, Any] = {
        "jobs": usage.jobs,
        "starts": usage.starts,
        "counted_by_accounting": usage.counted,
        "cpu_hours": usage.cpu_hours,
    }
    for name, hours in _rows(usage, numbers.runs):
        found[name] = {"node_hours": hours.nodes, "gpu_hours": hours.gpus, "share": _share(hours, usage)}
    return found


def allocation_lines(numbers: MatrixNumbers) -> list[str]:
    """Return the section of the summary, empty on one machine and before the first job."""
    usage = numbers.usage
    if usage is None:
        return []
    titles = ["", "node-hours", *(["GPU-hours"] if usage.gpu_hours else []), "share"]
    rows = [
        [name, _text(hours.nodes), *([_text(hours.gpus)] if usage.gpu_hours else []), _percent(_share(hours, usage))]
        for name, hours in _rows(usage, numbers.runs)
    ]
    again = f", {plural(usage.starts - usage.jobs, 'restart')}" if usage.starts > usage.jobs else ""
    return [
        *table(columns(titles), rows, WIDTH, rule=True),
        *wrap(f"{plural(usage.jobs, 'job')}{again}, {usage.cpu_hours:.3g} CPU-hours; from {_source(numbers, usage)}"),
        *wrap(
            "allocated: from the start of each job to its end; attempts: from the launch of a run to its end; "
            "trained: the training that led to the weights, without lost steps"
        ),
        *(wrap("runs have shared nodes (PACK_NODES): their node-hours are unknown") if usage.is_packed else []),
        *(wrap("allocated: without the jobs of the matrix that this one is a copy of") if usage.is_copy else []),
    ]


def _rows(usage: MatrixUsage, runs: Sequence[RunNumbers]) -> Iterator[tuple[str, Hours]]:
    yield "allocated", allocated(usage)
    yield "attempts", in_attempts(usage, runs)
    yield "trained", trained(usage, runs)


def _share(hours: Hours, usage: MatrixUsage) -> float | None:
    """Return the share of the allocated hours, of GPUs if there are any; None if it is unknown."""
    whole = allocated(usage)
    part, all_of_it = (hours.gpus, whole.gpus) if whole.gpus else (hours.nodes, whole.nodes)
    return None if part is None or not all_of_it or usage.is_copy else part / all_of_it


def _source(numbers: MatrixNumbers, usage: MatrixUsage) -> str:
    name = ACCOUNTING.get(numbers.engine, "the pods")
    if usage.counted == usage.jobs:
        return name
    files = "the files of the jobs"
    return files if not usage.counted else f"{name}, and for {plural(usage.jobs - usage.counted, 'job')} from {files}"


def _text(hours: float | None) -> str:
    return UNKNOWN if hours is None else f"{hours:.2f}" if hours >= 1 else f"{hours:.3g}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f}%"
