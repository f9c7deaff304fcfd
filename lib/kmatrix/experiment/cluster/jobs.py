"""The jobs of planned runs, before anything is made: their shapes, and their times from earlier runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kmatrix.config import RunConfig, cpu_threads
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.experiment.plan import Plan
from kmatrix.plan.feasibility import expected_seconds
from kmatrix.records.paths import RunDir, below_root
from kmatrix.records.train_config import budget_s
from kmatrix.status.estimate import MeasuredRuns, measured_on
from kmatrix.status.state import RunPlan


def planned_attempts(plan: Plan) -> list[RunPlan]:
    """Return the first attempts of planned runs, which have no folders yet. The runs are those of a cluster."""
    assert plan.nodes is not None  # the caller has checked
    measured = MeasuredRuns((), measured_on(below_root(plan.config.results_dir), plan.nodes.machine))
    known: dict[int, tuple[int, float | None]] = {}  # by kind: threads and time
    found = []
    for planned in plan.runs:
        config = planned.kind.config
        if id(planned.kind) not in known:
            threads = _threads(config, plan.nodes)
            known[id(planned.kind)] = threads, _expected_s(config, plan.nodes, measured, threads)
        threads, expected_s = known[id(planned.kind)]
        found.append(
            RunPlan(
                name=planned.name,
                run_id=planned.run.run_id,
                dir=RunDir(Path("/nonexistent") / planned.name),
                ranks=config.ranks,
                nodes=config.train.num_nodes,
                cuda=config.device == "cuda",
                cpu_threads=threads,
                timeout_s=plan.config.run_timeout_s,
                expected_s=expected_s,
            )
        )
    return found


def _threads(config: RunConfig, nodes: Nodes) -> int:
    ranks = config.train.ranks_per_node
    return cpu_threads(config.train.cpu_threads, device=config.device, cores=nodes.cpus or ranks, ranks=ranks)


def _expected_s(config: RunConfig, nodes: Nodes, measured: MeasuredRuns, threads: int) -> float | None:
    """Return the estimated time (s) of a run, from earlier runs or from the model of the GPUs; None if unknown."""
    train = config.train
    planned = None
    if config.device == "cuda" and nodes.model is not None:
        planned = expected_seconds(shape=config.shape, train=train, tokens=config.tokens, device=nodes.model)
    found = measured.whole(replace(train, cpu_threads=threads, max_iters=config.steps), planned)
    times = (None if found is None else found.seconds, budget_s(train))
    return min((time for time in times if time is not None), default=None)
