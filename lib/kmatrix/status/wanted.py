"""Which runs of a matrix the losses want: all, or with MATRIX_SEEDS_AUTO the seeds that its verdict asks for.

With MATRIX_SEEDS_AUTO all seeds are runs of the matrix from the start. Those that the verdict does not want so far are
its reserve: they stay planned. Which ones these are follows from the losses, and is stored nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kmatrix.records.matrix import Plan
from kmatrix.records.runs import AxisEntry, Status, VerdictRules
from kmatrix.status.fold import DISK, Files, State, is_over, loss_of
from kmatrix.status.look import Look
from kmatrix.text import plural

if TYPE_CHECKING:
    from kmatrix.verdict.family import PairVerdict, Replay, Rules

SEED_AXIS = "seed"
PLAIN_AXES = ("optimizer", "model", "schedule", "dtype", "dataset", "tokenizer")  # named by their value alone
NOT_NEEDED = "their seeds are not needed so far"  # of the runs in reserve
MOST_DESCRIBED = 4  # comparisons of a family in one line


@dataclass(frozen=True, slots=True)
class SeedEnd:
    """A seed that is over. loss: as in `kmatrix.verdict.family.Losses`."""

    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Configurations with comparable losses: the same data, tokenizer, context and validation sequences."""

    configurations: Mapping[str, Mapping[str, str]]  # name -> its axes, label -> value, without the seed
    runs: Mapping[tuple[str, int], str]  # configuration and seed -> name of the run
    rules: Rules

    def losses(self, ends: Mapping[str, SeedEnd]) -> dict[str, dict[int, float | None]]:
        """Return the losses of the seeds that are over. ends: by run."""
        # A seed without a run never comes: a verdict must not wait for it.
        found: dict[str, dict[int, float | None]] = {
            name: {seed: None for seed in self.rules.seeds if (name, seed) not in self.runs}
            for name in self.configurations
        }
        for (name, seed), run in self.runs.items():
            if run in ends:
                found[name][seed] = ends[run].loss
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSeeds:
    """What the verdicts on the families of a matrix have asked for by now."""

    families: Sequence[Family]
    replays: Sequence[Replay]  # of each family

    @property
    def asked(self) -> frozenset[str]:
        """The runs that a round asked for, also those that are over; the others are the reserve."""
        pairs = zip(self.families, self.replays, strict=True)
        wanted = ((family, name, seed) for family, one in pairs for name in one.asked for seed in one.asked[name])
        return frozenset(family.runs[name, seed] for family, name, seed in wanted if (name, seed) in family.runs)

    def reserve(self, statuses: Mapping[str, Status]) -> frozenset[str]:
        """Return the runs that wait, and that nobody executes unless the verdict wants them later. statuses: by run."""
        waiting = (Status.PLANNED, Status.STOPPED)
        return frozenset(run for run, status in statuses.items() if status in waiting) - self.asked

    def looks(self) -> Iterator[str]:
        """Yield a line per family: what was decided and what was open when its verdict was looked at last."""
        for family, now in zip(self.families, self.replays, strict=True):
            if now.rounds and len(family.configurations) > 1:
                pairs = _described(now.verdict.against_reference)
                yield f"looked after {plural(now.rounds[-1], 'seed')}: {pairs}"


def wanted(look: Look) -> Sequence[str]:
    """Return the runs that are part of a matrix so far, in its order: a controller starts those that are due."""
    seeds = seeds_of(look)
    return list(look.states) if seeds is None else [name for name in look.states if name in seeds.asked]


def seeds_of(look: Look) -> AdaptiveSeeds | None:
    """Return the adaptive seeds of a matrix, None if it has none."""
    if not has_adaptive_seeds(look.plan.verdict):
        return None
    ends = {name: end_of(look.files[name], state) for name, state in look.states.items()}
    return adaptive_seeds(families_of_plan(look.plan), {name: end for name, end in ends.items() if end is not None})


def adaptive_seeds(families: Sequence[Family], ends: Mapping[str, SeedEnd]) -> AdaptiveSeeds:
    """Return what these families want. ends: of the runs that are over."""
    found = [_replayed(_frozen(family.losses(ends)), family.rules) for family in families]
    return AdaptiveSeeds(families=families, replays=found)


def has_adaptive_seeds(rules: VerdictRules) -> bool:
    """Return whether a matrix with these rules executes its seeds as far as its losses want them."""
    return rules.seeds_auto and bool(rules.seeds)


def end_of(files: Files, state: State) -> SeedEnd | None:
    """Return how a seed ended, None if it is to come: also if its next attempt is made without the user.

    A full disk is not the fault of the run, which goes on as soon as there is space.
    """
    if not is_over(state) or state.kind == DISK:
        return None
    return SeedEnd(loss_of(files, state))


