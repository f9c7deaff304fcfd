"""Which runs of a matrix the losses want: all, or with MATRIX_SEEDS_AUTO the seeds that its verdict asks for.

With MATRIX_SEEDS_AUTO all seeds are runs of the matrix from the start. Those that the verdict does not want so far are
its reserve: they stay planned. Which ones these are follows from the losses, and is stored nowhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kmatrix.records.dataset import FLAT
from kmatrix.records.decode import Scalar
from kmatrix.records.matrix import Plan
from kmatrix.records.runs import AxisEntry, Status, VerdictRules
from kmatrix.status.fold import DISK, Files, State, is_over, loss_of
from kmatrix.status.look import Look
from kmatrix.text import plural

if TYPE_CHECKING:
    from kmatrix.verdict.family import Replay, Rules

SEED_AXIS, GPUS_AXIS = "seed", "gpus"
Key = tuple[tuple[str, str], ...]  # the axes of a configuration
# Datasets whose text does not depend on the tokenizer, and the symbols that select a part of it: runs with equal
# text are comparable in bits per byte, even with different tokenizers.
TEXT_DATASETS = ("stdlib", "shakespeare", "folder")
TEXT_SYMBOLS = ("GPT2_DATA_PATH", "GPT2_TEXT_COLUMN", "GPT2_VAL_PERCENT")
SHORT_HASH = 8  # characters of a hash in texts
PLAIN_AXES = ("optimizer", "model", "schedule", "dtype", "dataset", "tokenizer")  # named by their value alone
NOT_NEEDED = "their seeds are not needed so far"  # of the runs in reserve


@dataclass(frozen=True, slots=True)
class SeedEnd:
    """A seed that is over. loss, bits: nats/token and bits/byte, as in `kmatrix.verdict.family.Losses`."""

    loss: float | None
    bits: float | None = None

    def measured(self, *, in_bits: bool) -> float | None:
        """Return what a family compares."""
        return self.bits if in_bits and self.loss != math.inf else self.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Configurations with comparable losses: the same data, tokenizer, context and validation sequences.

    Several tokenizers of one text are compared in bits per byte.
    """

    configurations: Mapping[str, Mapping[str, str]]  # name -> its axes, label -> value, without the seed
    runs: Mapping[tuple[str, int], str]  # configuration and seed -> name of the run
    rules: Rules
    data_sha256: str  # "": unknown, or in bits per byte several
    in_bits: bool

    def losses(self, ends: Mapping[str, SeedEnd]) -> dict[str, dict[int, float | None]]:
        """Return the losses of the seeds that are over. ends: by run."""
        # A seed without a run never comes: a verdict must not wait for it.
        found: dict[str, dict[int, float | None]] = {
            name: {seed: None for seed in self.rules.seeds if (name, seed) not in self.runs}
            for name in self.configurations
        }
        for (name, seed), run in self.runs.items():
            if run in ends:
                found[name][seed] = ends[run].measured(in_bits=self.in_bits)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSeeds:
    """What the verdicts on the families of a matrix have asked for by now."""

    replays: Sequence[Replay]  # of each family
    asked: frozenset[str]  # runs that a round asked for, also those that are over; the others are the reserve

    def reserve(self, statuses: Mapping[str, Status]) -> frozenset[str]:
        """Return the runs that wait, and that nobody executes unless the verdict wants them later. statuses: by run."""
        waiting = (Status.PLANNED, Status.STOPPED)
        return frozenset(run for run, status in statuses.items() if status in waiting) - self.asked


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
    replays, asked = [], set()
    for family in families:
        losses = tuple((name, tuple(known.items())) for name, known in family.losses(ends).items())
        one = _replayed(losses, family.rules)
        replays.append(one)
        asked |= {run for (name, seed), run in family.runs.items() if seed in one.asked.get(name, ())}
    return AdaptiveSeeds(replays=replays, asked=frozenset(asked))


def has_adaptive_seeds(rules: VerdictRules) -> bool:
    """Return whether a matrix with these rules executes its seeds as far as its losses want them."""
    return rules.seeds_auto and bool(rules.seeds)


def end_of(files: Files, state: State) -> SeedEnd | None:
    """Return how a seed ended, None if it is to come: also if its next attempt is made without the user.

    A full disk is not the fault of the run, which goes on as soon as there is space.
    """
    if not is_over(state) or state.kind == DISK:
        return None
    loss = loss_of(files, state)
    bits = files.result.final_bits_per_byte if files.result and state.status is Status.FINISHED else None
    return SeedEnd(loss, bits)


