"""Add cells to an existing matrix: further values of an axis, or a new axis. Its runs stay as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from kmatrix.errors import ConfigError
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.create import add_to
from kmatrix.experiment.make import checked, prepared
from kmatrix.experiment.plan import Plan, make_plan
from kmatrix.kconfig.assignments import SETS
from kmatrix.kconfig.tree import Tree, member_text, open_tree
from kmatrix.matrix.axes import parse_override, resolve_name
from kmatrix.matrix.expand import Run
from kmatrix.records.decode import replaced
from kmatrix.records.matrix import read_plan, run_files
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import RunFile, VerdictRules
from kmatrix.text import first_names

SYMBOLS = {  # field of VerdictRules -> symbol that sets it
    "seeds_auto": "MATRIX_SEEDS_AUTO",
    "seeds": "MATRIX_SEEDS_MAX",
    "seeds_min": "MATRIX_SEEDS_MIN",
    "confidence": "MATRIX_CONFIDENCE",
    "min_difference": "MATRIX_MIN_DIFFERENCE",
    "baseline": "MATRIX_BASELINE",
    "target_loss": "TARGET_LOSS",
}

RESULTS_DIR = "RESULTS_DIR"


def plan_more(
    matrix: MatrixDir,
    assignments: Mapping[str, str],
    *,
    kconfig: str = "",
    gpus: str = "",
    options: Collection[str] = (),
) -> Plan:
    """Return the plan of the cells that a matrix does not have yet. Its `matrix.axes` are those of the whole matrix.

    assignments: NAME=value[,value...]: each value is combined with all values of the other axes, as if it had been
    given when the matrix was made.  gpus, options: as for `make_plan`.
    Raises ConfigError if there is no new cell, or the present configuration gives other runs than those of the matrix.
    """
    if not assignments:
        raise ConfigError("add needs a value", hint="pass NAME=value, such as OPTIMIZER=muon")
    record = read_plan(matrix.path)
    tree = open_tree(kconfig)
    words = dict(word.partition("=")[::2] for word in record.overrides)
    axes = {axis.symbol: axis.values for axis in record.axis_entries}
    words = _merged(tree, matrix, words, assignments, axes=axes)
    plan = make_plan(matrix.config, words, kconfig=kconfig, gpus=gpus, options=options)
    known = {run.run_id: run.name or "" for run in record.runs if run.run_id}
    rules = _rules_with(matrix, record.verdict, plan.verdict, [run for run in plan.matrix.runs if run.run_id in known])
    if gone := known.keys() - {run.run_id for run in plan.matrix.runs}:
        raise ConfigError(
            f"{matrix.name} cannot be extended: its configuration now gives other runs",
            why=f"no cell is {first_names(known[one] for one in sorted(gone))}: symbols, defaults or this machine "
            "have changed",
            hint="start a new matrix with `make test-matrix`; its finished runs are reused where they are equal",
        )
    new = [planned for planned in plan.runs if planned.run.run_id not in known]
    if not new:
        raise ConfigError(f"{matrix.name} already has these cells", why=" ".join(_words(assignments)))
    if taken := {planned.name for planned in new} & set(known.values()):
        raise ConfigError(f"{matrix.name} already has runs named {first_names(sorted(taken))}")
    added = tuple(planned.run for planned in new)
    given = tuple(word for word in plan.overrides if not word.startswith(f"{RESULTS_DIR}="))
    cells = dataclasses.replace(plan.matrix, runs=added)
    return dataclasses.replace(plan, runs=tuple(new), matrix=cells, overrides=given, verdict=rules)


def _rules_with(matrix: MatrixDir, former: VerdictRules, now: VerdictRules, runs: Sequence[Run]) -> VerdictRules:
    """Return the rules of a matrix after an addition: its own, perhaps with more seeds.

    runs: those that the matrix has, on its new axes.

    Raises ConfigError for other rules: a rule that is chosen after the first losses decides nothing.
    """
    raised = now.seeds != former.seeds and now.seeds[: len(former.seeds)] == former.seeds and former.seeds_auto
    kept = replaced(now, seeds=former.seeds, raised=former.raised) if raised else replaced(now, raised=former.raised)
    # A new axis adds its label to the baseline, which stays the configuration of the same runs.
    baseline = kept.baseline.items()
    widened = bool(former.baseline) and former.baseline.items() <= baseline
    if widened and any(baseline <= dict(run.axes).items() for run in runs):
        kept = replaced(kept, baseline=former.baseline)
    if kept != former:
        names = [name for name in former.__struct_fields__ if getattr(kept, name) != getattr(former, name)]
        raise ConfigError(
            f"{matrix.name} compares its losses by other rules: {_described(former, names)}",
            why=f"with these values: {_described(now, names)}; rules are fixed before the first run",
            hint="only MATRIX_SEEDS_MAX can be raised; start a new matrix, whose finished runs are reused",
        )
    if not raised:
        return replaced(now, raised=former.raised)
    return replaced(now, raised=(*former.raised, len(former.seeds)))


def _described(rules: VerdictRules, names: Sequence[str]) -> str:
    """Return `MATRIX_SEEDS_AUTO=y, MATRIX_CONFIDENCE=0.95` of these fields, by the symbols that set them."""
    return ", ".join(f"{SYMBOLS[name]}={_value(getattr(rules, name))}" for name in names)


def _value(value: object) -> str:
    """Return the value of a rule as it is typed, or `(none)`. A baseline has the labels of its axes."""
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, dict):
        return " ".join(f"{label}={text}" for label, text in value.items()) or "(none)"
    if isinstance(value, tuple):
        return f"{len(value)} (seeds {value[0]} to {value[-1]})" if value else "(none)"
    return "(none)" if value is None else str(value)


def add_runs(
    matrix: MatrixDir, plan: Plan, *, command: str = "from Python", on_message: OnMessage = ignore
) -> tuple[str, ...]:
    """Add planned runs to an existing matrix, and return their names.

    Raises ConfigError, DataError or LaunchError before anything is changed.
    """
    creation = prepared(plan, checked(plan, on_message), command, None, on_message)
    record = read_plan(matrix.path)
    if creation.equal != record.equal:
        raise ConfigError(
            f"the new runs have another budget: {creation.equal or 'none'}, {matrix.name} has {record.equal or 'none'}",
            why=f"MATRIX_EQUAL is {plan.equal_by}",
            hint="choose a value with the same budget",
        )
    names = tuple(run.name for run in plan.matrix.runs)
    add_to(matrix, creation, on_message)
    return names


def _merged(
    tree: Tree,
    matrix: MatrixDir,
    words: Mapping[str, str],
    assignments: Mapping[str, str],
    *,
    axes: Mapping[str, Sequence[str]],
) -> dict[str, str]:
    """Return the assignments of the matrix (words), with the new values after its own (axes)."""
    runs = list(run_files(matrix.path).values())
    merged = dict(words)
    given = {resolve_name(tree, name): name for name in words if name not in SETS}
    for name, text in assignments.items():
        if name in SETS:
            merged[name] = text
            continue
        axis, values = parse_override(tree, name, text)
        if name not in words and axis in given:
            merged.pop(given[axis])
        texts = [_text(tree, axis, value.name, value.value) for value in values]
        if axis in tree.neutral:  # a setting, which cannot be an axis
            merged[name] = text
        elif axis in axes:
            merged[name] = ",".join(dict.fromkeys([*axes[axis], *texts]))
        else:
            merged[name] = ",".join(dict.fromkeys([*_common(axis, name, matrix, runs), *texts]))
    # Nothing is written to the place that the matrix was made for: it may have been moved or copied.
    return {**merged, RESULTS_DIR: str(matrix.path.absolute().parent)}


def _common(axis: str, name: str, matrix: MatrixDir, runs: Sequence[RunFile]) -> list[str]:
    """Return the value of a symbol that all runs share, [] if they have none. Raises ConfigError if they differ."""
    values = list(dict.fromkeys(run.symbols.get(axis) for run in runs))
    if len(values) > 1:
        raise ConfigError(
            f"{name} cannot become an axis of {matrix.name}",
            why=f"its runs have {first_names(str(value) for value in values)}: the default depends on another axis",
            hint="start a new matrix with `make test-matrix`; its finished runs are reused where they are equal",
        )
    return [value for value in values if value]


def _text(tree: Tree, axis: str, name: str, value: str) -> str:
    return member_text(axis, name) if axis in tree.choices else value


def _words(assignments: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in assignments.items()]
