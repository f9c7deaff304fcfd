"""Assignments over assignments: a fragment or the command line over a configuration, and the whole judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import overrides
from kmatrix.config import RULES
from kmatrix.errors import ConfigError
from kmatrix.kconfig import Assignment, Cause, Tree, cause
from kmatrix.kconfig.assign import merge
from kmatrix.kconfig.strict import blamed

MOST_CELLS = 5000  # a larger matrix is judged by its dry run only


def lay_over(tree: Tree, base: list[Assignment], over: list[Assignment]) -> list[Assignment]:
    """Lay a fragment or the command line over a base, and say what that replaces.

    A line of the base that the overlay puts out of force goes, with a note. One that was not in force before, or is
    illegal now, stays, and is refused later.
    """
    wrong = set(_not_in_force(tree, base))
    lines, notes = merge(tree, base, over)
    found = {item: why for item, why in _not_in_force(tree, lines).items() if item not in wrong and item not in over}
    gone = {item: why for item, why in found.items() if why.absent or not _matrix_on(tree, item)}
    notes += [f"CONFIG_{item.name} ({item.where}) no longer applies: it {why.text}" for item, why in gone.items()]
    for note in notes:
        print(f"  {note}")
    return [item for item in lines if item not in gone]


def _not_in_force(tree: Tree, lines: Sequence[Assignment]) -> dict[Assignment, Cause]:
    """Return which of these lines, set alone, are not in force, and why."""
    tree.reset()
    for item in lines:
        tree.kconf.syms[item.name].set_value(item.value)
    return {item: why for item in lines if (why := cause(tree, item))}


def _matrix_on(tree: Tree, item: Assignment) -> bool:
    """Whether a line can apply as far as MATRIX is concerned."""
    return not item.name.startswith("MATRIX_") or tree.kconf.syms["MATRIX"].str_value == "y"


def settings(tree: Tree, lines: Iterable[Assignment], names: set[str]) -> set[str]:
    """Return which of the names the header of a .config lists: all but the members that a choice did not take."""
    kept = {item.name for item in lines if item.value != "n" or not tree.kconf.syms[item.name].choice}
    return names & kept


def judge_matrix(tree: Tree, base: Sequence[Assignment]) -> tuple[str, ...]:
    """Refuse a matrix with a line or a value that is in force in no run. Returns what is legal and without effect."""
    from kmatrix.matrix import expand, plan_axes

    axes = plan_axes(tree, base, {})
    cells = 1
    for axis in axes.axes:
        cells *= len(axis.points)
    if cells > MOST_CELLS:
        return (f"a matrix of {cells} cells is judged by make test-matrix-dry-run only",)
    return expand(tree, base, axes, RULES).notes if axes.axes or axes.couplings or axes.exclusions else ()


def broken_rules(tree: Tree, base: Sequence[Assignment]) -> list[str]:
    """Return what the rules beyond Kconfig refuse, with the lines that set what each of them looked at."""
    broken = []
    for rule in RULES:
        seen: list[str] = []

        def value(name: str, seen: list[str] = seen) -> str | None:
            seen.append(name)
            return tree.value(name)

        if why := rule(value):
            broken.append(why + blamed(tree, base, seen))
    return broken


def as_lines(tree: Tree, arguments: Arguments) -> list[Assignment]:
    """Return the command line as lines of a .config: a list of values becomes the MATRIX_ lines of its axis."""
    lines: list[Assignment] = []
    for axis, values in overrides(tree, arguments).items():
        members = [member.name for member in tree.members(axis).values()]
        names = [f"MATRIX_{name}" for name in members or [axis]]
        known = [name for name in names if name in tree.kconf.syms and tree.kconf.syms[name].nodes]
        where = values[0].where
        if len(values) == 1:
            lines.append(values[0])
            lines += [Assignment(name, "n" if members else "", where) for name in known if tree.value(name)]
            continue
        swept = {f"MATRIX_{item.name}" for item in values} if members else {f"MATRIX_{axis}"}
        if not swept <= set(known):
            raise ConfigError(
                where, why="no MATRIX_ symbol can hold this axis in .config", fix="pass it to make test-matrix"
            )
        lines.append(Assignment("MATRIX", "y", where))
        if members:
            lines += [Assignment(name, "y" if name in swept else "n", where) for name in known]
        else:
            lines.append(Assignment(f"MATRIX_{axis}", " ".join(item.value for item in values), where))
    unique = {item.name: item for item in lines}
    return list(unique.values())
