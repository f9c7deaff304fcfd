"""What the jobs of planned runs need, before anything is made."""

from __future__ import annotations

from dataclasses import replace

from kmatrix.config import RunConfig, cpu_threads
from kmatrix.engines.ports import Shape
from kmatrix.experiment.machine import Machine
from kmatrix.experiment.plan import Plan
from kmatrix.plan.feasibility import expected_seconds
from kmatrix.rules import budget_s


def planned_jobs(plan: Plan) -> dict[str, Shape]:
    """Return what each run of a plan for a cluster needs per node, with its expected time (s)."""
    jobs: dict[str, Shape] = {}
    for kind, names in plan.kinds.items():
        jobs |= dict.fromkeys(names, _job(kind.config, plan.machine))
    return jobs


def _job(config: RunConfig, machine: Machine) -> Shape:
    nodes, train = machine.nodes, config.train
    assert nodes is not None  # the caller has checked
    each = train.ranks_per_node
    threads = cpu_threads(train.cpu_threads, device=train.device, cores=nodes.cpus or each, ranks=each)
    planned = None
    if train.device == "cuda" and nodes.model:
        planned = expected_seconds(train, nodes.model)
    found = machine.earlier.whole_s(replace(train, cpu_threads=threads), planned)
    times = [time for time in (found, budget_s(train)) if time is not None]
    return Shape(
        nodes=train.num_nodes,
        gpus=each if train.device == "cuda" else 0,
        cpus=each * (threads or 1),
        seconds=int(min(times)) if times else None,
    )
