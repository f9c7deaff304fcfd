"""How the losses of a matrix are compared: the rules for matrix.json, and the seed axis of MATRIX_SEEDS_AUTO."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import cause
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import Axes, Axis, AxisValue, in_order, label, parse_condition
from kmatrix.matrix.expand import SEED, Run
from kmatrix.records.matrix import KUBERNETES
from kmatrix.records.runs import LARGEST_SEED, VerdictRules
from kmatrix.text import plural

AUTO, LEAST, MOST = "MATRIX_SEEDS_AUTO", "MATRIX_SEEDS_MIN", "MATRIX_SEEDS_MAX"
BASELINE, CONFIDENCE, MIN_DIFFERENCE = "MATRIX_BASELINE", "MATRIX_CONFIDENCE", "MATRIX_MIN_DIFFERENCE"
TARGET = "TARGET_LOSS"
SHOWN = 8  # configurations in an error
# All pairs of more configurations are too many comparisons for the usual 10 seeds: 9 have 36.
MOST_WITHOUT_BASELINE = 8

Configuration = tuple[tuple[str, str], ...]  # label -> value of each axis, without the seed


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSettings:
    """The symbols of a verdict, as they hold in every run."""

    seeds: tuple[int, ...]  # of MATRIX_SEEDS_AUTO, in the order in which they run; empty without it
    seeds_min: int
    confidence: float
    min_difference: float | None
    target_loss: float | None
    baseline: Assignment | None


def read_settings(tree: Tree, base: Sequence[Assignment]) -> VerdictSettings:
    """Return the settings of a verdict in the lines that hold in every run.

    Raises ConfigError for a line without effect, and for seeds that contradict each other.
    """
    own = [item for item in base if item.name in (AUTO, LEAST, MOST, BASELINE, CONFIDENCE, MIN_DIFFERENCE, TARGET)]
    tree.set_only(own)
    for item in own:
        if why := cause(tree, item):
            raise ConfigError(f"{item.where}: {item.name}={item.value}", why=why.text, hint="change or remove it")

    def value(name: str) -> Any:
        return tree.typed(name, tree.value(name))

    return VerdictSettings(
        seeds=_seeds(base, value(SEED), value(LEAST), value(MOST)) if value(AUTO) else (),
        seeds_min=value(LEAST) or VerdictRules().seeds_min,
        confidence=value(CONFIDENCE),
        min_difference=value(MIN_DIFFERENCE),
        target_loss=value(TARGET),
        baseline=next((item for item in own if item.name == BASELINE and item.value.strip()), None),
    )


def _seeds(base: Sequence[Assignment], first: int, least: int, most: int) -> tuple[int, ...]:
    if least > most:
        hint = f"pass a larger {MOST}, or a smaller {LEAST}"
        raise ConfigError(f"{LEAST}={least} is more than {MOST}={most}", hint=hint)
    first = next((int(item.value) for item in base if item.name == SEED), first)
    if first + most - 1 > LARGEST_SEED:
        why = f"the largest is {LARGEST_SEED}"
        raise ConfigError(f"SEED={first} leaves no room for {most} seeds", why=why, hint="pass a smaller one")
    return tuple(range(first, first + most))


def with_seeds(tree: Tree, axes: Axes, settings: VerdictSettings) -> Axes:
    """Return the axes with that of the seeds of MATRIX_SEEDS_AUTO. Raises ConfigError if there are other seeds."""
    if not settings.seeds:
        return axes
    taken = [axis.points[0].assignment.where for axis in axes.axes if axis.name == SEED]
    taken += [point.assignment.where for rule in axes.couplings for (point, *_) in rule.points if point.axis == SEED]
    if taken:
        raise ConfigError(
            f"{AUTO}=y chooses the seeds, and there is a list of them",
            why=taken[0],
            hint=f"remove one of the two; SEED=<first seed> and {MOST}=<number> set the range",
        )
    seeds = map(str, settings.seeds)
    points = tuple(AxisValue(SEED, seed, Assignment(SEED, seed, f"{AUTO}=y")) for seed in seeds)
    return replace(axes, axes=in_order(tree, (*axes.axes, Axis(SEED, label(tree, SEED), points))))


def plan_rules(
    tree: Tree, settings: VerdictSettings, runs: Iterable[Run], engine: str
) -> tuple[VerdictRules, list[str]]:
    """Return how the losses of these runs will be compared, and warnings about adaptive seeds that decide little.

    Raises ConfigError for a baseline that is not one configuration of each family, and for adaptive seeds without two
    configurations to compare, or on an engine that cannot start the next ones.
    """
    families = _families(tree, runs)
    rules = VerdictRules(
        seeds_auto=bool(settings.seeds),
        seeds=settings.seeds,
        seeds_min=settings.seeds_min,
        confidence=settings.confidence,
        min_difference=settings.min_difference,
        baseline=_baseline(tree, settings.baseline, families) if settings.baseline else {},
        target_loss=settings.target_loss,
    )
    if not rules.seeds_auto:
        return rules, []
    if engine == KUBERNETES:
        raise ConfigError(
            f"{AUTO}=y needs the runner of this machine, or ENGINE=slurm",
            why="pods may not make the Jobs of further seeds",
            hint="list the seeds and omit MATRIX_SEEDS_AUTO: SEED=1,2,3",
        )
    sizes = [len(family) for family in families]
    most, alone, found = max(sizes), sizes.count(1), []
    idle = f"{plural(alone, 'configuration')} with losses that no other one can be compared with"
    if most == 1:
        hint = "pass a second configuration, such as OPTIMIZER=adamw,muon; or the seeds: SEED=1,2,3"
        raise ConfigError(f"{AUTO}=y has nothing to compare", why=idle, hint=hint)
    if most > MOST_WITHOUT_BASELINE and not rules.baseline:
        found.append(
            f"{most} configurations make {most * (most - 1) // 2} comparisons, too many for {len(rules.seeds)} seeds: "
            f"name one that the others are compared with, such as {BASELINE}=OPTIMIZER=adamw"
        )
    if alone:
        found.append(f"{idle}: {rules.seeds_min} seeds of each, and no verdict")
    return rules, found


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
    condition = parse_condition(tree, given.value, where)
    if any(name == SEED for name, _ in condition.terms):
        raise ConfigError(where, why="a seed is not a configuration", hint="name the values of the other axes")
    baseline = {label(tree, name): text for name, text in condition.terms}
    for family in families:
        named = [one for one in family if baseline.items() <= dict(one).items()]
        if len(named) > 1 or (not named and len(family) > 1):
            what = f"names {len(named)} configurations" if named else "names no configuration"
            raise ConfigError(
                f"{where}: {what}",
                why=f"{'these' if named else 'there are'}: {_listed(named or family)}",
                hint="name exactly one: NAME=value of each axis that it needs, with spaces between them",
            )
    return baseline


def _listed(configurations: Sequence[Configuration]) -> str:
    """Return configurations as text, by the axes in which they differ."""
    shared = set.intersection(*map(set, configurations))
    texts = [
        " ".join(f"{name}={value}" for name, value in one if (name, value) not in shared) for one in configurations
    ]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return "; ".join([*texts[:SHOWN], *more])
