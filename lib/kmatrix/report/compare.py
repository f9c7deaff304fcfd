"""Compare two matrices, or two runs: which settings differ, and whether the final losses do.

Runs that differ only in their seed form one configuration. Configurations with the same axes are compared: their final
losses by a test, what their runs took by means alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kmatrix.records.decode import SCHEMA, Record
from kmatrix.records.matrix import read_plan, run_files
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.report import tables, wording
from kmatrix.report.analyse import analyse
from kmatrix.report.ranking import LOSS
from kmatrix.report.render import average, rendered
from kmatrix.report.reproduction import changes
from kmatrix.report.results import Run
from kmatrix.status.wanted import SEED_AXIS, on_axis
from kmatrix.text import first_names
from kmatrix.verdict.family import Pair, PairOutcome, Rules
from kmatrix.verdict.pairs import corrected, tested

# Losses are comparable only if these fields of a run are equal.
MEASURED_ON = {"data_sha256": "data", "block_size": "context length", "eval_samples": "validation sequences"}
# Number of a run -> its title
MEASURES = {LOSS: "final loss", "best_val_loss": "best loss", "tokens": "tokens", **tables.COST_TITLES}
DIVERGED, NO_LOSS = "diverged", "finished without a loss"  # ends of a run
Means = tuple[float | None, float | None]  # over the finished runs of both sides; over common seeds if there are two
Key = tuple[tuple[str, str], ...]  # axes that identify a configuration
Common = Mapping[str, tuple[Sequence[Run], Sequence[Run]]]  # configuration -> its runs on both sides


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a matrix, and all of its runs or one."""

    name: str
    matrix: MatrixDir
    runs: Sequence[Run]
    rules: Rules


class Compared(Record, frozen=True, kw_only=True):
    """A configuration that exists on both sides."""

    name: str
    base: Annotated[dict[str, tuple[str, ...]], Meta(description="finished, diverged, ... -> names of its runs")]
    new: Annotated[dict[str, tuple[str, ...]], Meta(description="the same of new")]
    measures: Annotated[dict[str, Means], Meta(description="number of a run -> its means in base and in new")]
    pair: Annotated[Pair | None, Meta(description="final losses of new, compared with those of base")]
    incomparable: Annotated[str, Meta(description="what the losses were measured on that differs: without a pair")]


class SymbolChange(Record, frozen=True, kw_only=True):
    """A symbol with different effective values."""

    name: str
    base: Annotated[tuple[str, ...], Meta(description='its values in the order of the configurations; "": none')]
    new: Annotated[tuple[str, ...], Meta(description="the same of new")]
    neutral: Annotated[bool, Meta(description="the symbol cannot change a result")]


class Comparison(Record, frozen=True, kw_only=True):
    """Two matrices or two runs, compared."""

    schema: int = SCHEMA
    base: str
    new: str
    symbols: Annotated[tuple[SymbolChange, ...], Meta(description="those that can change a result first")]
    about: Annotated[tuple[str, ...], Meta(description="changes of rules, code, packages and devices")]
    configurations: tuple[Compared, ...]
    only_in_base: tuple[str, ...]
    only_in_new: tuple[str, ...]
    worse: Annotated[tuple[str, ...], Meta(description="whose final loss is worse in new, or all runs failed there")]
    untested: Annotated[tuple[str, ...], Meta(description="those of base whose final losses could not be compared")]
    confidence: float


def side_of(matrix: MatrixDir, run: str = "") -> Side:
    """Return the runs of a matrix, or one of them."""
    runs = [known for known in analyse(matrix).runs if run in ("", known.name)]
    asked = read_plan(matrix.path).verdict
    rules = Rules(confidence=asked.confidence, min_difference=asked.min_difference)
    return Side(f"{matrix.name}/{run}" if run else matrix.name, matrix, runs, rules)


def compare(base: Side, new: Side, neutral: Collection[str] = ()) -> Comparison:
    """Compare the configurations of two sides; a single run on both sides is one, whatever its axes.

    The level, and the margin within which losses are equivalent, are those of base: they were known before new.

    neutral: symbols that cannot change a result.
    """
    axes = _matching_axes(base, new)
    in_base, in_new = _configurations(base, axes), _configurations(new, axes)
    names = {key: _name(key, [side[key][0] for side in (in_base, in_new) if key in side]) for key in in_base | in_new}
    common = {names[key]: (in_base[key], in_new[key]) for key in in_base if key in in_new}
    tests = {
        name: tested(("new", "base"), _losses(after), _losses(before), base.rules)
        for name, (before, after) in common.items()
        if not _measured_differently(before, after)
    }
    pairs = dict(zip(tests, corrected(list(tests.values()), base.rules), strict=True))
    found = tuple(_compared(name, *runs, pairs.get(name)) for name, runs in common.items())
    worse = {name for name, pair in pairs.items() if pair.outcome is PairOutcome.WORSE}
    lost = {Status.FAILED, DIVERGED, NO_LOSS}
    worse |= {one.name for one in found if Status.FINISHED in one.base and one.new.keys() <= lost}
    equal = {name for name, pair in pairs.items() if pair.difference == 0 and len(pair.seeds) > 1}  # it needs no p
    settled = worse | equal | {name for name, pair in pairs.items() if pair.p is not None}
    only_in_base = tuple(names[key] for key in in_base if key not in in_new)
    return Comparison(
        base=base.name,
        new=new.name,
        symbols=tuple(_symbol_changes(base, new, common, neutral)),
        about=tuple(dict.fromkeys(_about(base, new, common))),
        configurations=found,
        only_in_base=only_in_base,
        only_in_new=tuple(names[key] for key in in_new if key not in in_base),
        worse=tuple(name for name in common if name in worse),
        untested=(*(name for name in common if name not in settled), *only_in_base),
        confidence=base.rules.confidence,
    )


