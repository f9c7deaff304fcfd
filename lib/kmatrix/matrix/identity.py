"""The id of a run: a hash of every value in force that can change a result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from kmatrix.kconfig import Tree
from kmatrix.kconfig.strict import same_as

ID_DIGITS = 10


class Identity:
    """The id of the configuration in force: a hash of every value that can change a result.

    The lines stand in the order of their names, whatever is swept. Those that cannot move between cells are made once.
    moving: names of symbols and choices whose value can differ.
    """

    def __init__(self, tree: Tree, axes: set[str]) -> None:
        self.tree = tree
        self.moving = _dependents(tree, axes)
        names = [
            symbol.name
            for symbol in tree.symbols
            if not symbol.choice
            and symbol.name not in tree.neutral
            and not symbol.name.startswith(("MATRIX", "FORBID_"))
        ]
        names = sorted([*names, *tree.choices])
        self.lines = [self._line(name) for name in names]
        self.places = [
            (place, name)
            for place, name in enumerate(names)
            if {name, tree.neutral_unless.get(name), *(m.name for m in tree.members(name).values())} & self.moving
        ]

    def of_cell(self) -> str:
        for place, name in self.places:
            self.lines[place] = self._line(name)
        return hashlib.sha256("".join(self.lines).encode()).hexdigest()[:ID_DIGITS]

    def _line(self, name: str) -> str:
        text, decides = self.tree.value(name), self.tree.neutral_unless.get(name)
        if text is None or (decides and not self.tree.value(decides)):
            return ""
        return f"{name}={same_as(self.tree, name, text)}\n"


def _dependents(tree: Tree, axes: Iterable[str]) -> set[str]:
    """Return the symbols whose value can change with the given axes, the axes' own symbols included."""
    below: dict[Any, set[Any]] = {}
    for symbol in tree.symbols:
        for item in symbol.referenced:
            below.setdefault(item, set()).add(symbol)
        if symbol.choice:
            below.setdefault(symbol, set()).add(symbol.choice)
            below.setdefault(symbol.choice, set()).add(symbol)
    for choice in tree.choices.values():
        for item in choice.referenced:
            below.setdefault(item, set()).add(choice)
    todo: list[Any] = [member for axis in axes for member in tree.members(axis).values()]
    todo += [tree.kconf.syms[axis] for axis in axes if axis not in tree.choices]
    seen: set[Any] = set()
    while todo:
        item = todo.pop()
        if item not in seen:
            seen.add(item)
            todo.extend(below.get(item, ()))
    return {item.name for item in seen if item.name}