def families_of_plan(plan: Plan) -> tuple[Family, ...]:
    """Return the families of a matrix: the one grouping of runs into configurations, for status and reports."""
    members: dict[tuple[Scalar, ...], list[_Member]] = {}
    for run in plan.runs:
        train, symbols = plan.train_of(run), plan.symbols_of(run)
        one = _Member(name=run.name, axes=all_axes(run.axes, symbols, plan.axis_entries), train=train, symbols=symbols)
        members.setdefault(one.measured_on, []).append(one)
    found = list(_merged(members.values()))
    return tuple(_family(plan.verdict, group, names) for group, names in zip(found, _names(found), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A run of a family."""

    name: str
    axes: Mapping[str, str]
    train: Mapping[str, Scalar]
    symbols: Mapping[str, str]

    @property
    def key(self) -> Key:
        """What the runs of a configuration share: a run without axes is one by itself."""
        return tuple(item for item in self.axes.items() if item[0] != SEED_AXIS)

    @property
    def seed(self) -> int | None:
        seed = self.train.get("seed")
        return seed if isinstance(seed, int) and seed >= 0 else None

    @property
    def measured_on(self) -> tuple[Scalar, ...]:
        # Data have no hash before they are prepared.
        data = ("data_sha256",) if self.train.get("data_sha256") else ("dataset", "data_path")
        return tuple(self.train.get(name) for name in (*data, "tokenizer", "block_size", "eval_samples"))

    @property
    def text(self) -> str:
        """The name of the training text, equal for all tokenizers; "" if only the tokens are known."""
        dataset, layout = str(self.train.get("dataset") or ""), self.train.get("data_layout") or FLAT
        if dataset not in TEXT_DATASETS or not self.train.get("data_sha256"):
            return ""
        # Rows that are packed by best fit have lower bits per byte: they are another text.
        parts = [f"{name}={self.symbols.get(name, '')}" for name in TEXT_SYMBOLS]
        return " ".join([dataset, *parts, str(layout)])


def _merged(groups: Collection[Sequence[_Member]]) -> Iterator[list[_Member]]:
    """Yield the runs of each family: those of several tokenizers of one text are one, by bits per byte."""
    texts: dict[object, list[Sequence[_Member]]] = {}
    for group in groups:
        first = group[0]
        same = (first.text, first.train.get("block_size"), first.train.get("eval_samples"))
        texts.setdefault(same if first.text else first.measured_on, []).append(group)
    for found in texts.values():
        # Two hashes of one tokenizer are two versions of the text.
        if len({group[0].train.get("tokenizer") for group in found}) == len(found):
            yield [one for group in found for one in group]
        else:
            yield from map(list, found)


def _family(rules: VerdictRules, members: Sequence[_Member], names: Mapping[Key, str]) -> Family:
    from kmatrix.verdict.family import Rules

    runs: dict[str, dict[int, str]] = {name: {} for name in names.values()}
    for one in members:
        known = runs[names[one.key]]
        # A second run of a seed is a seed of its own: none replaces another.
        known[-1 - len(known) if one.seed is None or one.seed in known else one.seed] = one.name
    axes = {names[one.key]: dict(one.key) for one in members}
    asked = rules.baseline.items() if rules.baseline else None
    in_bits = len({one.train.get("tokenizer") for one in members}) > 1
    return Family(
        configurations=axes,
        runs={(name, seed): run for name, known in runs.items() for seed, run in known.items()},
        rules=Rules(
            seeds=rules.seeds if has_adaptive_seeds(rules) else (), seeds_min=rules.seeds_min,
            confidence=rules.confidence,
            min_difference=None if in_bits else rules.min_difference,  # nats/token
            baseline=None if asked is None else next((name for name in axes if asked <= axes[name].items()), None),
        ),
        data_sha256="" if in_bits else str(members[0].train.get("data_sha256") or ""),
        in_bits=in_bits,
    )  # fmt: skip


def _names(families: Sequence[Sequence[_Member]]) -> Iterator[dict[Key, str]]:
    """Yield the names of the configurations of each family: optimizer, and values of the axes in which they differ."""
    configurations = [dict(key) for family in families for key in dict.fromkeys(one.key for one in family)]
    labels = dict.fromkeys(label for axes in configurations for label in axes)
    varying = {label for label in labels if len({axes.get(label) for axes in configurations}) > 1}
    on_cpu = all(one.train.get("device") == "cpu" for family in families for one in family)

    def text(axes: Mapping[str, str]) -> str:
        ordered = sorted(axes.items(), key=lambda item: item[0] != "optimizer")  # its value first
        words = [on_axis(label, value, on_cpu) for label, value in ordered if label in varying or label == "optimizer"]
        return ", ".join(words) or "the configuration"

    often, taken = Counter(map(text, configurations)), set[str]()
    for family in families:
        data, names = str(family[0].train.get("data_sha256") or "")[:SHORT_HASH], {}
        for key in dict.fromkeys(one.key for one in family):
            name = text(dict(key))
            name = f"{name}, data {data}" if often[name] > 1 and data else name
            names[key] = f"{name} ({len(taken) + 1})" if name in taken else name
            taken.add(names[key])
        yield names


def on_axis(label: str, value: str, on_cpu: bool) -> str:
    """Return a value of an axis in the name of a configuration: `muon`, `lr 0.002`, `4 GPUs`."""
    if label == GPUS_AXIS and value.isdecimal():
        return plural(int(value), "rank" if on_cpu else "GPU")
    return value if label in PLAIN_AXES else f"{label} {value}"


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


@lru_cache(maxsize=64)  # a replay of many seeds takes seconds, and between two looks the losses are mostly the same
def _replayed(losses: tuple[tuple[str, tuple[tuple[int, float | None], ...]], ...], rules: Rules) -> Replay:
    from kmatrix.verdict.replay import replay  # its statistics take a tenth of the time of a status

    return replay({name: dict(known) for name, known in losses}, rules)
