"""How the losses of a matrix will be compared: its rules, and warnings about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kmatrix.errors import ConfigError
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.expand import Run
from kmatrix.matrix.rules import AUTO, Configuration, VerdictSettings, families_of, resolve_rules, rules_warnings
from kmatrix.records.matrix import KUBERNETES
from kmatrix.records.runs import VerdictRules
from kmatrix.records.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVerdict:
    """How the losses of a matrix will be compared."""

    rules: VerdictRules
    warnings: tuple[str, ...] = ()


def plan_verdict(
    tree: Tree,
    settings: VerdictSettings,
    trained: Mapping[Run, TrainConfig],
    *,
    engine: str,
) -> PlannedVerdict:
    """Return how the losses of these runs will be compared.

    trained: by run, where runs of a kind share that of the first one.

    Raises ConfigError for rules that these runs or this engine cannot follow.
    """
    if not (settings.seeds or settings.baseline):  # the families of 100,000 runs take a while
        return PlannedVerdict(rules=resolve_rules(tree, settings, ()))
    families: list[Mapping[Configuration, Run]] = families_of(
        tree, {run: _measured_on(train) for run, train in trained.items()}
    )
    rules = resolve_rules(tree, settings, families)
    if not rules.seeds_auto:
        return PlannedVerdict(rules=rules)
    _refuse_submission(engine)
    return PlannedVerdict(rules=rules, warnings=tuple(rules_warnings(rules, [len(family) for family in families])))


def _measured_on(train: TrainConfig) -> tuple[str | int | None, ...]:
    """Return what the losses of a run are measured on: those of runs with the same are comparable."""
    data = (train.dataset, train.data_path, train.data_mix, train.data_layout, train.tokenizer)
    return *data, train.block_size, train.eval_samples


def _refuse_submission(engine: str) -> None:
    """Raise ConfigError for adaptive seeds where no runner and no job can start the next ones."""
    if engine != KUBERNETES:
        return
    raise ConfigError(
        f"{AUTO}=y needs the runner of this machine, or ENGINE=slurm",
        why="pods may not make the Jobs of further seeds",
        hint="list the seeds and omit MATRIX_SEEDS_AUTO: SEED=1,2,3",
    )
