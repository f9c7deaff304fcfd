"""The outcomes of the seeds of a matrix, in families of configurations with comparable losses; and which seeds run.

With MATRIX_SEEDS_AUTO all seeds are runs of the matrix from the start. Those that the verdict does not want now are its
reserve: they stay planned. Which ones these are follows from the outcomes, and is stored nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import (
    AxisEntry,
    MatrixFile,
    RunFile,
    RunResult,
    Status,
    VerdictRules,
    read_matrix_file_or_empty,
    read_result,
)
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.state import DISK, NAN, OPEN, RunState, next_attempt
from kmatrix.text import plural
from kmatrix.verdict.family import FamilyVerdict, NoMoreSeeds, PairOutcome, PairVerdict, Replay, Rules
from kmatrix.verdict.replay import replay

SEED_AXIS = "seed"
PLAIN_AXES = ("optimizer", "model", "schedule", "dtype", "dataset", "tokenizer")  # named by their value alone
NOT_NEEDED = "their seeds are not needed so far"  # of the runs in reserve
MOST_DESCRIBED = 4  # comparisons of a family in one line of the journal

SeedRun = tuple[str, int]  # configuration and seed


@dataclass(frozen=True, slots=True)
class SeedEnd:
    """A seed that is over. loss: as in `kmatrix.verdict.family.Losses`."""

    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Configurations with comparable losses: the same data, tokenizer, context and validation sequences."""

    configurations: Mapping[str, Mapping[str, str]]  # name -> its axes, label -> value, without the seed
    runs: Mapping[SeedRun, str]  # names of the runs
    rules: Rules

    def losses(self, ends: Mapping[str, SeedEnd]) -> dict[str, dict[int, float | None]]:
        """Return the losses of the seeds that are over. ends: by run."""
        # A seed whose run is missing or damaged never comes: a verdict must not wait for it.
        found: dict[str, dict[int, float | None]] = {
            name: {seed: None for seed in self.rules.seeds if (name, seed) not in self.runs}
            for name in self.configurations
        }
        for (name, seed), run in self.runs.items():
            if run in ends:
                found[name][seed] = ends[run].loss
        return found


def families_of(rules: VerdictRules, axes: Sequence[AxisEntry], records: Mapping[str, RunFile]) -> tuple[Family, ...]:
    """Return the families of a matrix. axes: of matrix.json.  records: run -> its run.json."""
    members: dict[object, dict[str, dict[str, str]]] = {}
    for run, record in records.items():
        if record != RunFile():  # damaged, or missing
            members.setdefault(measured_on(record.train), {})[run] = all_axes(record, axes)
    return tuple(_family(rules, found, records) for found in members.values())


def measured_on(train: TrainConfig) -> tuple[object, ...]:
    """Return what the losses of a run are measured on: those of runs with the same are comparable."""
    # Its data have no hash before they are prepared.
    data = (train.data_sha256,) if train.data_sha256 else (train.dataset, train.data_path)
    return (*data, train.tokenizer, train.block_size, train.eval_samples)


def _family(rules: VerdictRules, axes: Mapping[str, Mapping[str, str]], records: Mapping[str, RunFile]) -> Family:
    """Return the family of these runs. axes: run -> its axes."""
    configurations: dict[tuple[tuple[str, str], ...], dict[int, str]] = {}
    for run, own in axes.items():
        key = tuple(item for item in own.items() if item[0] != SEED_AXIS)
        seed = records[run].train.seed
        known = configurations.setdefault(key, {})
        known[len(known) if seed < 0 else seed] = run
    keys = list(configurations)
    names = dict(zip(keys, _names([dict(key) for key in keys]), strict=True))
    seeds = rules.seeds or tuple(sorted({seed for known in configurations.values() for seed in known}))
    baseline = next(
        (names[key] for key in keys if rules.baseline and rules.baseline.items() <= dict(key).items()), None
    )
    return Family(
        configurations={names[key]: dict(key) for key in keys},
        runs={(names[key], seed): run for key, known in configurations.items() for seed, run in known.items()},
        rules=Rules(
            seeds=seeds,
            seeds_min=rules.seeds_min,
            confidence=rules.confidence,
            min_difference=rules.min_difference,
            baseline=baseline,
        ),
    )


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


def all_axes(run: RunFile, axes_of_matrix: Sequence[AxisEntry]) -> dict[str, str]:
    """Return the axes of a run in the order of its matrix, label -> value.

    The runs of a matrix that `make add` extended by an axis do not name it: theirs is the value of its symbol. Without
    it they would not count as seeds of the configuration that they are.
    """
    known = {axis.label: run.axes.get(axis.label) or _on_axis(run, axis) for axis in axes_of_matrix}
    return {label: value for label, value in known.items() if value} | dict(run.axes)


