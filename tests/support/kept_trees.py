"""Parse the project's Kconfig files once per process: a command that follows gets the same tree, without its values."""

from __future__ import annotations

import sys
from pathlib import Path

from kmatrix.kconfig.tree import Tree
from kmatrix.records.paths import ROOT

_parse = Tree.parse
_kept: list[Tree] = []
UNUSED = 3  # references to a tree: of the list, of the loop, and of the call that counts them


def install() -> None:
    """Replace the parser. Tests that parse other files, or hold a tree, have trees of their own."""
    Tree.parse = parse  # type: ignore[method-assign,assignment]


def parse(srctree: Path = ROOT) -> Tree:
    """Return a tree that nobody uses, or a new one."""
    if srctree != ROOT:
        return _parse(srctree)
    for tree in _kept:
        if sys.getrefcount(tree) == UNUSED:
            tree.reset()
            tree.contents.clear()
            return tree
    tree = _parse()
    _kept.append(tree)
    return tree
