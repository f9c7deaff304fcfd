"""Compare two matrices, or two runs: which settings differ, and which differences in their numbers are significant.

Runs that differ only in their seed form one configuration. Configurations with the same axes are compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from kmatrix.records.decode import SCHEMA, Record, replaced
from kmatrix.records.matrix import read_plan, run_files
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import RunFile, Status, VerdictRules
from kmatrix.report import wording
from kmatrix.report.analyse import analyse
from kmatrix.report.ranking import LOSS, UNITS, differences, value_of
from kmatrix.report.render import rendered
from kmatrix.report.reproduction import changes
from kmatrix.report.results import Run
from kmatrix.report.tables import Table
from kmatrix.stats import mean
from kmatrix.status.wanted import GPUS_AXIS, SEED_AXIS
from kmatrix.text import UNKNOWN, first_names, plural, signed
from kmatrix.verdict.family import Pair, PairOutcome, Rules
from kmatrix.verdict.pairs import corrected, tested

# Losses are comparable only if these fields of a run are equal.
MEASURED_ON = {"data_sha256": "data", "block_size": "context length", "eval_samples": "validation sequences"}
LOSSES = (LOSS, "best_val_loss")
HIGHER = ("tokens_per_second",)  # is better
METRICS = {  # field of a run -> title, unit, decimals
    LOSS: ("final loss", UNITS[LOSS], 4),
    "best_val_loss": ("best loss", UNITS[LOSS], 4),
    "seconds": ("time", "s", 1),
    "tokens_per_second": ("speed", "tokens/s", 0),
    "peak_memory_mib": ("memory", "MiB", 0),
    "joules": ("energy", "J", 0),
}
Key = tuple[tuple[str, str], ...]  # axes that identify a configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison."""

    name: str
    matrix: MatrixDir
    runs: Sequence[Run]
    files: Mapping[str, RunFile]  # of all runs of its matrix, as planned
    rules: VerdictRules


class Measure(Record, frozen=True, kw_only=True):
    """One number of one configuration on both sides."""

    unit: str
    base: Annotated[float | None, Meta(description="mean; of a loss over the seeds of both sides, if there are any")]
    new: Annotated[float | None, Meta(description="the same of new")]
    pair: Annotated[Pair | None, Meta(description="new compared with base; null if either is unknown")] = None
    outcome: Annotated[PairOutcome, Meta(description="about new")] = PairOutcome.OPEN
    incomparable: Annotated[str, Meta(description="what the losses were measured on that differs")] = ""

    @property
    def is_tested(self) -> bool:
        """True if there is a p, or all differences by seed are 0, which needs none."""
        pair = self.pair
        if self.incomparable or pair is None:
            return False
        return pair.p_holm is not None or (pair.difference == 0 and len(pair.seeds) > 1)


class Compared(Record, frozen=True, kw_only=True):
    """A configuration that exists on both sides."""

    name: str
    base: Annotated[tuple[str, ...], Meta(description="names of its runs")]
    new: Annotated[tuple[str, ...], Meta(description="names of its runs")]
    base_ends: Annotated[str, Meta(description="how its runs ended: 2 finished (seeds 1 2), 1 diverged (seed 3)")]
    new_ends: Annotated[str, Meta(description="the same of new")]
    measures: Annotated[dict[str, Measure], Meta(description="by the name of the number in a run")]
    notes: Annotated[tuple[str, ...], Meta(description="other differences between the runs")] = ()


class SymbolChange(Record, frozen=True, kw_only=True):
    """A symbol with different effective values."""

    name: str
    base: Annotated[str, Meta(description="empty: this side does not have the symbol")]
    new: Annotated[str, Meta(description="empty: this side does not have the symbol")]
    configurations: Annotated[tuple[str, ...], Meta(description="those with this change")]
    neutral: Annotated[bool, Meta(description="the symbol cannot change a result")] = False


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
    worse: Annotated[tuple[str, ...], Meta(description="configurations whose final loss is worse in new")]
    lost: Annotated[tuple[str, ...], Meta(description="those whose runs in new all failed or diverged")]
    untested: Annotated[tuple[str, ...], Meta(description="those of base whose final losses could not be compared")]
    confidence: float
    min_difference: float | None


