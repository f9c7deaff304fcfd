"""How the losses of a matrix are compared: the rules for matrix.json, and the seed axis of MATRIX_SEEDS_AUTO."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import cause
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import Axes, in_order, label, make_axis, parse_terms
from kmatrix.matrix.expand import SEED, Run
from kmatrix.records.decode import replaced
from kmatrix.records.matrix import KUBERNETES
from kmatrix.records.runs import LARGEST_SEED, VerdictRules
from kmatrix.text import first_names

AUTO, LEAST, MOST = "MATRIX_SEEDS_AUTO", "MATRIX_SEEDS_MIN", "MATRIX_SEEDS_MAX"
BASELINE, CONFIDENCE, MIN_DIFFERENCE = "MATRIX_BASELINE", "MATRIX_CONFIDENCE", "MATRIX_MIN_DIFFERENCE"
TARGET = "TARGET_LOSS"
Configuration = tuple[tuple[str, str], ...]  # label -> value of each axis, without the seed


def with_rules(tree: Tree, base: Sequence[Assignment], axes: Axes) -> tuple[Axes, VerdictRules]:
    """Return the axes with that of MATRIX_SEEDS_AUTO, and the rules that the lines of the base give, without baseline.

    Raises ConfigError for a line without effect, and for seeds that contradict each other or the axes.
    """
    own = [item for item in base if item.name in (AUTO, LEAST, MOST, BASELINE, CONFIDENCE, MIN_DIFFERENCE, TARGET)]
    tree.set_only(own)
    for item in own:
        if why := cause(tree, item):
            raise ConfigError(f"{item.where}: {item.name}={item.value}", why=why.text, hint="change or remove it")

    def value(name: str) -> Any:
        return tree.typed(name, tree.value(name))

    rules = VerdictRules(
        seeds_auto=value(AUTO),
        seeds=_seeds(base, value(SEED), value(LEAST), value(MOST)) if value(AUTO) else (),
        seeds_min=value(LEAST) or VerdictRules().seeds_min,
        confidence=value(CONFIDENCE),
        min_difference=value(MIN_DIFFERENCE),
        target_loss=value(TARGET),
    )
    return (_with_seeds(tree, axes, rules) if rules.seeds_auto else axes), rules


def _seeds(base: Sequence[Assignment], first: int, least: int, most: int) -> tuple[int, ...]:
    if least > most:
        hint = f"pass a larger {MOST}, or a smaller {LEAST}"
        raise ConfigError(f"{LEAST}={least} is more than {MOST}={most}", hint=hint)
    first = next((int(item.value) for item in base if item.name == SEED), first)
    if first + most - 1 > LARGEST_SEED:
        why = f"the largest is {LARGEST_SEED}"
        raise ConfigError(f"SEED={first} leaves no room for {most} seeds", why=why, hint="pass a smaller one")
    return tuple(range(first, first + most))


def _with_seeds(tree: Tree, axes: Axes, rules: VerdictRules) -> Axes:
    """Return the axes with that of the seeds. Raises ConfigError if there are other seeds."""
    if taken := [item.where for item in axes.assignments if item.name == SEED]:
        raise ConfigError(
            f"{AUTO}=y chooses the seeds, and there is a list of them",
            why=taken[0],
            hint=f"remove one of the two; SEED=<first seed> and {MOST}=<number> set the range",
        )
    seeds = make_axis(tree, SEED, (Assignment(SEED, str(seed), f"{AUTO}=y") for seed in rules.seeds))
    return replace(axes, axes=in_order(tree, (*axes.axes, seeds)))


def plan_rules(
    tree: Tree, rules: VerdictRules, base: Iterable[Assignment], runs: Iterable[Run], engine: str
) -> VerdictRules:
    """Return how the losses of these runs will be compared: the rules, with the baseline that a line of the base names.

    Raises ConfigError for a baseline that is not one configuration of each family, and for adaptive seeds without two
    configurations to compare, or on an engine that cannot start the next ones.
    """
    if rules.seeds_auto and engine == KUBERNETES:
        raise ConfigError(
            f"{AUTO}=y needs the runner of this machine, or ENGINE=slurm",
            why="pods may not make the Jobs of further seeds",
            hint="list the seeds and omit MATRIX_SEEDS_AUTO: SEED=1,2,3",
        )
    families = _families(tree, runs)
    if rules.seeds_auto and max(map(len, families)) == 1:
        hint = "pass a second configuration, such as OPTIMIZER=adamw,muon; or the seeds: SEED=1,2,3"
        raise ConfigError(f"{AUTO}=y has nothing to compare", why="no two configurations are comparable", hint=hint)
    given = next((item for item in base if item.name == BASELINE and item.value.strip()), None)
    return replaced(rules, baseline=_baseline(tree, given, families)) if given else rules


def _families(tree: Tree, runs: Iterable[Run]) -> list[list[Configuration]]:
    """Return the configurations of each family: their losses are measured on the same data, and comparable."""
    seed = label(tree, SEED)
    found: dict[Hashable, dict[Configuration, None]] = {}
    for run in runs:
        train = run.config.train
        data = train.dataset, train.data_path, train.data_mix, train.data_layout, train.tokenizer
        configuration = tuple(item for item in run.axes if item[0] != seed)
        found.setdefault((*data, train.block_size, train.eval_samples), {})[configuration] = None
    return [list(family) for family in found.values()]


def _baseline(tree: Tree, given: Assignment, families: Iterable[Sequence[Configuration]]) -> dict[str, str]:
    """Return the axes, label -> value, that name the baseline in every family."""
    where = given.where if "=" in given.where else f"{given.where}: {BASELINE}={given.value}"
    terms = dict(parse_terms(tree, given.value, where))
    if SEED in terms:
        raise ConfigError(where, why="a seed is not a configuration", hint="name the values of the other axes")
    baseline = {label(tree, name): text for name, text in terms.items()}
    for family in families:
        named = [one for one in family if baseline.items() <= dict(one).items()]
        if len(named) > 1 or (not named and len(family) > 1):
            listed = (" ".join(f"{name}={value}" for name, value in one) for one in named or family)
            raise ConfigError(
                f"{where}: names {len(named)} configurations",
                why=f"{'these' if named else 'there are'}: {first_names(listed)}",
                hint="name exactly one: NAME=value of each axis that it needs, with spaces between them",
            )
    return baseline
