"""What the jobs of planned runs need, before anything is made; their times are those of earlier runs."""

from __future__ import annotations

from dataclasses import replace

from kmatrix.config import RunConfig, cpu_threads
from kmatrix.engines.ports import Shape
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.experiment.earlier import EarlierRuns
from kmatrix.experiment.plan import Plan
from kmatrix.plan.feasibility import expected_seconds
from kmatrix.rules import budget_s


def planned_shapes(plan: Plan) -> dict[str, Shape]:
    """Return what each run of a plan for a cluster needs per node, with its expected time (s)."""
    assert plan.nodes is not None  # the caller has checked
    known: dict[int, Shape] = {}  # by kind
    for planned in plan.runs:
        config = planned.kind.config
        if id(planned.kind) not in known:
            threads = _threads(config, plan.nodes)
            expected_s = _expected_s(config, plan.nodes, plan.earlier, threads)
            each = config.train.ranks_per_node
            known[id(planned.kind)] = Shape(
                nodes=config.train.num_nodes,
                gpus=each if config.device == "cuda" else 0,
                cpus=each * (threads or 1),
                seconds=None if expected_s is None else int(expected_s),
            )
    return {planned.name: known[id(planned.kind)] for planned in plan.runs}


def _threads(config: RunConfig, nodes: Nodes) -> int:
    ranks = config.train.ranks_per_node
    return cpu_threads(config.train.cpu_threads, device=config.device, cores=nodes.cpus or ranks, ranks=ranks)


def _expected_s(config: RunConfig, nodes: Nodes, earlier: EarlierRuns, threads: int) -> float | None:
    """Return the estimated time (s) of a run, from earlier runs or from the model of the GPUs; None if unknown."""
    train = config.train
    planned = None
    if config.device == "cuda" and nodes.model is not None:
        planned = expected_seconds(shape=config.shape, train=train, tokens=config.tokens, device=nodes.model)
    found = earlier.whole_s(replace(train, cpu_threads=threads, max_iters=config.steps), planned)
    times = (found, budget_s(train))
    return min((time for time in times if time is not None), default=None)