def _matching_axes(base: Side, new: Side) -> set[str]:
    """Return the axes that identify a configuration: axes of both sides, and axes with several values on one side."""
    if len(base.runs) == len(new.runs) == 1:
        return set()
    sides = [[set(run.axes.items()) for run in side.runs] for side in (base, new)]
    known = [{axis for axes in side for axis, _ in axes} for side in sides]
    varying = {axis for side in sides for axes in side for axis, _ in axes ^ side[0]}
    return (known[0] & known[1] | varying) - {SEED_AXIS}


def _configurations(side: Side, axes: Collection[str]) -> dict[Key, list[Run]]:
    found: dict[Key, list[Run]] = {}
    for run in side.runs:
        found.setdefault(tuple(sorted(item for item in run.axes.items() if item[0] in axes)), []).append(run)
    return found


def _name(key: Key, runs: Sequence[Run]) -> str:
    """Return the name of a configuration: its optimizer, then its other axes. runs: the first one of each side."""
    ordered = sorted(key, key=lambda item: item[0] != "optimizer")
    words = [on_axis(label, value, runs[0].device == "cpu") for label, value in ordered]
    return ", ".join(words) or " -> ".join(dict.fromkeys(run.configuration for run in runs))


def _measured_differently(base: Sequence[Run], new: Sequence[Run]) -> str:
    """Return the name of the first property that makes the losses of two sets of runs incomparable, or ""."""
    for field, name in MEASURED_ON.items():
        known = [{getattr(run, field) for run in runs if run.counts} for runs in (base, new)]
        if all(known) and known[0] != known[1]:
            return name
    return ""


def _by_seed(runs: Sequence[Run]) -> dict[int, Run]:
    """Return the runs that finished with a loss or diverged by their seed, or a number of its own."""
    found: dict[int, Run] = {}
    for place, run in enumerate(runs):
        if run.counts or run.diverged:
            found[-1 - place if run.seed is None or run.seed in found else run.seed] = run  # none replaces another
    return found


def _losses(runs: Sequence[Run]) -> dict[int, float | None]:
    """Return the final losses by seed; that of a run that diverged is infinity, which is counted and in no mean."""
    return {seed: run.final_val_loss if run.counts else math.inf for seed, run in _by_seed(runs).items()}


def _compared(name: str, base: Sequence[Run], new: Sequence[Run], pair: Pair | None) -> Compared:
    seeds = pair.seeds if pair and len(pair.seeds) > 1 else ()
    known = [
        [run for seed, run in _by_seed(side).items() if run.counts and seed in (seeds or [seed])]
        for side in (base, new)
    ]
    means = {number: [average([getattr(run, number) for run in runs]) for runs in known] for number in MEASURES}
    return Compared(
        name=name,
        base=_by_end(base),
        new=_by_end(new),
        measures={number: (was, now) for number, (was, now) in means.items() if was is not None or now is not None},
        pair=pair,
        incomparable=_measured_differently(base, new),
    )


def _by_end(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    ends = {run.name: DIVERGED if run.diverged else str(run.status) for run in runs}
    ends |= {run.name: NO_LOSS for run in runs if run.status is Status.FINISHED and run.final_val_loss is None}
    return {end: tuple(name for name in ends if ends[name] == end) for end in ends.values()}


def _symbol_changes(base: Side, new: Side, common: Common, neutral: Collection[str]) -> Iterator[SymbolChange]:
    """Yield the symbols that differ between the sides, those that can change a result first."""
    known = []
    for place, side in enumerate((base, new)):
        files = run_files(side.matrix.path)
        known.append([files[run.name].symbols for sides in common.values() for run in sides[place]])
    names = {name for symbols in (*known[0], *known[1]) for name in symbols}
    for name in sorted(names, key=lambda name: (name in neutral, name)):
        was, now = (tuple(dict.fromkeys(symbols.get(name, "") for symbols in side)) for side in known)
        if was != now:
            yield SymbolChange(name=name, base=was, new=now, neutral=name in neutral)


def _about(base: Side, new: Side, common: Common) -> Iterator[str]:
    """Yield the changes of rules, code, packages and devices."""
    if base.rules != new.rules:
        yield "MATRIX_CONFIDENCE or MATRIX_MIN_DIFFERENCE differ: those of base are used"
    for before, after in common.values():
        if {before[0].status, after[0].status} & {Status.PLANNED, Status.SKIPPED}:
            continue  # it has no folder yet
        found = changes(base.matrix.run(before[0].name), new.matrix.run(after[0].name))
        if found.code:
            yield f"trainer code changed: {first_names(found.code)}"
        yield from found.others
    if any(run.gpu and run.gpu.simulated for side in (base, new) for run in side.runs):
        yield "memory of simulated GPUs is not a measurement"


def comparison_text(found: Comparison) -> str:
    """Return a comparison as text."""
    return rendered("compare.txt.j2", c=found, measures=measures)


def measures(one: Compared, found: Comparison) -> tables.Table:
    """Return the numbers of a configuration on both sides of a comparison."""
    rows = []
    for name, (base, new) in one.measures.items():
        change = ""
        if one.incomparable and name.endswith("_loss"):
            change = f"not comparable (different {one.incomparable})"
        elif name == LOSS and one.pair:
            change = tables.difference(one.pair, found.confidence)
            change += f" ({wording.NO_MORE[one.pair.no_more]})" if one.pair.no_more else ""
        elif base and new is not None:
            change = f"{wording.difference(100 * (new - base) / abs(base), 1)}%"
        row = {"": MEASURES[name], "base": wording.quantity(name, base), "new": wording.quantity(name, new)}
        rows.append(row | {"new - base": change})
    return tables.table_of(rows, ("new - base",))
