"""Compare two matrices, or two runs: which settings differ, and which differences in their numbers are significant.

Runs that differ only in their seed form one configuration. Configurations with the same axes are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kmatrix.records.decode import as_json, replaced
from kmatrix.records.matrix import read_plan, run_files
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import RunFile, Status, VerdictRules
from kmatrix.report.analysis import analyse
from kmatrix.report.numbers import RunNumbers
from kmatrix.report.pair_text import (
    digits_for,
    margin_text,
    other_side,
    outcome_word,
    p_text,
    percent_text,
    signed_text,
)
from kmatrix.report.ranking import differences, measured_differently, ranks
from kmatrix.report.reproduction import changes
from kmatrix.stats import mean
from kmatrix.status.wanted import SEED_AXIS
from kmatrix.text import UNKNOWN, WIDTH, columns, first_names, section, signed, table, wrap
from kmatrix.verdict.family import Method, NoMoreSeeds, PairOutcome, Rules
from kmatrix.verdict.family import Pair as PairVerdict
from kmatrix.verdict.pairs import Evidence, corrected, described, tested

FINAL_LOSS = "final loss"
AxisValues = tuple[tuple[str, str], ...]  # (axis, value) pairs that identify a configuration


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One compared quantity."""

    name: str
    unit: str
    of: Callable[[RunNumbers], float | None]  # its value in a run
    lower_is_better: bool = True
    digits: int = 0  # decimals in the text
    is_loss: bool = False  # comparable only if measured on the same data