def side_of(matrix: MatrixDir, run: str = "") -> Side:
    """Return the runs of a matrix, or one of them."""
    runs = [known for known in analyse(matrix).runs if run in ("", known.name)]
    name = f"{matrix.name}/{run}" if run else matrix.name
    rules = read_plan(matrix.path).verdict
    return Side(name=name, matrix=matrix, runs=runs, files=run_files(matrix.path), rules=rules)


def compare(base: Side, new: Side, neutral: Collection[str] = (), *, one: bool = False) -> Comparison:
    """Compare the configurations of two sides.

    The level, and the margin within which losses are equivalent, are those of base: they were known before new.

    neutral: symbols that cannot change a result.  one: both sides are a single run, compared even if their axes differ.
    """
    # Without axes, each single run is the one configuration of its side.
    axes = set() if one else _matching_axes(base, new)
    in_base, in_new = _configurations(base, axes), _configurations(new, axes)
    names = _names(in_base, in_new)
    common = {names[key]: (in_base[key], in_new[key]) for key in in_base if key in in_new}
    rules = Rules(confidence=base.rules.confidence, min_difference=base.rules.min_difference)
    # A question about the loss is not weakened by tests of the speed.
    found = {metric: _measured(metric, common, rules) for metric in METRICS}
    configurations = tuple(
        Compared(
            name=name,
            base=tuple(run.name for run in before),
            new=tuple(run.name for run in after),
            base_ends=_ends(before),
            new_ends=_ends(after),
            measures={metric: of[name] for metric, of in found.items() if name in of},
            notes=tuple(differences([run for run in (*before, *after) if run.counts])),
        )
        for name, (before, after) in common.items()
    )
    losses = found[LOSS]
    lost = tuple(name for name, runs in common.items() if _is_lost(*runs))
    only_in_base = tuple(names[key] for key in in_base if key not in in_new)
    untested = [name for name in common if name not in losses or not losses[name].is_tested]
    return Comparison(
        base=base.name,
        new=new.name,
        symbols=tuple(_symbol_changes(base, new, common, neutral)),
        about=tuple(dict.fromkeys(_about(base, new, common))),
        configurations=configurations,
        only_in_base=only_in_base,
        only_in_new=tuple(names[key] for key in in_new if key not in in_base),
        worse=tuple(name for name, one in losses.items() if one.outcome is PairOutcome.WORSE),
        lost=lost,
        untested=tuple(name for name in [*untested, *only_in_base] if name not in lost),
        confidence=rules.confidence,
        min_difference=rules.min_difference,
    )


Common = Mapping[str, tuple[Sequence[Run], Sequence[Run]]]  # configuration -> its runs on both sides


def _matching_axes(base: Side, new: Side) -> set[str]:
    """Return the axes that identify a configuration: axes of both sides, and axes with several values on one side."""
    values: list[dict[str, set[str]]] = []
    for side in (base, new):
        found: dict[str, set[str]] = {}
        for axis, value in (item for run in side.runs for item in run.axes.items()):
            found.setdefault(axis, set()).add(value)
        values.append(found)
    varying = {axis for found in values for axis, known in found.items() if len(known) > 1}
    return ((values[0].keys() & values[1].keys()) | varying) - {SEED_AXIS}


def _configurations(side: Side, axes: Collection[str]) -> dict[Key, list[Run]]:
    found: dict[Key, list[Run]] = {}
    for run in side.runs:
        found.setdefault(tuple(sorted(item for item in run.axes.items() if item[0] in axes)), []).append(run)
    return found


def _names(*sides: Mapping[Key, Sequence[Run]]) -> dict[Key, str]:
    """Return the name of each configuration: optimizer, other axes, number of ranks."""
    names: dict[Key, list[str]] = {}
    for key, runs in (item for side in sides for item in side.items()):
        first = runs[0]
        others = [f"{axis} {value}" for axis, value in key if axis not in ("optimizer", GPUS_AXIS)]
        size = [plural(first.world_size, "rank" if first.device == "cpu" else "GPU")] if first.world_size else []
        names.setdefault(key, []).append(", ".join([first.optimizer or first.name, *others, *size]))
    return {key: " -> ".join(dict.fromkeys(both)) for key, both in names.items()}


