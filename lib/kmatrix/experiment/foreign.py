"""The configuration of somebody else: without the commands, hosts, accounts and paths of their machine.

Two guards, because the lines of a configuration are not the only way to a value: lines that set such a symbol are
dropped when the configuration is read, and the values of the finished plan are compared with those of this user.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import ConfigError
from kmatrix.experiment.inputs.initial import SCRATCH
from kmatrix.experiment.inputs.initial import SYMBOL as INIT_FROM
from kmatrix.kconfig.assignments import SETS, apply_assignments, cause, load_config, merge
from kmatrix.kconfig.tree import MATRIX, Assignment, Tree
from kmatrix.matrix.axes import Axes, resolve_name
from kmatrix.own_file import read_file
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import read_matrix_file_or_empty
from kmatrix.runner.signature import is_signed


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A configuration of somebody else, with the local symbols of this user."""

    lines: list[Assignment]  # explicit ones
    left_out: tuple[Assignment, ...]  # lines that set a local symbol to another value than its default
    own: Mapping[str, frozenset[str]]  # local symbol -> the values that it may have in a plan


def load_foreign(
    tree: Tree, config: Path, user: Path, asked: Mapping[str, Sequence[Assignment]], *, one: bool
) -> Foreign:
    """Read the .config of a run or of a matrix, which may be anybody's.

    The symbols marked $(local) are never taken from it. They come from the command line, else from `user`, the .config
    of this user, else they have their defaults.
    asked: assignments of the command line.  one: of a run: its .config has the values of its cell, so that no line
    about a matrix is needed, and such a line could set any symbol.
    Raises ConfigError if the results depend on such a symbol, and the command line does not set it.
    """
    lines = [item for item in load_config(tree, config) if not one or not is_of_matrix(item)]
    theirs = [item for item in lines if _is_local(tree, item.name, item.value)]
    left_out = [item for item in theirs if item.value not in _harmless(tree, item.name)]
    for item in left_out:
        if item.name not in tree.neutral and item.name not in asked:
            raise _refusal(item.name, item.value)
    kept = [item for item in lines if item not in theirs]
    mine = _own(tree, user) if user.is_file() else []
    tree.reset()
    merged, _ = merge(tree, kept, [item for item in mine if item.name not in asked])
    chosen = {item.name: frozenset({item.value}) for item in mine}
    chosen |= {name: frozenset(item.value for item in items) for name, items in asked.items()}
    return Foreign(
        lines=_in_effect(tree, merged, mine),
        left_out=tuple(item for item in left_out if item.name not in asked),
        own={name: chosen.get(name, frozenset()) | _harmless(tree, name) for name in tree.local},
    )


def own_words(
    tree: Tree, words: Mapping[str, str], asked: Collection[str]
) -> tuple[dict[str, str], tuple[Assignment, ...]]:
    """Return the NAME=value of a foreign matrix without those that set a local symbol, and the latter.

    words: as recorded by the matrix.  asked: symbols that the command line sets.
    Raises ConfigError if the results depend on such a symbol, and the command line does not set it.
    """
    kept, left_out = {}, []
    for name, text in words.items():
        symbol = name if name in SETS else resolve_name(tree, name)
        if symbol not in SETS and not _is_local(tree, symbol, text):
            kept[name] = text
        elif symbol not in asked:
            if symbol not in SETS and symbol not in tree.neutral and text not in _harmless(tree, symbol):
                raise _refusal(symbol, text)
            left_out.append(Assignment(symbol, text, f"command line: {name}={text}"))
    return kept, tuple(left_out)


def signed_text(config: str, words: Iterable[str], axes: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return what the signature in matrix.json signs: the .config, the NAME=value that were given, and the axes.

    axes: symbol and values of each.
    """
    return json.dumps([config, list(words), [[symbol, list(values)] for symbol, values in axes]])


def is_own(matrix: MatrixDir) -> bool:
    """Return whether this user made a matrix, and its configuration is the one that they made it with."""
    record = read_matrix_file_or_empty(matrix)
    try:
        config = read_file(matrix.config).decode()
    except (OSError, UnicodeDecodeError):
        return False
    axes = [(axis.symbol, axis.values) for axis in record.axis_entries]
    return is_signed(signed_text(config, record.overrides, axes), record.signature)


def is_of_matrix(item: Assignment) -> bool:
    """Return whether a line describes a matrix: its axes, its rules, or whether there is one."""
    return item.name.startswith(MATRIX) or item.name == MATRIX.rstrip("_")


def check_axes(tree: Tree, axes: Axes, own: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError if an axis or a rule of a foreign matrix sets a local symbol to another value than the user's.

    own: of Foreign.  Before the plan is made, because planning reads the files that some symbols name.
    """
    points = [point for axis in axes.axes for point in axis.points]
    points += [point for rule in axes.couplings for group in rule.points for point in group]
    _check(tree, ((point.assignment.name, point.assignment.value) for point in points), own)


def check_values(tree: Tree, texts: Mapping[str, str], own: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError if the effective values of a run have a local symbol that is neither the user's nor a default.

    texts: by symbol.  own: of Foreign.
    """
    _check(tree, texts.items(), own)


def _check(tree: Tree, values: Iterable[tuple[str, str]], own: Mapping[str, Collection[str]]) -> None:
    for name, value in values:
        if _is_local(tree, name, value) and value not in own[name]:
            raise _refusal(name, value)


def _is_local(tree: Tree, name: str, value: str) -> bool:
    """Return whether a symbol with this value names a command, a host, an account or a path of a machine."""
    part = tree.local.get(name)
    return part is not None and part in value


def _harmless(tree: Tree, name: str) -> frozenset[str]:
    """Return the values of a local symbol that name nothing of anybody's machine: its default, and none."""
    defaults = [default[0].str_value for default in tree.kconf.syms[name].orig_defaults]
    return frozenset([*defaults, *(SCRATCH if name == INIT_FROM else ())])


def _refusal(symbol: str, value: str) -> ConfigError:
    name = symbol.removeprefix("GPT2_")
    return ConfigError(
        f"the run reads {symbol}={value!r}",
        why="what a run names on its machine is never used here unless you ask for it",
        hint=f"check the value, then pass {name}=<yours>, or {name}=<the same>",
    )


def _own(tree: Tree, user: Path) -> list[Assignment]:
    """Return the local symbols of a .config that cannot change a result."""
    tree.reset()
    return [item for item in load_config(tree, user) if item.name in tree.local and item.name in tree.neutral]


def _in_effect(tree: Tree, merged: Sequence[Assignment], own: Sequence[Assignment]) -> list[Assignment]:
    """Return the lines without those of the user that have no effect in this run, such as an entity without W&B."""
    tree.reset()
    for item in merged:
        tree.kconf.syms[item.name].set_value(item.value)
    idle = {item for item in own if cause(tree, item)}
    lines = [item for item in merged if item not in idle]
    tree.reset()
    apply_assignments(tree, lines)
    return lines
