"""The configuration of somebody else's run: without the commands, hosts, accounts and paths of their machine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from kmatrix.errors import ConfigError
from kmatrix.kconfig.assignments import apply_assignments, cause, load_config, merge
from kmatrix.kconfig.tree import Assignment, Tree


def load_run(
    tree: Tree, config: Path, user: Path, asked: Collection[str]
) -> tuple[list[Assignment], tuple[Assignment, ...]]:
    """Return the explicit lines of a run's .config with the local symbols of this user, and the lines left out.

    The symbols marked $(local) are never taken from the run, because it may be anybody's. They come from the command
    line, else from `user`, the .config of this user, else they have their defaults.
    asked: symbols that the command line sets.
    Raises ConfigError if the result of the run depends on such a symbol, and the command line does not set it.
    """
    lines = load_config(tree, config)
    left_out = [item for item in lines if tree.is_local(item)]
    for item in left_out:
        if item.name not in tree.neutral and item.name not in asked:
            name = item.name.removeprefix("GPT2_")
            raise ConfigError(
                f"the run reads {item.name}={item.value!r}",
                why="what a run names on its machine is never used here unless you ask for it",
                hint=f"check the value, then pass {name}=<yours>, or {name}=<the same>",
            )
    kept = [item for item in lines if item.name not in tree.local or not tree.is_local(item)]
    own = _own(tree, user) if user.is_file() else []
    tree.reset()
    merged, _ = merge(tree, kept, [item for item in own if item.name not in asked])
    return _in_effect(tree, merged, own), tuple(item for item in left_out if item.name not in asked)


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
