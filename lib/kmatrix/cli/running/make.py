"""Plan a matrix and make its directories, for all commands that start one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kmatrix.cli.commands import Arguments, yes
from kmatrix.cli.progress import ProgressDisplay
from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.experiment.inputs.data import Key
from kmatrix.experiment.make import make_matrix
from kmatrix.experiment.plan import Plan, make_plan
from kmatrix.records.paths import MatrixDir
from kmatrix.runner.execute import (
    check_simulation,
    recorder_launcher,
)


def plan_of(arguments: Arguments, *, one: bool = False) -> Plan:
    """Return the plan of .config and the command line."""
    return make_plan(
        arguments.config,
        arguments.assignments,
        kconfig=arguments.kconfig,
        gpus=arguments.get("GPUS"),
        one=one,
        options=arguments.takes,
    )


def make_dirs(
    arguments: Arguments,
    plan: Plan,
    *,
    reuse: bool,
    shards: Mapping[Key, int] | None = None,
    run_jobs: Callable[[MatrixDir], object] | None = None,
) -> tuple[MatrixDir, RecorderLauncher | None]:
    """Make the directories of a matrix; return it and what starts the GPU recorders, None for no recording.

    run_jobs: trains the runs of a preflight on a cluster.
    """
    recorders = recorder_launcher(arguments.get("SIMULATE"), plan.config.monitor_hz)
    check_simulation(arguments.get("SIMULATE"), (config.train.num_nodes for config in plan.configs.values()))
    preflight = yes(arguments, "PREFLIGHT") if arguments.get("PREFLIGHT") else None
    with ProgressDisplay() as display:
        matrix = make_matrix(
            plan,
            command=" ".join(["kmatrix", arguments.target, *arguments.all_words]),
            preflight=preflight,
            reuse=reuse and not arguments.get("SIMULATE"),  # a reused run would have no simulated recording
            shards=shards,
            on_message=print,
            on_progress=display,
            on_note=display.note,
            run_jobs=run_jobs,
        )
    return matrix, recorders
