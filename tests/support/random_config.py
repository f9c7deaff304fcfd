"""Random valid configurations: the same seed gives the same one."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import kconfiglib as kc

from kmatrix.errors import ConfigError
from kmatrix.experiment.configure import refuse_broken, text_of_config, write_config
from kmatrix.kconfig.tree import Assignment, Tree
from programs import ROOT

TRIES = 100  # random configurations until one is valid
WIDEST = 4096  # integers stay within this distance of their lower bound
FIXED = ("ENGINE", "GPT2_NUM_NODES")  # keep their defaults, so that this machine can plan the runs


def write_random_config(path: Path, seed: int) -> None:
    """Write a random valid configuration without axes."""
    tree, draw = Tree.parse(srctree=ROOT), random.Random(seed)
    # Each try sets fewer symbols: the last ones are close to the defaults, which are valid.
    for trial in range(TRIES):
        tree.reset()
        _randomize(tree, draw, share=1 - trial / TRIES)
        if tree.forbidding():
            continue
        with suppress(ConfigError):
            refuse_broken(tree, [])
            write_config(path, text_of_config(tree, _effective(tree)))
            return
    raise AssertionError(f"no valid configuration in {TRIES} tries")


def _randomize(tree: Tree, draw: random.Random, *, share: float) -> None:
    """Set choices, bools, integers and $(form,oneof) strings to random values, in the order of the files.

    share: fraction of the symbols outside choices that are set.
    """
    # Choices first: they decide which other symbols are visible.
    for axis, choice in tree.choices.items():
        visible = [member for member in choice.syms if member.visibility]
        if visible and axis not in FIXED:
            draw.choice(visible).set_value("y")
    for symbol in tree.symbols:
        is_fixed = symbol.choice or symbol.name in FIXED or symbol.name.startswith("MATRIX")
        if is_fixed or not symbol.visibility or draw.random() > share:
            continue
        if symbol.orig_type == kc.BOOL:
            symbol.set_value(draw.choice("ny"))
        elif symbol.orig_type == kc.INT and symbol.ranges:
            low, high = (int(end.str_value) for end in next(e[:2] for e in symbol.ranges if kc.expr_value(e[2])))
            symbol.set_value(str(draw.randint(low, min(high, low + WIDEST))))
        elif texts := tree.forms.get(symbol.name, ())[1:]:
            symbol.set_value(draw.choice(texts))


def _effective(tree: Tree) -> list[Assignment]:
    """Return the values of all visible symbols; of a choice, its selected member."""
    return [
        Assignment(symbol.name, symbol.str_value, "random")
        for symbol in tree.symbols
        if symbol.visibility
        and any(node.prompt for node in symbol.nodes)
        and not (symbol.choice and symbol.str_value == "n")
    ]