METRICS = (
    ComparedMetric(FINAL_LOSS, "nats/token", lambda run: run.final_val_loss, digits=4, is_loss=True),
    ComparedMetric("best loss", "nats/token", lambda run: run.best_val_loss, digits=4, is_loss=True),
    ComparedMetric("time", "s", lambda run: run.seconds, digits=1),
    ComparedMetric("speed", "tokens/s", lambda run: run.tokens_per_second, lower_is_better=False),
    ComparedMetric("memory", "MiB", lambda run: run.peak_memory_mib),
    ComparedMetric("energy", "J", lambda run: run.gpu.joules if run.gpu else None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One metric of one configuration."""

    metric: ComparedMetric
    base: float | None  # mean over seeds
    new: float | None  # mean over seeds
    test: Evidence | None = None  # new - base; None if either is unknown
    corrected: PairVerdict | None = None  # Holm-corrected for the number of configurations; None without a test
    measured_differently: str = ""  # property that makes the two losses incomparable, e.g. "data"

    @property
    def verdict(self) -> PairVerdict | None:
        """Return the difference new - base. Its outcome assumes that lower is better."""
        return self.corrected or (described(self.test, Rules()) if self.test else None)

    @property
    def p(self) -> float | None:
        """Return the two-sided, Holm-corrected p, or None without a test."""
        return self.corrected.p_holm if self.corrected else None

    @property
    def is_tested(self) -> bool:
        """True if there is a p, or all differences by seed are 0, which needs none."""
        if self.p is not None:
            return True
        found = None if self.measured_differently else self.test
        return found is not None and found.difference == 0 and len(found.seeds) > 1

    @property
    def outcome(self) -> PairOutcome:
        """Return the outcome about new."""
        outcome = self.corrected.outcome if self.corrected else PairOutcome.OPEN
        return outcome if self.metric.lower_is_better else other_side(outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationPair:
    """A configuration that exists on both sides."""

    name: str
    base: tuple[RunNumbers, ...]
    new: tuple[RunNumbers, ...]
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()  # other differences between the runs


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolChange:
    """A symbol with different effective values."""

    name: str
    base: str  # "" if this side does not have the symbol
    new: str  # "" if this side does not have the symbol
    configurations: tuple[str, ...]  # those with this change
    neutral: bool = False  # True if the symbol cannot change a result


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSet:
    """One side of a comparison."""

    name: str
    runs: tuple[tuple[RunDir, RunNumbers], ...]
    files: Mapping[str, RunFile] = field(default_factory=dict)  # of all runs of its matrix, as planned
    rules: VerdictRules = field(default_factory=VerdictRules)  # of its matrix

    @property
    def numbers(self) -> list[RunNumbers]:
        return [run for _, run in self.runs]

    def directory(self, run: RunNumbers) -> RunDir:
        """Return the directory of a run of this side."""
        return next(directory for directory, known in self.runs if known is run)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRuns:
    """The result of comparing two matrices or two runs."""

    base: RunSet
    new: RunSet
    symbols: tuple[SymbolChange, ...]  # those that can change a result first
    pairs: tuple[ConfigurationPair, ...]
    only_base: tuple[str, ...]  # configurations without a counterpart
    only_new: tuple[str, ...]  # configurations without a counterpart
    notes: tuple[str, ...]  # changes of rules, code, packages and devices
    rules: Rules  # those of base

    @property
    def lost(self) -> tuple[str, ...]:
        """The configurations with a final loss in base whose runs in new have all ended without one."""
        over = (Status.FINISHED, Status.FAILED)
        return tuple(
            pair.name
            for pair in self.pairs
            if any(run.counts for run in pair.base) and all(run.status in over and not run.counts for run in pair.new)
        )

    @property
    def untested(self) -> tuple[str, ...]:
        """The configurations of base whose final losses were not compared: one seed, other data, none in new."""
        rows = {pair.name: row for pair in self.pairs for row in pair.rows if row.metric.name == FINAL_LOSS}
        names = [pair.name for pair in self.pairs if not (pair.name in rows and rows[pair.name].is_tested)]
        return tuple(name for name in [*names, *self.only_base] if name not in self.lost)

    @property
    def worse(self) -> tuple[str, ...]:
        """The configurations whose final loss is worse in new, Holm-corrected over the configurations."""
        rows = ((pair.name, row) for pair in self.pairs for row in pair.rows)
        return tuple(name for name, row in rows if row.metric.name == FINAL_LOSS and row.outcome is PairOutcome.WORSE)


def runs_of_matrix(matrix: MatrixDir) -> RunSet:
    """Return all runs of a matrix."""
    runs = tuple((matrix.run(run.name), run) for run in analyse(matrix).runs)
    return _run_set(matrix.name, matrix, runs)


def single_run(run: RunDir) -> RunSet:
    """Return one run, with its status as its matrix has it."""
    matrix = MatrixDir(run.path.parent)
    runs = tuple((run, known) for known in analyse(matrix).runs if known.name == run.name)
    return _run_set(f"{matrix.name}/{run.name}", matrix, runs)


def _run_set(name: str, matrix: MatrixDir, runs: tuple[tuple[RunDir, RunNumbers], ...]) -> RunSet:
    return RunSet(name=name, runs=runs, files=run_files(matrix.path), rules=read_plan(matrix.path).verdict)


def compare_runs(base: RunSet, new: RunSet, neutral: Collection[str] = (), *, one: bool = False) -> ComparedRuns:
    """Compare the configurations of two sides.

    The level, and the margin within which losses are equivalent, are those of base: they were known before new.

    neutral: symbols that cannot change a result.  one: both sides are a single run, compared even if their axes differ.
    """
    # Without axes, each single run is the one configuration of its side.
    axes = set() if one else _matching_axes(base, new)
    in_base, in_new = _configurations(base, axes), _configurations(new, axes)
    names = _names([*in_base.items(), *in_new.items()])
    common = [key for key in in_base if key in in_new]
    rules = Rules(confidence=base.rules.confidence, min_difference=base.rules.min_difference)
    pairs = _with_corrected_p([_pair(names[key], in_base[key], in_new[key], rules) for key in common], rules)
    return ComparedRuns(
        base=base,
        new=new,
        symbols=tuple(_symbol_changes(base, new, pairs, neutral)),
        pairs=pairs,
        only_base=tuple(names[key] for key in in_base if key not in in_new),
        only_new=tuple(names[key] for key in in_new if key not in in_base),
        notes=tuple(_notes(base, new, pairs)),
        rules=rules,
    )


def _matching_axes(base: RunSet, new: RunSet) -> set[str]:
    """Return the axes that identify a configuration: axes of both sides, and axes with several values on one side."""
    values: list[dict[str, set[str]]] = []
    for side in (base, new):
        found: dict[str, set[str]] = {}
        for run in side.numbers:
            for axis, value in run.axes.items():
                found.setdefault(axis, set()).add(value)
        values.append(found)
    common = values[0].keys() & values[1].keys()
    varying = {axis for found in values for axis, known in found.items() if len(known) > 1}
    return (common | varying) - {SEED_AXIS}


def _configurations(side: RunSet, axes: Collection[str]) -> dict[AxisValues, list[RunNumbers]]:
    found: dict[AxisValues, list[RunNumbers]] = {}
    for run in side.numbers:
        key = tuple((axis, value) for axis, value in sorted(run.axes.items()) if axis in axes)
        found.setdefault(key, []).append(run)
    return found


def _names(configurations: Iterable[tuple[AxisValues, list[RunNumbers]]]) -> dict[AxisValues, str]:
    """Return the display name of each configuration: optimizer, other axes, number of ranks."""
    names: dict[AxisValues, list[str]] = {}
    for key, runs in configurations:
        first = runs[0]
        others = [f"{axis} {value}" for axis, value in key if axis not in ("optimizer", "gpus")]
        size = [ranks(first.world_size, first.device)] if first.world_size else []
        names.setdefault(key, []).append(", ".join([first.optimizer or first.name, *others, *size]))
    return {key: " -> ".join(dict.fromkeys(both)) for key, both in names.items()}


def _pair(name: str, base: Sequence[RunNumbers], new: Sequence[RunNumbers], rules: Rules) -> ConfigurationPair:
    finished = [run for run in base if run.counts], [run for run in new if run.counts]
    property_name = measured_differently(*finished)
    ended = [run for run in base if run.counts or run.diverged], [run for run in new if run.counts or run.diverged]
    rows = [_row(metric, *ended, property_name if metric.is_loss else "", rules) for metric in METRICS]
    return ConfigurationPair(
        name=name,
        base=tuple(base),
        new=tuple(new),
        rows=tuple(row for row in rows if row.base is not None or row.new is not None),
        notes=tuple(differences([*finished[0], *finished[1]])),
    )


def _row(
    metric: ComparedMetric, base: Sequence[RunNumbers], new: Sequence[RunNumbers], differently: str, rules: Rules
) -> ComparedRow:
    before, after = _by_seed(metric, base), _by_seed(metric, new)
    finite = [[value for value in side.values() if math.isfinite(value)] for side in (before, after)]
    return ComparedRow(
        metric=metric,
        base=mean(finite[0]) if finite[0] else None,
        new=mean(finite[1]) if finite[1] else None,
        test=tested(("new", "base"), after, before, rules) if all(finite) else None,
        measured_differently=differently if all(finite) else "",
    )


def _by_seed(metric: ComparedMetric, runs: Sequence[RunNumbers]) -> dict[int, float]:
    """Return the values by seed; the loss of a run that diverged is infinity, which `tested` counts and leaves out."""
    found = {}
    for number, run in enumerate(runs):
        value = metric.of(run) if run.counts else math.inf
        if value is not None and (math.isfinite(value) if run.counts else metric.is_loss):
            found[number if run.seed is None else run.seed] = value
    return found


def _with_corrected_p(pairs: Sequence[ConfigurationPair], rules: Rules) -> tuple[ConfigurationPair, ...]:
    """Return the pairs with verdicts, Holm-corrected per metric for the number of configurations."""
    # Per metric: a question about the loss is not weakened by tests of the speed.
    found: dict[tuple[int, str], PairVerdict] = {}
    for metric in METRICS:
        tests = {
            place: row.test
            for place, pair in enumerate(pairs)
            for row in pair.rows
            if row.metric is metric and row.test and row.test.p is not None and not row.measured_differently
        }
        # The margin is one of losses.
        own = rules if metric.is_loss else replaced(rules, min_difference=None)
        verdicts = corrected(list(tests.values()), own)
        found |= {(place, metric.name): verdict for place, verdict in zip(tests, verdicts, strict=True)}
    return tuple(
        replace(pair, rows=tuple(replace(row, corrected=found.get((place, row.metric.name))) for row in pair.rows))
        for place, pair in enumerate(pairs)
    )


def _symbol_changes(
    base: RunSet, new: RunSet, pairs: Sequence[ConfigurationPair], neutral: Collection[str]
) -> list[SymbolChange]:
    """Return the symbols that differ between runs of the same seed, those that can change a result first."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for pair in pairs:
        for one, other in _same_seed(pair):
            before, after = base.files[one.name].symbols, new.files[other.name].symbols
            for name in sorted(before.keys() | after.keys()):
                was, now = before.get(name, ""), after.get(name, "")
                if was != now:
                    found.setdefault((name, was, now), {})[pair.name] = None
    symbols = [
        SymbolChange(name=name, base=was, new=now, configurations=tuple(configurations), neutral=name in neutral)
        for (name, was, now), configurations in found.items()
    ]
    return sorted(symbols, key=lambda symbol: (symbol.neutral, symbol.name))


def _same_seed(pair: ConfigurationPair) -> list[tuple[RunNumbers, RunNumbers]]:
    """Return the runs of each common seed; without one, the first run of each side."""
    by_seed = {run.seed: run for run in pair.new}
    same = [(run, by_seed[run.seed]) for run in pair.base if run.seed in by_seed]
    return same or [(pair.base[0], pair.new[0])]


def _notes(base: RunSet, new: RunSet, pairs: Sequence[ConfigurationPair]) -> Iterable[str]:
    """Return the changes of rules, code, packages, processor and devices, without duplicates."""
    notes: dict[str, None] = {}
    rules = [(side.rules.confidence, side.rules.min_difference) for side in (base, new)]
    if rules[0] != rules[1]:
        notes["MATRIX_CONFIDENCE or MATRIX_MIN_DIFFERENCE differ: those of base are used"] = None
    for pair in pairs:
        found = changes(base.directory(pair.base[0]), new.directory(pair.new[0]))
        if found.code:
            notes[f"trainer code changed: {first_names(found.code)}"] = None
        notes.update(dict.fromkeys(found.others))
        devices = [sorted({run.device_name for run in runs if run.device_name}) for runs in (pair.base, pair.new)]
        # Only if both sides know their devices: a pending run has none yet.
        if all(devices) and devices[0] != devices[1]:
            notes[f"device {', '.join(devices[0])} -> {', '.join(devices[1])}"] = None
        if any(run.gpu and run.gpu.simulated for run in (*pair.base, *pair.new)):
            notes["memory and energy of simulated GPUs are not measurements"] = None
    return notes


def to_json(found: ComparedRuns) -> dict[str, Any]:
    """Return the comparison as a JSON object."""
    return {
        "base": {"name": found.base.name, "runs": [run.name for run in found.base.numbers]},
        "new": {"name": found.new.name, "runs": [run.name for run in found.new.numbers]},
        "symbols": [asdict(symbol) for symbol in found.symbols],
        "about": list(found.notes),
        "configurations": [
            {
                "name": pair.name,
                "base": [run.name for run in pair.base],
                "new": [run.name for run in pair.new],
                "measures": {row.metric.name: _row_json(row) for row in pair.rows},
                "notes": list(pair.notes),
            }
            for pair in found.pairs
        ],
        "only_in_base": list(found.only_base),
        "only_in_new": list(found.only_new),
        "worse": list(found.worse),
        "lost": list(found.lost),
        "untested": list(found.untested),
        "confidence": found.rules.confidence,
        "min_difference": found.rules.min_difference,
    }


def _row_json(row: ComparedRow) -> dict[str, Any]:
    verdict = row.verdict
    comparable = verdict if not row.measured_differently else None
    reason = f"different {row.measured_differently}" if row.measured_differently else ""
    return {
        "unit": row.metric.unit,
        "base": row.base,
        "new": row.new,
        "difference": verdict.difference if verdict else None,
        "interval": as_json(comparable.interval) if comparable else None,
        "p": row.p,
        "word": outcome_word(row.outcome, row.verdict.method if row.verdict else Method.NONE),
        "method": (str(comparable.method) or None) if comparable else None,
        "seeds": list(verdict.seeds) if verdict else [],
        "outcome": str(row.outcome),
        "detectable": comparable.detectable if comparable else None,
        "more_seeds": comparable.more_seeds if comparable else None,
        "deviation": comparable.deviation if comparable else None,
        "margin": comparable.margin if comparable else None,
        "no_more": None if comparable is None or comparable.no_more is None else str(comparable.no_more),
        "reason": reason or (verdict.reason if verdict else "only one side has it"),
    }


def render(found: ComparedRuns) -> str:
    """Return the comparison as text."""
    title = "Comparison"
    lines = [title, "=" * len(title), *wrap(f"base  {found.base.name}"), *wrap(f"new   {found.new.name}"), ""]
    lines += [*section("Changed settings", list(_symbol_lines(found))), ""]
    for pair in found.pairs:
        lines += [*section(pair.name, list(_pair_lines(pair, found.rules))), ""]
    for side, names in (("base", found.only_base), ("new", found.only_new)):
        if names:
            lines += [*wrap(f"only in {side}: {'; '.join(names)}"), ""]
    if not found.pairs:
        lines += ["no configuration in common", ""]
    if found.lost:
        lines += [
            *wrap(f"without a loss in new, where all runs failed or diverged: {'; '.join(found.lost)}"),
            "",
        ]
    return "\n".join(line.rstrip() for line in [*lines, *wrap(_method(found))]).rstrip() + "\n"


def _symbol_lines(found: ComparedRuns) -> Iterator[str]:
    effective = [symbol for symbol in found.symbols if not symbol.neutral]
    for symbol in effective:
        in_some = len(symbol.configurations) < len(found.pairs)
        yield from wrap(f"{_symbol(symbol)}{f'  ({first_names(symbol.configurations)})' if in_some else ''}")
    if not effective:
        yield "none that can change a result" if found.pairs else "nothing to compare"
    if neutral := [_symbol(symbol) for symbol in found.symbols if symbol.neutral]:
        yield from wrap(f"without effect on results: {'; '.join(neutral)}")
    for note in found.notes:
        yield from wrap(note, bullet="! ")


def _symbol(symbol: SymbolChange) -> str:
    return f"{symbol.name} {symbol.base or '(none)'} -> {symbol.new or '(none)'}"


def _pair_lines(pair: ConfigurationPair, rules: Rules) -> Iterator[str]:
    yield from wrap(f"base {_counts(pair.base)}; new {_counts(pair.new)}")
    if pair.rows:
        titles = ("", "base", "new", "difference", "", f"{percent_text(rules.confidence)} CI", "new is")
        rows = [_row_cells(row, rules) for row in pair.rows]
        yield from table(columns(titles, (0, len(titles) - 1)), rows, WIDTH, rule=True)
    else:
        yield "no finished run on either side"
    for note in pair.notes:
        yield from wrap(note, bullet="! ")


def _counts(runs: Sequence[RunNumbers]) -> str:
    """Return the number of finished runs with their seeds, and the number of others by status."""
    counted = [run for run in runs if run.counts]
    seeds = sorted(run.seed for run in counted if run.seed is not None)
    listed = f"{len(counted)} finished" + (f" (seed {' '.join(map(str, seeds))})" if seeds else "")
    others = [f"{sum(run.status is status for run in runs)} {status}" for status in Status if status != Status.FINISHED]
    return ", ".join([listed, *(text for text in others if not text.startswith("0 "))])


def _row_cells(row: ComparedRow, rules: Rules) -> list[str]:
    digits = row.metric.digits
    name = f"{row.metric.name}, {row.metric.unit}"
    means = [UNKNOWN if value is None else f"{value:,.{digits}f}" for value in (row.base, row.new)]
    verdict = row.verdict
    if verdict is None or verdict.difference is None:
        return [name, *means, UNKNOWN, "", "", ""]
    # Of the absolute value, so that the sign is that of the difference.
    percent = f"{signed(100 * verdict.difference / abs(row.base), 1)}%" if row.base else ""
    interval = verdict.interval if not row.measured_differently else None
    if interval and row.metric.is_loss:
        digits = max(digits, digits_for(interval))
    bounds = f"[{signed(interval.low, digits)}, {signed(interval.high, digits)}]" if interval else ""
    difference = signed(verdict.difference, digits) if interval else signed_text(verdict.difference, digits)
    return [name, *means, difference, percent, bounds, _outcome_text(row, verdict, rules)]


def _outcome_text(row: ComparedRow, verdict: PairVerdict, rules: Rules) -> str:
    """Return the outcome about new with its p value, or the reason why there is none."""
    if row.measured_differently:
        return f"not comparable (different {row.measured_differently})"
    if row.p is None:
        return "equal" if verdict.difference == 0 else f"not significant ({verdict.reason.partition(':')[0]})"
    if row.outcome is PairOutcome.EQUIVALENT:
        return f"equivalent within {margin_text(rules.min_difference or 0.0)}"
    if verdict.no_more is NoMoreSeeds.DIVERGED:
        return f"{outcome_word(row.outcome, verdict.method)} (the lower one diverged more often)"
    return f"{outcome_word(row.outcome, verdict.method)}, {p_text(row.p, rules.alpha)}"


def _method(found: ComparedRuns) -> str:
    """Return the name of the significance test, or "" if there was none."""
    tested = [row for pair in found.pairs for row in pair.rows if row.p is not None]
    if not tested:
        return ""
    methods = " and ".join(dict.fromkeys(row.verdict.method for row in tested if row.verdict))
    correction = ", p Holm-corrected for the number of configurations" if len(found.pairs) > 1 else ""
    level, alpha = percent_text(found.rules.confidence), round(found.rules.alpha, 10)
    return f"{level} CI of the difference; Student's t test ({methods}){correction}; significant if p <= {alpha:g}"
