"""How the losses of a matrix are compared: the rules for matrix.json, and the seed axis of MATRIX_SEEDS_AUTO."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import cause
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import Axes, Axis, AxisValue, in_order, label, parse_condition
from kmatrix.matrix.expand import SEED, Run
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


def families_of(tree: Tree, runs: Mapping[Run, Hashable]) -> list[Mapping[Configuration, Run]]:
    """Return the configurations of each family, with their first runs. runs: with what their losses are measured on."""
    seed = label(tree, SEED)
    found: dict[Hashable, dict[Configuration, Run]] = {}
    for run, measured_on in runs.items():
        configuration = tuple(item for item in run.axes if item[0] != seed)
        found.setdefault(measured_on, {}).setdefault(configuration, run)
    return list(found.values())


def resolve_rules(
    tree: Tree, settings: VerdictSettings, families: Sequence[Mapping[Configuration, Run]]
) -> VerdictRules:
    """Return the rules of a matrix, with its baseline as the values of one configuration.

    families: as returned by `families_of`; not needed without a baseline and adaptive seeds.
    Raises ConfigError for a baseline that is not one configuration of each family, and for adaptive seeds without two
    configurations to compare.
    """
    if settings.seeds and all(len(family) < 2 for family in families):
        raise ConfigError(
            f"{AUTO}=y has nothing to compare",
            why=f"{plural(sum(map(len, families)), 'configuration')} "
            "with losses that no other one can be compared with",
            hint="pass a second configuration, such as OPTIMIZER=adamw,muon; or the seeds: SEED=1,2,3",
        )
    return VerdictRules(
        seeds_auto=bool(settings.seeds),
        seeds=settings.seeds,
        seeds_min=settings.seeds_min,
        confidence=settings.confidence,
        min_difference=settings.min_difference,
        baseline=_baseline(tree, settings.baseline, families) if settings.baseline else {},
        target_loss=settings.target_loss,
    )


def _baseline(tree: Tree, given: Assignment, families: Sequence[Mapping[Configuration, Run]]) -> dict[str, str]:
    """Return the axes, label -> value, that name the baseline in every family."""
    where = given.where if "=" in given.where else f"{given.where}: {BASELINE}={given.value}"
    condition = parse_condition(tree, given.value, where)
    if any(name == SEED for name, _ in condition.terms):
        raise ConfigError(where, why="a seed is not a configuration", hint="name the values of the other axes")
    found: list[Configuration] = []
    for family in families:
        named = [configuration for configuration, run in family.items() if condition.holds(run.values.get)]
        if len(named) > 1 or (not named and len(family) > 1):
            what = f"names {len(named)} configurations" if named else "names no configuration"
            raise ConfigError(
                f"{where}: {what}",
                why=f"{'these' if named else 'there are'}: {_listed(named or list(family))}",
                hint="name exactly one: NAME=value of each axis that it needs, with spaces between them",
            )
        found += named
    shared = dict(found[0]) if found else {}
    for other in found[1:]:
        shared = {name: value for name, value in shared.items() if dict(other).get(name) == value}
    for family in families:
        if len([one for one in family if shared.items() <= dict(one).items()]) > 1:
            raise ConfigError(
                f"{where}: it is another configuration for other data",
                why=_listed(found),
                hint="name the values of axes, which are the same for all data",
            )
    return shared


def _listed(configurations: Sequence[Configuration]) -> str:
    """Return configurations as text, by the axes in which they differ."""
    differing = {item for one in configurations for item in one if not all(item in other for other in configurations)}
    texts = [" ".join(f"{name}={value}" for name, value in one if (name, value) in differing) for one in configurations]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return "; ".join([*(text or "the only one" for text in texts[:SHOWN]), *more])


def rules_warnings(rules: VerdictRules, families: Sequence[int]) -> list[str]:
    """Return warnings about adaptive seeds that decide little. families: the number of configurations in each."""
    found = []
    most = max(families, default=0)
    if most > MOST_WITHOUT_BASELINE and not rules.baseline:
        found.append(
            f"{most} configurations make {most * (most - 1) // 2} comparisons, too many for {len(rules.seeds)} seeds: "
            f"name one that the others are compared with, such as {BASELINE}=OPTIMIZER=adamw"
        )
    if alone := families.count(1):
        found.append(
            f"{plural(alone, 'configuration')} with losses that no other one can be compared with: "
            f"{rules.seeds_min} seeds of each, and no verdict"
        )
    return found
