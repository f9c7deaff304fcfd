"""The scheduler of a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kmatrix.engines import kubernetes
from kmatrix.engines.kubernetes import Kubernetes
from kmatrix.engines.ports import Scheduler
from kmatrix.engines.slurm import Slurm
from kmatrix.engines.slurm_nodes import read_settings
from kmatrix.records.matrix import LOCAL, SLURM, Plan


def scheduler_of(plan: Plan) -> Scheduler | None:
    """Return the scheduler of a plan, None for this machine. It is asked nothing yet.

    Raises ConfigError for settings without which no job can be submitted.
    """
    return None if plan.engine == LOCAL else scheduler_for(plan.engine, plan.common.symbols)


def scheduler_for(engine: str, symbols: Mapping[str, str]) -> Scheduler:
    """Return the scheduler of an engine other than this machine. Raises ConfigError as `scheduler_of`."""
    if engine == SLURM:
        return Slurm(read_settings(symbols, os.environ))
    return Kubernetes(kubernetes.read_settings(symbols))
