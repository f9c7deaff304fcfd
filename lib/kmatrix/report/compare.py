"""Two matrices, or two runs: what was set differently, and what may be said of the numbers that came of it.

Runs that differ only in their seed are one configuration, and configurations with the same axes are held together.
A word needs seeds: one run beside one run is a difference, and no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmatrix.records import MatrixDir, RunDir
from kmatrix.report.analysis import analyse, differences, ranks
from kmatrix.report.reading import readable
from kmatrix.report.repeat import changes, named
from kmatrix.report.values import SEED_AXIS, RunNumbers
from kmatrix.stats import LEVEL, Verdict, Word, holm, mean
from kmatrix.stats import compare as judge

LOSSES = ("final loss", "best loss")
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that is compared. of: its value of a run, None where it is unknown.  unit: as it is shown."""

    name: str
    unit: str
    of: Callable[[RunNumbers], float | None]
    lower_is_better: bool = True


MEASURES = (
    Measure("final loss", "nats a token", lambda run: run.final_val_loss),
    Measure("best loss", "nats a token", lambda run: run.best_val_loss),
    Measure("time", "s", lambda run: run.seconds),
    Measure("speed", "tokens/s", lambda run: run.tokens_per_second, lower_is_better=False),
    Measure("memory", "MiB", lambda run: run.peak_memory_mib),
    Measure("energy", "J", lambda run: run.gpu.joules if run.gpu else None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measure of a configuration. base, new: means over the seeds that count, None where none has it.

    verdict: of new beside base, with its difference; None where one of them has no value.
    p: corrected for the number of configurations.  word: what may be said of new.  why_not: why there is no test.
    """

    measure: Measure
    base: float | None
    new: float | None
    verdict: Verdict | None = None
    p: float | None = None
    word: Word = Word.NOT_DISTINGUISHABLE
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A configuration that both have. base, new: its runs.  notes: in what else they differ."""

    name: str
    base: tuple[RunNumbers, ...]
    new: tuple[RunNumbers, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """A symbol that is not the same. base, new: its values in force, "" where that side does not have it.

    runs: the configurations in which it differs so.  neutral: it cannot change a result.
    """

    name: str
    base: str
    new: str
    runs: tuple[str, ...]
    neutral: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two. runs: each with its folder."""

    name: str
    runs: tuple[tuple[RunDir, RunNumbers], ...]

    def folder(self, run: RunNumbers) -> RunDir:
        return next(folder for folder, known in self.runs if known is run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Everything that `make compare` says. only_base, only_new: names of configurations that the other lacks.

    about: what else is not the same: code, torch, devices.
    """

    base: Side
    new: Side
    symbols: tuple[Symbol, ...]
    pairs: tuple[Pair, ...]
    only_base: tuple[str, ...]
    only_new: tuple[str, ...]
    about: tuple[str, ...]


def side_of_matrix(matrix: MatrixDir) -> Side:
    """Return every run of a matrix, from its files alone."""
    return Side(name=matrix.name, runs=tuple((matrix.run(run.name), run) for run in analyse(matrix).runs))


def side_of_run(run: RunDir) -> Side:
    """Return one run, as its matrix has it."""
    matrix = MatrixDir(run.path.parent)
    runs = tuple((run, known) for known in analyse(matrix).runs if known.name == run.name)
    return Side(name=f"{matrix.name}/{run.name}", runs=runs)


def compared(base: Side, new: Side, neutral: Collection[str] = (), *, one: bool = False) -> Compared:
    """Hold two sides together.

    neutral: symbols that cannot change a result.  one: they are a run and a run, to be compared whatever their axes.
    """
    labels = set() if one else _labels(base, new)
    groups = [_groups(side, labels) for side in (base, new)]
    names = _names([*groups[0].items(), *groups[1].items()])
    both = [key for key in groups[0] if key in groups[1]]
    pairs = _judged([_pair(names[key], groups[0][key], groups[1][key]) for key in both])
    return Compared(
        base=base,
        new=new,
        symbols=tuple(_symbols(base, new, pairs, neutral)),
        pairs=pairs,
        only_base=tuple(names[key] for key in groups[0] if key not in groups[1]),
        only_new=tuple(names[key] for key in groups[1] if key not in groups[0]),
        about=tuple(_about(base, new, pairs)),
    )


def _of(side: Side) -> list[RunNumbers]:
    return [run for _, run in side.runs]


def _labels(base: Side, new: Side) -> set[str]:
    """Return the axes by which configurations are matched: those of both, and any that varies on either side."""
    values: list[dict[str, set[str]]] = []
    for side in (base, new):
        found: dict[str, set[str]] = {}
        for run in _of(side):
            for label, value in run.axes.items():
                found.setdefault(label, set()).add(value)
        values.append(found)
    both = values[0].keys() & values[1].keys()
    varying = {label for found in values for label, there in found.items() if len(there) > 1}
    return (both | varying) - {SEED_AXIS}


def _groups(side: Side, labels: Collection[str]) -> dict[Key, list[RunNumbers]]:
    found: dict[Key, list[RunNumbers]] = {}
    for run in _of(side):
        key = tuple((label, value) for label, value in sorted(run.axes.items()) if label in labels)
        found.setdefault(key, []).append(run)
    return found


def _names(groups: Iterable[tuple[Key, list[RunNumbers]]]) -> dict[Key, str]:
    """Return a name to read for each configuration: its optimizer, its other axes, its ranks."""
    names: dict[Key, list[str]] = {}
    for key, runs in groups:
        first = runs[0]
        others = [f"{label} {value}" for label, value in key if label not in ("optimizer", "gpus")]
        size = [ranks(first.world_size, first.device)] if first.world_size else []
        names.setdefault(key, []).append(", ".join([first.optimizer or first.name, *others, *size]))
    return {key: " -> ".join(dict.fromkeys(both)) for key, both in names.items()}


def _pair(name: str, base: Sequence[RunNumbers], new: Sequence[RunNumbers]) -> Pair:
    sides = [[run for run in runs if run.counts] for runs in (base, new)]
    why_not = _not_one_measurement(*sides)
    rows = [_row(measure, *sides, why_not=why_not if measure.name in LOSSES else "") for measure in MEASURES]
    known = tuple(row for row in rows if row.base is not None or row.new is not None)
    return Pair(
        name=name, base=tuple(base), new=tuple(new), rows=known, notes=tuple(differences([*sides[0], *sides[1]]))
    )


def _not_one_measurement(base: Sequence[RunNumbers], new: Sequence[RunNumbers]) -> str:
    """Say why the losses of the two are not the same measurement, "" where they are."""
    for attribute, text in (
        ("data_sha256", "other data"),
        ("block_size", "another context length"),
        ("eval_samples", "other validation sequences"),
    ):
        known = [{getattr(run, attribute) for run in runs} for runs in (base, new)]
        if base and new and known[0] != known[1]:
            return f"measured on {text}"
    return ""


def _row(measure: Measure, base: Sequence[RunNumbers], new: Sequence[RunNumbers], *, why_not: str) -> Row:
    values = [_by_seed(measure, runs) for runs in (base, new)]
    means = [mean(list(found.values())) if found else None for found in values]
    if means[0] is None or means[1] is None:
        return Row(measure=measure, base=means[0], new=means[1])
    return Row(measure=measure, base=means[0], new=means[1], verdict=judge(values[1], values[0]), why_not=why_not)


def _by_seed(measure: Measure, runs: Sequence[RunNumbers]) -> dict[int, float]:
    found = {}
    for number, run in enumerate(runs):
        value = measure.of(run)
        if value is not None and math.isfinite(value):
            found[number if run.seed is None else run.seed] = value
    return found


def _judged(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Give each row its word: of each measure, p corrected after Holm for the number of configurations."""
    words: dict[tuple[int, str], tuple[float, Word]] = {}
    for measure in MEASURES:
        tested = [
            (place, row.verdict)
            for place, pair in enumerate(pairs)
            for row in pair.rows
            if row.measure is measure and row.verdict and row.verdict.p is not None and not row.why_not
        ]
        corrected = holm([verdict.p for _, verdict in tested if verdict.p is not None])
        for (place, verdict), p in zip(tested, corrected, strict=True):
            word = _word(verdict, measure) if p < 1 - LEVEL else Word.NOT_DISTINGUISHABLE
            words[place, measure.name] = (p, word)
    return tuple(
        replace(pair, rows=tuple(_worded(row, words.get((place, row.measure.name))) for row in pair.rows))
        for place, pair in enumerate(pairs)
    )


def _word(verdict: Verdict, measure: Measure) -> Word:
    """Return the word for a measure: that of the verdict takes lower as better."""
    if measure.lower_is_better or verdict.word is Word.NOT_DISTINGUISHABLE:
        return verdict.word
    return Word.WORSE if verdict.word is Word.BETTER else Word.BETTER


def _worded(row: Row, found: tuple[float, Word] | None) -> Row:
    return row if found is None else replace(row, p=found[0], word=found[1])


def _symbols(base: Side, new: Side, pairs: Sequence[Pair], neutral: Collection[str]) -> Iterable[Symbol]:
    """Return the symbols that are not the same, seed by seed of each pair; those that matter first."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for pair in pairs:
        for one, other in _matched(pair):
            before, after = (_values(side.folder(run)) for side, run in ((base, one), (new, other)))
            for name in sorted(before.keys() | after.keys()):
                was, now = before.get(name, ""), after.get(name, "")
                runs = found.setdefault((name, was, now), []) if was != now else []
                runs += [pair.name] if pair.name not in runs else []
    symbols = [
        Symbol(name=name, base=was, new=now, runs=tuple(runs), neutral=name in neutral)
        for (name, was, now), runs in found.items()
    ]
    return sorted(symbols, key=lambda symbol: (symbol.neutral, symbol.name))


def _matched(pair: Pair) -> list[tuple[RunNumbers, RunNumbers]]:
    """Return the runs of the same seed; where there are none, the first of each."""
    by_seed = {run.seed: run for run in pair.new}
    same = [(run, by_seed[run.seed]) for run in pair.base if run.seed in by_seed]
    return same or [(pair.base[0], pair.new[0])]


def _values(run: RunDir) -> Mapping[str, str]:
    values = readable(run.run_json).get("symbols")
    return values if isinstance(values, dict) else {}


def _about(base: Side, new: Side, pairs: Sequence[Pair]) -> Iterable[str]:
    """Say what else is not the same: the code, torch, the machine, the devices."""
    said: dict[str, None] = {}
    for pair in pairs:
        found = changes(base.folder(pair.base[0]), new.folder(pair.new[0]))
        if found.code:
            said[f"the trainer's code: {named(found.code)}"] = None
        said.update(dict.fromkeys(found.others))
        devices = [sorted({run.device_name for run in runs if run.device_name}) for runs in (pair.base, pair.new)]
        if all(devices) and devices[0] != devices[1]:
            said[f"the device was {', '.join(devices[0])}, is {', '.join(devices[1])}"] = None
        if any(run.gpu and run.gpu.simulated for run in (*pair.base, *pair.new)):
            said["memory and energy of simulated GPUs are no measurements"] = None
    return said


def to_json(found: Compared) -> dict[str, Any]:
    """Return everything as one JSON object."""
    return {
        "base": {"name": found.base.name, "runs": [run.name for _, run in found.base.runs]},
        "new": {"name": found.new.name, "runs": [run.name for _, run in found.new.runs]},
        "symbols": [
            {
                "name": one.name,
                "base": one.base,
                "new": one.new,
                "configurations": list(one.runs),
                "neutral": one.neutral,
            }
            for one in found.symbols
        ],
        "about": list(found.about),
        "configurations": [
            {
                "name": pair.name,
                "base": [run.name for run in pair.base],
                "new": [run.name for run in pair.new],
                "measures": {row.measure.name: _row_json(row) for row in pair.rows},
                "notes": list(pair.notes),
            }
            for pair in found.pairs
        ],
        "only_in_base": list(found.only_base),
        "only_in_new": list(found.only_new),
    }


def _row_json(row: Row) -> dict[str, Any]:
    verdict = row.verdict
    span = verdict.interval if verdict and not row.why_not else None
    return {
        "unit": row.measure.unit,
        "base": row.base,
        "new": row.new,
        "difference": verdict.difference if verdict else None,
        "interval": {"low": span.low, "high": span.high, "level": span.level} if span else None,
        "p": row.p,
        "word": str(row.word),
        "method": (verdict.method or None) if verdict and not row.why_not else None,
        "seeds": list(verdict.seeds) if verdict else [],
        "reason": row.why_not or (verdict.reason if verdict else "only one of them has it"),
    }
