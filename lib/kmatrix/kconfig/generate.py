"""Configurations made by rule: every bool y or n, or everything at random."""

from __future__ import annotations

import random

import kconfiglib as kc

from kmatrix.kconfig.strict import Assignment
from kmatrix.kconfig.tree import MATRIX, Tree

WIDEST = 4096  # random whole numbers stay within this distance of their lower bound


def set_bools(tree: Tree, value: str) -> None:
    """Set every bool that is no member of a choice."""
    for symbol in tree.symbols:
        if not symbol.choice and symbol.orig_type == kc.BOOL:
            symbol.set_value(value)


def randomize(tree: Tree, draw: random.Random, *, share: float = 1.0) -> None:
    """Set choices, bools, whole numbers and closed sets at random, within what is legal at their turn.

    share: of the symbols that are no choice, how many are set; the others keep their defaults.
    """
    for choice in tree.choices.values():
        visible = [member for member in choice.syms if member.visibility]
        if visible:
            draw.choice(visible).set_value("y")
    for symbol in tree.symbols:
        if (
            symbol.choice
            or not symbol.visibility
            or symbol.name.startswith(MATRIX.rstrip("_"))
            or draw.random() > share
        ):
            continue
        if symbol.orig_type == kc.BOOL:
            symbol.set_value(draw.choice("ny"))
        elif symbol.orig_type == kc.INT and symbol.ranges:
            low, high = _range(symbol)
            symbol.set_value(str(draw.randint(low, min(high, low + WIDEST))))
        elif symbol.name in tree.oneofs:
            symbol.set_value(draw.choice(tree.oneofs[symbol.name]))


def in_force(tree: Tree, where: str) -> list[Assignment]:
    """Return what is in force and can be set, as assignments; of a choice the member that it took."""
    return [
        Assignment(symbol.name, symbol.str_value, where)
        for symbol in tree.symbols
        if symbol.visibility
        and any(node.prompt for node in symbol.nodes)
        and not (symbol.choice and symbol.str_value == "n")
    ]


def _range(symbol: kc.Symbol) -> tuple[int, int]:
    low, high = next(entry[:2] for entry in symbol.ranges if kc.expr_value(entry[2]))
    return int(low.str_value), int(high.str_value)
