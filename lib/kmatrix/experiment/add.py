"""Add cells to an existing matrix: further values of an axis, or a new axis. Its runs stay as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from kmatrix.errors import ConfigError
from kmatrix.experiment.configure import OnMessage, ignore
from kmatrix.experiment.create import add_to
from kmatrix.experiment.make import contents_of
from kmatrix.experiment.plan import Plan, make_plan
from kmatrix.experiment.settings import words_without
from kmatrix.kconfig.tree import Tree, member_text
from kmatrix.matrix.axes import overrides
from kmatrix.records import matrix as records
from kmatrix.records.decode import replaced
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import VerdictRules
from kmatrix.status.fold import is_over
from kmatrix.status.look import look
from kmatrix.text import first_names


def plan_more(
    matrix: MatrixDir, assignments: Mapping[str, str], *, gpus: str = "", options: Collection[str] = ()
) -> Plan:
    """Return the plan of the cells that a matrix does not have yet. Its `matrix.axes` are those of the whole matrix.

    assignments: NAME=value[,value...]: each value is combined with all values of the other axes, as if it had been
    given when the matrix was made.  gpus, options: as for `make_plan`.
    Raises ConfigError if there is no new cell, or the present configuration gives other runs than those of the matrix.
    """
    record = records.read_plan(matrix.path)
    plan = make_plan(matrix.config, _merged(record, assignments, options), gpus=gpus, options=options)
    known = {run.run_id: run.name for run in record.runs}
    if gone := known.keys() - {run.run_id for run in plan.runs}:
        raise ConfigError(
            f"{matrix.name} cannot be extended: its configuration now gives other runs",
            why=f"no cell is {first_names(known[one] for one in sorted(gone))}",
            hint="start a new matrix with `make test-matrix`; its finished runs are reused where they are equal",
        )
    rules = _rules_with(matrix, record.verdict, plan.verdict)
    new = tuple(run for run in plan.runs if run.run_id not in known)
    if not new:
        words = " ".join(f"{name}={text}" for name, text in assignments.items())
        raise ConfigError(
            f"{matrix.name} already has these cells", why=words, hint="pass NAME=value, such as OPTIMIZER=muon"
        )
    if taken := {run.name for run in new} & set(known.values()):
        raise ConfigError(f"{matrix.name} already has runs named {first_names(sorted(taken))}")
    return dataclasses.replace(
        plan,
        matrix=dataclasses.replace(plan.matrix, runs=new),
        # It may have been moved or copied: nothing is written to the place that it was made for.
        config=dataclasses.replace(plan.config, results_dir=str(matrix.path.absolute().parent)),
        verdict=rules,
    )


def _merged(record: records.Plan, assignments: Mapping[str, str], options: Collection[str]) -> dict[str, str]:
    """Return the assignments that the matrix was made with, with the new values after its own."""
    tree = Tree.parse()
    asked = overrides(tree, assignments, options)
    merged = dict(word.split("=", 1) for word in words_without(tree, record.overrides, asked))
    former = {axis.symbol: axis.values for axis in record.axis_entries}
    for name, text in assignments.items():
        merged[name] = text
        for axis, values in overrides(tree, {name: text}).items():
            if axis not in tree.neutral:  # a setting cannot be an axis
                own = former.get(axis) or filter(None, [record.common.symbols.get(axis)])
                texts = [member_text(axis, one.name) if axis in tree.choices else one.value for one in values]
                merged[name] = ",".join(dict.fromkeys([*own, *texts]))
    return merged


def _rules_with(matrix: MatrixDir, former: VerdictRules, now: VerdictRules) -> VerdictRules:
    """Return the rules of a matrix after an addition: its own, with more seeds if no run has ended.

    Raises ConfigError for other rules: a rule that is chosen after the first losses decides nothing.
    """
    kept = replaced(now, seeds=now.seeds[: len(former.seeds)])
    if kept != former:
        other = [name for name in former.__struct_fields__ if getattr(kept, name) != getattr(former, name)]
        raise ConfigError(
            f"{matrix.name} compares its losses by other rules: {', '.join(other)}",
            why="rules are fixed before the first run",
            hint="start a new matrix with `make test-matrix`; its finished runs are reused where they are equal",
        )
    if now.seeds != former.seeds and any(map(is_over, look(matrix.path).states.values())):
        raise ConfigError(
            f"MATRIX_SEEDS_MAX of {matrix.name} cannot be raised: runs have ended",
            why="further looks at losses that are known spend more than the error of MATRIX_CONFIDENCE",
            hint=f"start a new matrix with `make test-matrix MATRIX_SEEDS_MAX={len(now.seeds)}`",
        )
    return now


def add_runs(
    matrix: MatrixDir, plan: Plan, *, command: str = "from Python", on_message: OnMessage = ignore
) -> tuple[str, ...]:
    """Add planned runs to an existing matrix, and return their names.

    Raises ConfigError, DataError or LaunchError before anything is changed.
    """
    # With the trainer of the matrix, whatever the checkout has by now.
    contents = contents_of(plan, command=command, code=matrix.path / records.CODE, on_message=on_message)
    add_to(matrix, contents, on_message=on_message)
    return tuple(contents.runs)
