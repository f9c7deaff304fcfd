"""PREFLIGHT=1: two steps of each shape in a folder that is removed again, before the matrix itself is made."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from kmatrix.cli.execution import gpu_pool, symbols
from kmatrix.cli.progress import ProgressDisplay
from kmatrix.cli.session import ROOT
from kmatrix.errors import LaunchError
from kmatrix.gpu.nvml import Gpu
from kmatrix.launch.create import Creation, create
from kmatrix.launch.drive import EXIT_STOPPED, drive
from kmatrix.launch.local import LocalEngine
from kmatrix.launch.preflight import Bad, advice, groups, shortened
from kmatrix.launch.provenance import cores
from kmatrix.launch.reopen import reopen
from kmatrix.launch.standing import read_state
from kmatrix.packing import Limits
from kmatrix.records import MatrixDir, Status

FOLDER = ".kmatrix_preflight_"  # and the process that made it


def preflight(planned: Creation, gpus: Sequence[Gpu]) -> None:
    """Try each shape of a matrix that is to be made. Raises LaunchError where one cannot be trained.

    What is only adjusted (a smaller micro-batch for want of memory) is said, and is no failure.
    """
    going = {name: config for name, config in planned.configs.items() if name not in planned.skipped}
    shapes = groups(going)
    print(f"preflight: two steps of {len(shapes)} shape{'s' if len(shapes) > 1 else ''}, for {len(going)} runs")
    runs = tuple(run for run in planned.plan.runs if run.name in shapes)
    with _folder(planned.results_dir) as folder:
        trial = replace(
            planned,
            plan=replace(planned.plan, runs=runs),
            configs={name: shortened(going[name]) for name in shapes},
            results_dir=folder,
            checkpoint_dir=None,
            skipped={},
            tracking={},
        )
        bad = _try(create(trial), gpus, shapes)
    if bad:
        raise _refusal(planned, bad)


def _try(matrix: MatrixDir, gpus: Sequence[Gpu], shapes: dict[str, tuple[str, ...]]) -> list[Bad]:
    """Train what stands for the others; return what failed."""
    pool = gpu_pool(gpus, symbols(matrix))
    limits = Limits.of(symbols(matrix))
    engine = LocalEngine(Path(sys.executable), ROOT, gpus=pool, cores=cores(), limits=limits)
    with ProgressDisplay() as show:
        outcome = drive(matrix, reopen(matrix, gpus).plans, engine, show=show, tell=show.tell, pool=pool)
    if outcome.exit_code == EXIT_STOPPED:
        raise KeyboardInterrupt
    bad = []
    for run in matrix.runs():
        state = read_state(run)
        if state.status is not Status.FINISHED:
            bad.append(Bad(names=shapes[run.name], reason=state.reason))
        elif state.last and state.last.micro_batch:
            print(f"preflight: {', '.join(shapes[run.name])}: fits with a micro-batch of {state.last.micro_batch}")
    return bad


def _refusal(planned: Creation, bad: Sequence[Bad]) -> LaunchError:
    count = sum(len(group.names) for group in bad)
    words = advice(planned.plan.runs, bad)
    return LaunchError(
        f"preflight: {count} of {len(planned.configs)} runs cannot be trained as they are; nothing was started",
        why="; ".join(f"{', '.join(group.names)}: {group.reason}" for group in bad),
        fix=f"change them, or leave them out: {words}" if words else "change the configuration",
    )


@contextmanager
def _folder(results_dir: Path) -> Iterator[Path]:
    """Make a folder that is gone afterwards; those that killed processes left are removed, too."""
    for left in results_dir.glob(FOLDER + "*"):
        owner = left.name.removeprefix(FOLDER)
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    folder = results_dir / f"{FOLDER}{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
