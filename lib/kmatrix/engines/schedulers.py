"""Find the scheduler of ENGINE."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import cast

from kmatrix.engines.base import Scheduler
from kmatrix.engines.slurm.settings import VARIABLES
from kmatrix.errors import ConfigError
from kmatrix.records.jobs.files import KUBERNETES, SLURM

# module:class, called with the settings. Imported when it is used: the client of Kubernetes takes a second.
SCHEDULERS = {
    SLURM: "kmatrix.engines.slurm.scheduler:SlurmScheduler",
    KUBERNETES: "kmatrix.engines.kubernetes.scheduler:KubernetesScheduler",
}
PREFIXES = {SLURM: "SLURM_", KUBERNETES: "K8S_"}  # of the symbols that only this scheduler reads
OWN_JOBS_ONLY = frozenset({SLURM})  # their answers have the jobs of the user who asks (squeue --me)
SHARED = frozenset({"GPUS_PER_NODE", "PARALLEL_JOBS", "PACK_NODES", "STAGE_DIR"})  # symbols that all of them read


def find_scheduler(engine: str, settings: Mapping[str, str]) -> Scheduler:
    """Return the scheduler with these settings. engine: value of ENGINE.  settings: symbol -> value."""
    if engine not in SCHEDULERS:
        raise ConfigError(f"ENGINE={engine} has no scheduler", why=f"expected one of {', '.join(SCHEDULERS)}")
    module, _, name = SCHEDULERS[engine].partition(":")
    return cast("Scheduler", getattr(importlib.import_module(module), name)(settings))


def site_settings(engine: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that the variables of this process give, of those that are empty: SBATCH_PARTITION ..."""
    if engine != SLURM:
        return {}
    found = {symbol: os.environ.get(variable, "") for symbol, variable in VARIABLES.items()}
    return {symbol: text for symbol, text in found.items() if text and not settings.get(symbol)}


def is_setting(engine: str, symbol: str) -> bool:
    """Return whether a scheduler reads a symbol."""
    return symbol in SHARED or symbol.startswith(PREFIXES.get(engine, " "))


def settings_of(engine: str, symbols: Mapping[str, str]) -> dict[str, str]:
    """Return the symbols that a scheduler reads, with their values."""
    return {name: value for name, value in symbols.items() if is_setting(engine, name)}