def _measured(metric: str, common: Common, rules: Rules) -> dict[str, Measure]:
    """Return one number of each configuration that has it, its p corrected for the number of configurations."""
    is_loss = metric in LOSSES
    own = rules if is_loss else replaced(rules, min_difference=None)  # the margin is one of losses
    found, tests = {}, {}
    for name, sides in common.items():
        base, new = (_by_seed(metric, runs) for runs in sides)
        different = _measured_differently(*sides) if is_loss else ""
        finite = [{seed: value for seed, value in side.items() if math.isfinite(value)} for side in (base, new)]
        test = tested(("new", "base"), new, base, own) if all(finite) else None
        if test is not None and test.p is not None and not different:
            tests[name] = test
        common_seeds = finite[0].keys() & finite[1].keys()
        shown = common_seeds if len(common_seeds) > 1 else finite[0].keys() | finite[1].keys()
        means = [[value for seed, value in side.items() if seed in shown] for side in finite]
        if any(finite):
            found[name] = Measure(
                unit=METRICS[metric][1],
                base=mean(means[0]) if means[0] else None,
                new=mean(means[1]) if means[1] else None,
                pair=None if test is None else corrected([test], own)[0],
                incomparable=different if all(finite) else "",
            )
    for name, pair in zip(tests, corrected(list(tests.values()), own), strict=True):
        outcome = pair.mirrored().outcome if metric in HIGHER else pair.outcome
        found[name] = replaced(found[name], pair=pair, outcome=outcome)
    return found


def _by_seed(metric: str, runs: Sequence[Run]) -> dict[int, float]:
    """Return the values by seed; the loss of a run that diverged is infinity, which is counted and left out."""
    found = {}
    for place, run in enumerate(runs):
        value = value_of(run, metric) if run.counts else math.inf if run.diverged and metric in LOSSES else None
        if value is not None:
            found[-1 - place if run.seed is None or run.seed in found else run.seed] = value  # none replaces another
    return found


def _measured_differently(base: Sequence[Run], new: Sequence[Run]) -> str:
    """Return the name of the first property that makes the losses of two sets of runs incomparable, or ""."""
    for field, name in MEASURED_ON.items():
        known = [{getattr(run, field) for run in runs if run.counts} for runs in (base, new)]
        if all(known) and known[0] != known[1]:
            return name
    return ""


def _is_lost(base: Sequence[Run], new: Sequence[Run]) -> bool:
    """Return whether base has a final loss, and the runs of new have all ended without one."""
    over = (Status.FINISHED, Status.FAILED)
    return any(run.counts for run in base) and all(run.status in over and not run.counts for run in new)


def _ends(runs: Sequence[Run]) -> str:
    """Return `2 finished (seeds 1 2), 1 diverged (seed 3)`."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault("diverged" if run.diverged else str(run.status), []).append(run)
    parts = []
    for word, those in found.items():
        seeds = sorted(run.seed for run in those if run.seed is not None)
        parts.append(
            f"{len(those)} {word}" + (f" (seed{'s'[: len(seeds) > 1]} {' '.join(map(str, seeds))})" if seeds else "")
        )
    return ", ".join(parts)


def _symbol_changes(base: Side, new: Side, common: Common, neutral: Collection[str]) -> list[SymbolChange]:
    """Return the symbols that differ between runs of the same seed, those that can change a result first."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for configuration, runs in common.items():
        for one, other in _same_seed(*runs):
            before, after = base.files[one.name].symbols, new.files[other.name].symbols
            for name in before.keys() | after.keys():
                was, now = before.get(name, ""), after.get(name, "")
                if was != now:
                    found.setdefault((name, was, now), {})[configuration] = None
    symbols = [
        SymbolChange(name=name, base=was, new=now, configurations=tuple(those), neutral=name in neutral)
        for (name, was, now), those in found.items()
    ]
    return sorted(symbols, key=lambda symbol: (symbol.neutral, symbol.name, symbol.base, symbol.new))


