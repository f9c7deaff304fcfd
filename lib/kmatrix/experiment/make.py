"""A plan -> a matrix directory: checks, data, preflight, directories, reuse."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kmatrix.config import Config, RunConfig, with_vocabulary
from kmatrix.errors import LaunchError
from kmatrix.experiment.cluster.data import refuse_large_data
from kmatrix.experiment.cluster.jobs import planned_shapes
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.create import Creation, RunText, check_place, create
from kmatrix.experiment.doctor import need_torch
from kmatrix.experiment.inputs.benchmarks import fetch_benchmarks
from kmatrix.experiment.inputs.data import Key, data_lines, key, prepare_data
from kmatrix.experiment.inputs.initial import check_fit
from kmatrix.experiment.plan import Plan, equal_budget, no_gpus, refuse_risks
from kmatrix.experiment.preflight import try_runs
from kmatrix.matrix.expand import visit
from kmatrix.records.dataset import Dataset
from kmatrix.records.matrix import SLURM
from kmatrix.records.paths import ROOT, MatrixDir, below_root
from kmatrix.records.runs import Tracking
from kmatrix.runner.conclude import command_of
from kmatrix.text import make_command
from kmatrix.track.available import need_trackers, own_project


def make_matrix(
    plan: Plan,
    *,
    command: str = "from Python",
    preflight: bool | None = None,
    reuse: bool = True,
    shards: Mapping[Key, int] | None = None,
    code: Path = ROOT,
    on_message: OnMessage = ignore,
    run_trials: Callable[[MatrixDir], object] | None = None,
) -> MatrixDir:
    """Make the directories of a matrix, after all checks, and return the matrix. Its data are prepared first.

    command: recorded in matrix.json.  preflight: run two steps of each shape first; None: as configured.
    reuse: reuse finished runs of other matrices, if REUSE is set, too.  shards: training shards per dataset, as in
    an earlier run.  code: folder with the sources of the trainer.
    on_message: called with notes and warnings.  run_trials: trains the runs of a preflight; by default on this machine.
    Raises ConfigError, DataError or LaunchError before anything is made.
    """
    tries = plan.config.preflight if preflight is None else preflight
    creation = prepared(plan, checked(plan, on_message), command, shards, on_message)
    creation = dataclasses.replace(creation, code=code, neutral=creation.neutral if reuse else None)
    if tries:
        try_runs(creation, on_message=on_message, run_trials=run_trials)
    return create(creation, on_message)


def checked(plan: Plan, on_message: OnMessage) -> dict[str, str]:
    """Report notes and warnings; return the runs that cannot run here, with the reason.

    Raises ConfigError or LaunchError if no run can start here.
    """
    if plan.nodes and plan.nodes.why_not:
        raise LaunchError(
            plan.nodes.why_not, hint=f"forecasts work without it: {make_command('plan')}; runs need the scheduler"
        )
    for note in plan.notes:
        on_message(f"note: {note}")
    skipped = _skipped(plan)
    for text in refuse_risks(plan):
        on_message(f"warning: {text}")
    for text in plan.warnings:
        on_message(f"warning: {text}")

    # Refuse now what would fail only after hours: when a run starts, or after the last one.
    need_torch()
    need_trackers(plan.config.trackers)
    command_of(plan.config.on_finish)
    return skipped


def prepared(
    plan: Plan, skipped: Mapping[str, str], command: str, shards: Mapping[Key, int] | None, on_message: OnMessage
) -> Creation:
    """Check that the matrix can be made here, prepare its data, and return what its directories are made from."""
    # Cheap checks first: preparing data can download for hours.
    results_dir = below_root(plan.config.results_dir)
    checkpoint_dir = below_root(plan.config.checkpoint_dir) if plan.config.checkpoint_dir else None
    check_place(results_dir, checkpoint_dir)
    runnable = [config.train for name, config in plan.configs.items() if name not in skipped]
    fetch_benchmarks(runnable, plan.data_dir, ROOT)
    if plan.config.engine == SLURM:
        refuse_large_data(plan.data_dir, runnable, shards)
    data = prepare_data(Path(sys.executable), ROOT, plan.data_dir, runnable, shards)
    configs = {name: _with_data(config, data) for name, config in plan.configs.items()}
    check_fit(plan.initial, {name: configs[name].train for name in configs if name not in skipped}, prepared=True)
    creation = Creation(
        plan=plan.matrix,
        configs=configs,
        verdict=plan.verdict,
        texts=_texts(plan),
        data=data,
        data_dir=plan.data_dir,
        skipped=skipped,
        gpus=plan.gpus,
        results_dir=results_dir,
        checkpoint_dir=checkpoint_dir,
        timeout_s=plan.config.run_timeout_s,
        root=ROOT,
        config_text=plan.config_text,
        command=command,
        overrides=plan.overrides,
        tracking=tracking(plan.config),
        engine=plan.config.engine,
        nodes=plan.nodes,
        expected={name: shape.seconds for name, shape in planned_shapes(plan).items()} if plan.nodes else {},
        initial=plan.initial,
        neutral=frozenset(plan.neutral) if plan.config.reuse else None,
    )
    for line in data_lines([configs[name].train for name in configs if name not in skipped], data):
        on_message(line)
    # Again: the vocabulary of the data can change a length in tokens.
    return dataclasses.replace(creation, equal=equal_budget(plan.equal_by, configs))


def _with_data(config: RunConfig, data: Mapping[Key, Dataset]) -> RunConfig:
    """Return a configuration with the vocabulary of its data. A skipped run may have no data."""
    there = data.get(key(config.train))
    return with_vocabulary(config, there.vocab_size) if there else config


def _texts(plan: Plan) -> dict[str, RunText]:
    """Return the configuration of each run as text."""
    texts = {}
    base = {plan.tree.axis_of(plan.tree.kconf.syms[item.name]) for item in plan.base}
    for run in visit(plan.tree, plan.base, plan.matrix.runs):
        asked = base | {point.axis for point in run.points}
        names = tuple(sorted(asked & run.values.keys()))
        texts[run.name] = RunText(config=plan.tree.config_text(), values=run.values, asked=names)
    return texts


def _skipped(plan: Plan) -> dict[str, str]:
    """Return the runs that cannot run here, with the reason. Raises LaunchError if no run can."""
    skipped = {planned.name: planned.kind.lacks for planned in plan.runs if planned.kind.lacks}
    if len(skipped) == len(plan.runs):
        raise no_gpus(plan)
    return skipped


def tracking(config: Config) -> Tracking:
    """Return the settings of the trackers for run.json."""
    if not config.trackers:
        return Tracking()
    return Tracking(
        trackers=tuple(config.trackers),
        project=config.tracker_project or own_project(),
        limit_s=config.tracker_limit_s,
    )
