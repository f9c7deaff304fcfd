"""Add cells to an existing matrix: further values of an axis, or a new axis. Its runs stay as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from kmatrix.errors import ConfigError
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.create import add_to
from kmatrix.experiment.make import contents_of
from kmatrix.experiment.plan import Plan, make_plan
from kmatrix.kconfig.assignments import SETS
from kmatrix.kconfig.tree import Tree, member_text
from kmatrix.matrix.axes import parse_override, resolve_name
from kmatrix.matrix.expand import Run
from kmatrix.records import matrix as records
from kmatrix.records.decode import replaced
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import VerdictRules
from kmatrix.text import first_names

RESULTS_DIR = "RESULTS_DIR"
START_ANEW = "start a new matrix with `make test-matrix`; its finished runs are reused where they are equal"


def plan_more(
    matrix: MatrixDir, assignments: Mapping[str, str], *, gpus: str = "", options: Collection[str] = ()
) -> Plan:
    """Return the plan of the cells that a matrix does not have yet. Its `matrix.axes` are those of the whole matrix.

    assignments: NAME=value[,value...]: each value is combined with all values of the other axes, as if it had been
    given when the matrix was made.  gpus, options: as for `make_plan`.
    Raises ConfigError if there is no new cell, or the present configuration gives other runs than those of the matrix.
    """
    if not assignments:
        raise ConfigError("add needs a value", hint="pass NAME=value, such as OPTIMIZER=muon")
    record = records.read_plan(matrix.path)
    # Nothing is written to the place that the matrix was made for: it may have been moved or copied.
    place = {RESULTS_DIR: str(matrix.path.absolute().parent)}
    plan = make_plan(matrix.config, _merged(matrix, record, assignments) | place, gpus=gpus, options=options)
    known = {run.run_id: run.name for run in record.runs}
    if gone := known.keys() - {run.run_id for run in plan.matrix.runs}:
        raise ConfigError(
            f"{matrix.name} cannot be extended: its configuration now gives other runs",
            why=f"no cell is {first_names(known[one] for one in sorted(gone))}: symbols, defaults or this machine "
            "have changed",
            hint=START_ANEW,
        )
    old = [run for run in plan.matrix.runs if run.run_id in known]
    new = [planned for planned in plan.runs if planned.run.run_id not in known]
    rules = _rules_with(matrix, record.verdict, plan.verdict, old)
    if not new:
        words = " ".join(f"{name}={text}" for name, text in assignments.items())
        raise ConfigError(f"{matrix.name} already has these cells", why=words)
    if taken := {planned.name for planned in new} & set(known.values()):
        raise ConfigError(f"{matrix.name} already has runs named {first_names(sorted(taken))}")
    given = tuple(word for word in plan.overrides if not word.startswith(f"{RESULTS_DIR}="))
    cells = dataclasses.replace(plan.matrix, runs=tuple(planned.run for planned in new))
    return dataclasses.replace(plan, runs=tuple(new), matrix=cells, overrides=given, verdict=rules)


def _merged(matrix: MatrixDir, record: records.Plan, assignments: Mapping[str, str]) -> dict[str, str]:
    """Return the assignments that the matrix was made with, with the new values after its own."""
    tree = Tree.parse()
    merged = dict(word.partition("=")[::2] for word in record.overrides)
    given = {resolve_name(tree, name): name for name in merged if name not in SETS}
    axes = {axis.symbol: axis.values for axis in record.axis_entries}
    for name, text in assignments.items():
        if name in SETS:
            merged[name] = text
            continue
        axis, values = parse_override(tree, name, text)
        merged.pop(given.get(axis, ""), None)  # perhaps by another name of the symbol
        if axis in tree.neutral:  # a setting, which cannot be an axis
            merged[name] = text
            continue
        own = axes.get(axis) or tuple(filter(None, [record.common.symbols.get(axis)]))
        if not own and any(run.symbols.get(axis) for run in record.runs):
            raise ConfigError(
                f"{name} cannot become an axis of {matrix.name}",
                why="its runs have different values: the default depends on another axis",
                hint=START_ANEW,
            )
        texts = [member_text(axis, one.name) if axis in tree.choices else one.value for one in values]
        merged[name] = ",".join(dict.fromkeys([*own, *texts]))
    return merged


def _rules_with(matrix: MatrixDir, former: VerdictRules, now: VerdictRules, runs: Sequence[Run]) -> VerdictRules:
    """Return the rules of a matrix after an addition: its own, perhaps with more seeds.

    runs: those that the matrix has, on its new axes.
    Raises ConfigError for other rules: a rule that is chosen after the first losses decides nothing.
    """
    raised = former.seeds_auto and now.seeds != former.seeds and now.seeds[: len(former.seeds)] == former.seeds
    kept = replaced(now, raised=former.raised, seeds=former.seeds if raised else now.seeds)
    # A new axis adds its label to the baseline, which stays the configuration of the same runs.
    baseline = now.baseline.items()
    if (
        former.baseline
        and former.baseline.items() <= baseline
        and any(baseline <= dict(run.axes).items() for run in runs)
    ):
        kept = replaced(kept, baseline=former.baseline)
    if kept != former:
        other = [name for name in former.__struct_fields__ if getattr(kept, name) != getattr(former, name)]
        raise ConfigError(
            f"{matrix.name} compares its losses by other rules: {', '.join(other)}",
            why="rules are fixed before the first run",
            hint="only MATRIX_SEEDS_MAX can be raised; start a new matrix, whose finished runs are reused",
        )
    return replaced(now, raised=(*former.raised, len(former.seeds)) if raised else former.raised)


def add_runs(
    matrix: MatrixDir, plan: Plan, *, command: str = "from Python", on_message: OnMessage = ignore
) -> tuple[str, ...]:
    """Add planned runs to an existing matrix, and return their names.

    Raises ConfigError, DataError or LaunchError before anything is changed.
    """
    contents = contents_of(plan, command=command, on_message=on_message)
    equal = records.read_plan(matrix.path).equal
    if contents.about["equal"] != equal:
        raise ConfigError(
            f"the new runs have another budget: {contents.about['equal'] or 'none'}, {matrix.name} has "
            f"{equal or 'none'}",
            why=f"MATRIX_EQUAL is {plan.equal_by}",
            hint="choose a value with the same budget",
        )
    add_to(matrix, contents, neutral=plan.neutral if plan.config.reuse else None, on_message=on_message)
    return tuple(contents.runs)