def families_of_plan(plan: Plan) -> tuple[Family, ...]:
    """Return the families of a matrix."""
    members: dict[object, dict[str, tuple[dict[str, str], int]]] = {}
    for run in plan.runs:
        train, seed = plan.train_of(run), plan.train_of(run).get("seed")
        axes = all_axes(run.axes, plan.symbols_of(run), plan.axis_entries)
        # Losses are comparable if they are measured on the same. Data have no hash before they are prepared.
        names = ["data_sha256"] if train.get("data_sha256") else ["dataset", "data_path"]
        measured_on = tuple(map(train.get, (*names, "tokenizer", "block_size", "eval_samples")))
        members.setdefault(measured_on, {})[run.name] = axes, seed if isinstance(seed, int) else -1
    return tuple(_family(plan.verdict, found) for found in members.values())


def _family(rules: VerdictRules, members: Mapping[str, tuple[Mapping[str, str], int]]) -> Family:
    """Return a family. members: run -> its axes and its seed, -1 if that is unknown."""
    from kmatrix.verdict.family import Rules

    configurations: dict[tuple[tuple[str, str], ...], dict[int, str]] = {}
    for run, (axes, seed) in members.items():
        key = tuple(item for item in axes.items() if item[0] != SEED_AXIS)
        known = configurations.setdefault(key, {})
        known[len(known) if seed < 0 else seed] = run
    keys = list(configurations)
    names = dict(zip(keys, _names([dict(key) for key in keys]), strict=True))
    seeds = rules.seeds or tuple(sorted({seed for known in configurations.values() for seed in known}))
    asked = rules.baseline.items() if rules.baseline else None
    baseline = None if asked is None else next((names[key] for key in keys if asked <= dict(key).items()), None)
    return Family(
        configurations={names[key]: dict(key) for key in keys},
        runs={(names[key], seed): run for key, known in configurations.items() for seed, run in known.items()},
        rules=Rules(
            seeds=seeds, seeds_min=rules.seeds_min, confidence=rules.confidence, min_difference=rules.min_difference,
            baseline=baseline,
        ),
    )  # fmt: skip


def _names(configurations: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a name for each configuration: its optimizer, and the values of the axes in which they differ."""
    labels = dict.fromkeys(label for axes in configurations for label in axes)
    varying = {label for label in labels if len({axes.get(label) for axes in configurations}) > 1}
    found: list[str] = []
    for axes in configurations:
        parts = [
            value if label in PLAIN_AXES else f"{label} {value}"
            for label, value in axes.items()
            if label in varying or label == "optimizer"
        ]
        name = ", ".join(parts) or "the configuration"
        found.append(name if name not in found else f"{name} ({len(found) + 1})")
    return found


def all_axes(own: Mapping[str, str], symbols: Mapping[str, str], axes: Sequence[AxisEntry]) -> dict[str, str]:
    """Return the axes of a run in the order of its matrix, label -> value. symbols: of the run.  axes: of the matrix.

    The runs of a matrix that `make add` extended by an axis do not name it: theirs is the value of its symbol. Without
    it they would not count as seeds of the configuration that they are.
    """
    known = {axis.label: own.get(axis.label) or _on_axis(symbols, axis) for axis in axes}
    return {label: value for label, value in known.items() if value} | dict(own)


def _on_axis(symbols: Mapping[str, str], axis: AxisEntry) -> str:
    """Return the value of a run on an axis, as the axis writes it (2e-3 for 0.002); "" if it is unknown."""
    own = symbols.get(axis.symbol) or ""
    return next((value for value in axis.values if _is_same(value, own)), own)


def _is_same(one: str, other: str) -> bool:
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


FrozenLosses = tuple[tuple[str, tuple[tuple[int, float | None], ...]], ...]


def _frozen(losses: Mapping[str, Mapping[int, float | None]]) -> FrozenLosses:
    def comparable(loss: float | None) -> float | None:
        return math.inf if loss is not None and math.isnan(loss) else loss  # NaN is not equal to itself

    return tuple(
        (name, tuple((seed, comparable(loss)) for seed, loss in sorted(known.items())))
        for name, known in losses.items()
    )


@lru_cache(maxsize=64)  # a replay of many seeds takes seconds, and between two looks the losses are mostly the same
def _replayed(losses: FrozenLosses, rules: Rules) -> Replay:
    from kmatrix.verdict.replay import replay  # its statistics take a tenth of the time of a status

    return replay({name: dict(known) for name, known in losses}, rules)


def _described(pairs: Sequence[PairVerdict]) -> str:
    """Return `muon better than adamw; muon against soap open, about 2 more`."""
    texts = []
    for pair in pairs[:MOST_DESCRIBED]:
        text = f"{pair.a} {pair.outcome} than {pair.b}"
        if pair.outcome == "equivalent":
            text = f"{pair.a} and {pair.b} equivalent"
        elif pair.outcome == "open":
            more = "" if pair.more_seeds is None else f", about {pair.more_seeds} more"
            text = f"{pair.a} against {pair.b} open" + (f" ({pair.no_more})" if pair.no_more else more)
        texts.append(text)
    rest = len(pairs) - MOST_DESCRIBED
    return "; ".join([*texts, *([f"and {plural(rest, 'more comparison')}"] if rest > 0 else [])])