def _on_axis(run: RunFile, axis: AxisEntry) -> str:
    """Return the value of a run on an axis, as the axis writes it (2e-3 for 0.002); "" if it is unknown."""
    own = run.symbols.get(axis.symbol) or ""
    return next((value for value in axis.values if _is_same(value, own)), own)


def _is_same(one: str, other: str) -> bool:
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def end_of(state: RunState, train: TrainConfig, result: Callable[[], RunResult | None]) -> SeedEnd | None:
    """Return how a seed ended, None if it is to come: also if its next attempt is made without the user.

    result: returns result.json of a finished run.
    """
    if state.status is Status.FINISHED:
        found = result()
        return SeedEnd(None) if found is None else SeedEnd(_loss(found))
    if state.status in OPEN:
        return None
    if state.status is Status.FAILED and state.last is not None:
        if state.last.kind == NAN:
            return SeedEnd(math.inf)
        batch_size = train.batch_size or 1
        # A full disk is not the fault of the run, which continues as soon as there is space.
        if state.last.kind == DISK or next_attempt(state, batch_size=batch_size, again=True) is not None:
            return None
    return SeedEnd(None)


def _loss(result: RunResult) -> float | None:
    """Return the loss of a finished run, infinity if it diverged: if it ended above its loss before the first step."""
    final, initial = result.final_val_loss, result.initial_val_loss
    if final is None:
        return None
    return math.inf if not math.isfinite(final) or (initial is not None and final >= initial) else final


class Outcomes:
    """The outcomes of all seeds of a matrix; each result.json is read once."""

    def __init__(self, matrix: MatrixDir, records: Mapping[str, RunFile]) -> None:
        """Create the outcomes. records: run -> its run.json."""
        self._matrix, self._records = matrix, records
        self._known: dict[tuple[str, int], RunResult | None] = {}  # run and number of its attempt

    def ends(self, states: Mapping[str, RunState]) -> dict[str, SeedEnd]:
        """Return the runs that are over, and how. states: of all runs."""
        found = ((name, self._end(name, state)) for name, state in states.items() if name in self._records)
        return {name: end for name, end in found if end is not None}

    def _end(self, name: str, state: RunState) -> SeedEnd | None:
        def result() -> RunResult | None:
            key = name, state.number
            if key not in self._known:
                self._known[key] = read_result(self._matrix.run(name))
            return self._known[key]

        return end_of(state, self._records[name].train, result)


@dataclass(slots=True)
class _Round:
    """The last replay of a family, and the losses that it was made from."""

    losses: dict[str, dict[int, float | None]]
    replay: Replay


@dataclass(slots=True)
class AdaptiveSeeds:
    """The runs that the verdicts on the families of a matrix want, by the outcomes so far."""

    families: Sequence[Family]
    _rounds: dict[int, _Round] = field(default_factory=dict)  # by the place of the family
    _logged: dict[int, int] = field(default_factory=dict)  # rounds of each family that `decisions` has yielded

    def wanted(self, ends: Mapping[str, SeedEnd]) -> frozenset[str]:
        """Return the runs to execute now; those of them that are running stay in it. ends: of the runs that are over.

        Empty: the verdicts are final.
        """
        found: set[str] = set()
        for place, family in enumerate(self.families):
            losses = family.losses(ends)
            last = self._rounds.get(place)
            if last is None or not _is_between_rounds(last, losses):
                last = self._rounds[place] = _Round(losses, replay(losses, family.rules))
            found |= {family.runs[name, seed] for name, seed in last.replay.wanted if seed not in losses[name]}
        return frozenset(found)

    def reserve(self, statuses: Mapping[str, Status], wanted: Collection[str]) -> frozenset[str]:
        """Return the runs that wait, and that nobody executes unless the verdict wants them later. wanted: now."""
        names = (run for family in self.families for run in family.runs.values())
        waiting = (Status.PLANNED, Status.STOPPED)
        return frozenset(run for run in names if statuses.get(run) in waiting and run not in wanted)

    def likely(self, reserve: Collection[str]) -> frozenset[str] | None:
        """Return the runs of the reserve that are needed if each open comparison needs as many seeds as expected.

        None before the first look at a family, when nothing is expected.
        """
        found: set[str] = set()
        for place, family in enumerate(self.families):
            last = self._rounds.get(place)
            if last is None or (not last.replay.rounds and last.replay.wanted):
                return None
            for name, number in _likely_seeds(last.replay).items():
                runs = [family.runs[name, seed] for seed in family.rules.seeds if (name, seed) in family.runs]
                found.update([run for run in runs if run in reserve][:number])
        return frozenset(found)

    @property
    def replays(self) -> tuple[Replay, ...]:
        """The replay of each family at the last call of `wanted`, in their order."""
        return tuple(self._rounds[place].replay for place in range(len(self.families)))

    def decisions(self) -> Iterator[str]:
        """Yield a line per family whose verdict was looked at since the last call: what is decided, what is open."""
        for place, last in self._rounds.items():
            rounds = last.replay.rounds
            if len(rounds) > self._logged.get(place, 0):
                yield from self._look(place)
            self._logged[place] = len(rounds)

    def looks(self) -> tuple[str, ...]:
        """Return a line per family: what was decided and what was open when its verdict was looked at last."""
        return tuple(text for place in self._rounds for text in self._look(place))

    def _look(self, place: int) -> Iterator[str]:
        replay = self._rounds[place].replay
        if replay.rounds and len(self.families[place].configurations) > 1:
            pairs = _described(replay.verdict.against_reference)
            yield f"looked after {plural(replay.rounds[-1], 'seed')}: {pairs}"


