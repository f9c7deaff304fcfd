"""A plan -> a matrix: checks, data, the values of each run.json, preflight, and one folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kmatrix.config import Config, RunConfig, cpu_threads, environment, with_vocabulary
from kmatrix.errors import LaunchError
from kmatrix.experiment.cluster.jobs import planned_jobs
from kmatrix.experiment.configure import OnMessage, ignore, text_of_config
from kmatrix.experiment.create import Contents, config_lines, create
from kmatrix.experiment.inputs.ask import need_torch
from kmatrix.experiment.inputs.benchmarks import benchmark_files, fetch_benchmarks
from kmatrix.experiment.inputs.data import Key, data_lines, key, prepare_data, refuse_downloads
from kmatrix.experiment.inputs.initial import check_fit, initial_fields
from kmatrix.experiment.plan import Plan, equal_budget, no_gpus, refuse_risks
from kmatrix.experiment.preflight import try_runs
from kmatrix.experiment.provenance import keys_in_code, provenance
from kmatrix.matrix.expand import visit
from kmatrix.plan.feasibility import expected_seconds
from kmatrix.records.dataset import Dataset, sha256_of_reading
from kmatrix.records.decode import as_json
from kmatrix.records.matrix import SLURM
from kmatrix.records.paths import ROOT, MatrixDir, below_root
from kmatrix.records.runs import Provenance, Tracking
from kmatrix.runner.conclude import command_of
from kmatrix.text import make_command
from kmatrix.track.available import need_trackers, own_project


def make_matrix(
    plan: Plan,
    *,
    command: str = "from Python",
    reuse: bool = True,
    shards: int = 0,
    code: Path = ROOT,
    on_message: OnMessage = ignore,
    run_trials: Callable[[MatrixDir], object] | None = None,
) -> MatrixDir:
    """Make the folder of a matrix, after all checks, and return the matrix. Its data are prepared first.

    command: recorded in matrix.json.  reuse: reuse finished runs of other matrices, if REUSE is set, too.
    shards: training shards of the dataset; 0: as many as the runs need.  code: folder with the sources of the trainer.
    on_message: called with notes and warnings.  run_trials: trains the runs of a preflight; by default on this machine.
    Raises ConfigError, DataError, LaunchError or OSError before anything is made.
    """
    contents = contents_of(plan, command=command, reuse=reuse, shards=shards, code=code, on_message=on_message)
    if plan.config.preflight:
        try_runs(plan, contents, on_message=on_message, run_trials=run_trials)
    checkpoint_dir = below_root(plan.config.checkpoint_dir) if plan.config.checkpoint_dir else None
    return create(contents, below_root(plan.config.results_dir), checkpoint_dir, on_message=on_message)


def contents_of(
    plan: Plan, *, command: str, reuse: bool = True, shards: int = 0, code: Path = ROOT, on_message: OnMessage = ignore
) -> Contents:
    """Check all that would fail later, prepare the data, and return what a matrix is made from.

    The arguments are those of `make_matrix`, and the errors.
    """
    check(plan, on_message)
    runnable = [config.train for name, config in plan.configs.items() if name not in plan.skipped]
    fetch_benchmarks(runnable, plan.data_dir)
    if plan.config.engine == SLURM:
        refuse_downloads(plan.data_dir, runnable)
    data = prepare_data(plan.data_dir, runnable, shards)
    configs = {name: _with_data(config, data) for name, config in plan.configs.items()}
    trains = {name: config.train for name, config in configs.items() if name not in plan.skipped}
    check_fit(plan.initial, trains, prepared=True)
    for line in data_lines([*trains.values()], data):
        on_message(line)
    if found := keys_in_code(code):
        on_message(f"warning: code/ of the matrix will contain what may be keys: {', '.join(found)}")
    origin, nodes = provenance(code, command, plan.machine.gpus), plan.machine.nodes
    origin = nodes.provenance(origin) if nodes else origin
    text = text_of_config(plan.tree, plan.lines)
    return Contents(
        about=_about(plan, configs, origin),
        runs=_runs(plan, text, configs, data, origin),
        config=text,
        sources=code,
        skipped=plan.skipped,
        reuse=reuse and plan.config.reuse,
    )


def check(plan: Plan, on_message: OnMessage) -> None:
    """Report notes and warnings. Raise an error for what would fail only after hours, or if no run can start here."""
    if plan.machine.nodes and (why := plan.machine.nodes.why_not):
        raise LaunchError(why, hint=f"forecasts work without it: {make_command('plan')}; runs need the scheduler")
    for note in plan.notes:
        on_message(f"note: {note}")
    if len(plan.skipped) == len(plan.configs):
        raise no_gpus(plan)
    for text in (*refuse_risks(plan), *plan.warnings):
        on_message(f"warning: {text}")
    need_torch()
    need_trackers(plan.config.trackers)
    command_of(plan.config.on_finish)
    for folder in filter(None, (plan.config.results_dir, plan.config.checkpoint_dir)):
        below_root(folder).mkdir(parents=True, exist_ok=True)
        # Tried, not asked: permission bits say little about network file systems.
        with tempfile.TemporaryDirectory(dir=below_root(folder), prefix=".kmatrix_"):
            pass


def _with_data(config: RunConfig, data: Mapping[Key, Dataset]) -> RunConfig:
    """Return a configuration with the vocabulary of its data. A skipped run may have no data."""
    there = data.get(key(config.train))
    return with_vocabulary(config, there.vocab_size) if there else config


def _about(plan: Plan, configs: Mapping[str, RunConfig], origin: Provenance) -> dict[str, Any]:
    """Return the values of matrix.json that are not those of runs."""
    return {
        "engine": plan.config.engine,
        "created": origin["created"],
        "command": origin["command"],
        "axes": [
            {"label": axis.label, "symbol": axis.name, "values": [point.text for point in axis.points]}
            for axis in plan.matrix.axes
        ],
        "overrides": list(plan.overrides),
        # Again: the vocabulary of the data can change a length in tokens.
        "equal": equal_budget(plan.equal_by, configs),
        "verdict": as_json(plan.verdict),
        "cuts": [{"count": cells.count, "reason": cells.reason} for cells in plan.matrix.excluded],
        "provenance": origin,
    }


def _runs(
    plan: Plan, text: str, configs: Mapping[str, RunConfig], data: Mapping[Key, Dataset], origin: Provenance
) -> dict[str, dict[str, Any]]:
    """Return run -> the values of its run.json, and the lines of its .config that are not in that of the matrix."""
    times = {name: job.seconds for name, job in planned_jobs(plan).items()} if plan.machine.nodes else {}
    base = {plan.tree.axis_of(item.name) for item in plan.base}
    found = {}
    for run in visit(plan.tree, plan.base, plan.matrix.runs):
        config = configs[run.name]
        there = data.get(key(config.train))  # a skipped run may have no data
        asked = base | {point.axis for point in run.points}
        found[run.name] = {
            "run_id": run.run_id,
            "name": run.name,
            "axes": dict(run.axes),
            "symbols": dict(run.values),
            "asked": sorted(asked & run.values.keys()),
            "train": _train_fields(plan, config, there, origin["cores"]),
            "timeout_s": plan.config.run_timeout_s,
            "selected": plan.verdict.seeds_auto,
            "environment": environment(run.values),
            "tracking": as_json(tracking(plan.config)),
            "train_tokens": there.train_tokens if there else None,
            "expected_s": times.get(run.name) if plan.machine.nodes else _expected_s(plan, config),
            "provenance": origin,
            "config": config_lines(text, plan.tree.config_text()),
        }
    return found


def _expected_s(plan: Plan, config: RunConfig) -> float | None:
    """Return the expected time (s) of a run on the GPUs of this machine; None if unknown, and on the CPU."""
    if config.train.device != "cuda" or not plan.machine.gpus:
        return None
    return expected_seconds(config.train, plan.machine.devices(config)[0])


def _train_fields(plan: Plan, config: RunConfig, data: Dataset | None, cores: int) -> dict[str, Any]:
    """Return the fields of the trainer with data and threads."""
    train = config.train
    return {
        **train.to_json(),
        # The ranks of a node share its cores.
        "cpu_threads": cpu_threads(train.cpu_threads, device=train.device, cores=cores, ranks=train.ranks_per_node),
        "data_path": data.path if data else "",
        "data_sha256": sha256_of_reading(data.sha256, train) if data else "",
        **benchmark_files(train, plan.data_dir),
        **initial_fields(plan.initial, train),
        "data_shards": data.shards if data else 0,
    }


def tracking(config: Config) -> Tracking:
    """Return the settings of the trackers for run.json."""
    if not config.trackers:
        return Tracking()
    return Tracking(
        trackers=tuple(config.trackers), project=config.tracker_project or own_project(), limit_s=config.tracker_limit_s
    )