def _same_seed(base: Sequence[Run], new: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return the runs of each common seed; without one, the first run of each side."""
    by_seed = {run.seed: run for run in new}
    return [(run, by_seed[run.seed]) for run in base if run.seed in by_seed] or [(base[0], new[0])]


def _about(base: Side, new: Side, common: Common) -> Iterator[str]:
    """Yield the changes of rules, code, packages, processor and devices."""
    rules = [(side.rules.confidence, side.rules.min_difference) for side in (base, new)]
    if rules[0] != rules[1]:
        yield "MATRIX_CONFIDENCE or MATRIX_MIN_DIFFERENCE differ: those of base are used"
    for runs in common.values():
        found = changes(base.matrix.run(runs[0][0].name), new.matrix.run(runs[1][0].name))
        if found.code:
            yield f"trainer code changed: {first_names(found.code)}"
        yield from found.others
        devices = [sorted({run.device_name for run in side if run.device_name}) for side in runs]
        # Only if both sides know their devices: a pending run has none yet.
        if all(devices) and devices[0] != devices[1]:
            yield f"device {', '.join(devices[0])} -> {', '.join(devices[1])}"
        if any(run.gpu and run.gpu.simulated for side in runs for run in side):
            yield "memory of simulated GPUs is not a measurement"


def comparison_text(found: Comparison) -> str:
    """Return a comparison as text."""
    return rendered("compare.txt.j2", c=found, measures=measures, method=method)


def measures(one: Compared, found: Comparison) -> Table:
    """Return the numbers of a configuration on both sides of a comparison."""
    rows = []
    for name, each in one.measures.items():
        title, _, digits = METRICS[name]
        means = [UNKNOWN if value is None else f"{value:,.{digits}f}" for value in (each.base, each.new)]
        pair = each.pair
        cells = [UNKNOWN, "", "", ""]
        if pair is not None and pair.difference is not None:
            # Of the absolute value, so that the sign is that of the difference.
            share = f"{signed(100 * pair.difference / abs(each.base), 1)}%" if each.base else ""
            interval = None if each.incomparable else pair.interval
            digits = max(digits, wording.digits_for(interval)) if interval and digits == wording.DIGITS else digits
            bounds = f"[{signed(interval.low, digits)}, {signed(interval.high, digits)}]" if interval else ""
            shown = signed(pair.difference, digits) if interval else wording.difference(pair.difference, digits)
            cells = [shown, share, bounds, _new_is(each, found)]
        rows.append([f"{title}, {each.unit}", *means, *cells])
    level = wording.percent(found.confidence)
    return Table(titles=("", "base", "new", "difference", "", f"{level} CI", "new is"), rows=rows, words=(0, 6))


def _new_is(each: Measure, found: Comparison) -> str:
    """Return the outcome about new with its p value, or the reason why there is none."""
    pair = each.pair
    if each.incomparable or pair is None:
        return f"not comparable (different {each.incomparable})"
    if pair.p_holm is None:
        return "equal" if pair.difference == 0 else f"not significant ({pair.reason.partition(':')[0]})"
    if each.outcome == "equivalent":
        return f"equivalent within {found.min_difference or 0.0:.6g}"
    word = "not distinguishable" if each.outcome == "open" else str(each.outcome)
    if pair.no_more == "diverged":
        return f"{word} (the lower one diverged more often)"
    return f"{word}, {wording.p_text(pair.p_holm, 1 - found.confidence)}"


def method(found: Comparison) -> str:
    """Return the name of the significance test of a comparison, or "" if there was none."""
    pairs = [each.pair for one in found.configurations for each in one.measures.values() if each.is_tested]
    methods = dict.fromkeys(str(pair.method) for pair in pairs if pair is not None and pair.p_holm is not None)
    if not methods:
        return ""
    correction = ", p Holm-corrected for the number of configurations" if len(found.configurations) > 1 else ""
    level, alpha = wording.percent(found.confidence), round(1 - found.confidence, 10)
    test = f"Student's t test ({' and '.join(methods)})"
    return f"{level} CI of the difference; {test}{correction}; significant if p <= {alpha:g}"