def _likely_seeds(now: Replay) -> dict[str, int]:
    """Return how many seeds of each configuration open comparisons need, besides those that are wanted now."""
    found: dict[str, int] = {}
    for pair in now.verdict.against_reference:
        if pair.outcome is PairOutcome.OPEN and pair.no_more is None:
            # Too many: all that there are.
            number = len(now.verdict.rules.seeds) if pair.more_seeds is None else pair.more_seeds
            for name in (pair.a, pair.b):
                found[name] = max(found.get(name, 0), number)
    coming = {name for name, _ in now.wanted}
    return {name: number - (name in coming) for name, number in found.items()}


def _is_between_rounds(last: _Round, losses: Mapping[str, Mapping[int, float | None]]) -> bool:
    """Return whether the round of the last replay still goes on: the runs that it wants have not all ended.

    A replay takes a while. Between two rounds it would want the same runs, without those that have ended meanwhile.
    """
    if not any(seed not in losses[name] for name, seed in last.replay.wanted):
        return losses == last.losses
    kept = all(name in losses and known.items() <= losses[name].items() for name, known in last.losses.items())
    return kept and all(
        seed in last.losses[name] or (name, seed) in last.replay.wanted for name in losses for seed in losses[name]
    )


def _described(pairs: Sequence[PairVerdict]) -> str:
    """Return `muon better than adamw; muon against soap open, about 2 more seeds`."""
    texts = []
    for pair in pairs[:MOST_DESCRIBED]:
        if pair.outcome is PairOutcome.OPEN:
            more = f", about {pair.more_seeds} more" if pair.more_seeds is not None and pair.no_more is None else ""
            why = f" ({pair.no_more})" if pair.no_more is not None else ""
            texts.append(f"{pair.a} against {pair.b} open{why}{more}")
        elif pair.outcome is PairOutcome.EQUIVALENT:
            texts.append(f"{pair.a} and {pair.b} equivalent")
        else:
            texts.append(f"{pair.a} {pair.outcome} than {pair.b}")
    rest = len(pairs) - MOST_DESCRIBED
    return "; ".join([*texts, *([f"and {plural(rest, 'more comparison')}"] if rest > 0 else [])])


def without_budget(verdict: FamilyVerdict) -> FamilyVerdict:
    """Return the verdict of a matrix whose budget is spent: open comparisons that would get a seed get none."""

    def pair_without(pair: PairVerdict) -> PairVerdict:
        ended = pair.outcome is PairOutcome.OPEN and pair.no_more is None
        return replace(pair, no_more=NoMoreSeeds.BUDGET) if ended else pair

    return replace(verdict, pairs=tuple(pair_without(pair) for pair in verdict.pairs))


def rules_are_lost(plan: MatrixFile, run: RunFile) -> bool:
    """Return whether a matrix that executes what its losses want has lost its rules: no sound matrix.json.

    plan: as read.  run: any of its runs.
    """
    return plan == MatrixFile() and run.selected


def has_adaptive_seeds(rules: VerdictRules) -> bool:
    """Return whether a matrix with these rules executes its seeds as far as its losses want them."""
    return rules.seeds_auto and bool(rules.seeds)


def adaptive_seeds(matrix: MatrixDir, records: Mapping[str, RunFile]) -> AdaptiveSeeds | None:
    """Return the adaptive seeds of a matrix, None if it has none. records: run -> its run.json."""
    plan = read_matrix_file_or_empty(matrix)
    if not has_adaptive_seeds(plan.verdict):
        return None
    return AdaptiveSeeds(families_of(plan.verdict, plan.axis_entries, records))
