"""Edit a configuration: menuconfig, all bools y or n, random values."""

from __future__ import annotations

import curses
import locale
import os
import random
from pathlib import Path
from typing import Any

import kconfiglib as kc

from kmatrix.errors import ConfigError
from kmatrix.kconfig.tree import HEADER, MATRIX, Assignment, Tree, check_text

WIDEST = 4096  # random integers stay within this distance of their lower bound
NOT_RANDOM = ("ENGINE", "GPT2_NUM_NODES")  # a random configuration is one that this machine can try
FALLBACK_TERM = "xterm-256color"  # nearly every terminal emulator understands it


def set_bools(tree: Tree, value: str) -> None:
    """Set every bool, members of choices excluded."""
    for symbol in tree.symbols:
        if not symbol.choice and symbol.orig_type == kc.BOOL:
            symbol.set_value(value)


def randomize(tree: Tree, draw: random.Random, *, share: float = 1.0) -> None:
    """Set choices, bools, integers and $(oneof) strings to random valid values, in the order of the files.

    Runs stay on this machine: NOT_RANDOM keep their defaults.
    share: fraction of the other symbols than choices that are set; the rest keep their defaults.
    """
    # Choices first: they decide which other symbols are visible.
    for axis, choice in tree.choices.items():
        visible = [member for member in choice.syms if member.visibility]
        if visible and axis not in NOT_RANDOM:
            draw.choice(visible).set_value("y")
    for symbol in tree.symbols:
        if (
            symbol.choice
            or symbol.name in NOT_RANDOM
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


def effective_assignments(tree: Tree, where: str) -> list[Assignment]:
    """Return the effective values of all visible symbols as assignments; of a choice, its selected member."""
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


def edit(tree: Tree, path: Path) -> None:
    """Open menuconfig on the effective values. It saves to `path` on request.

    Values that were not asked for are shown as defaults and follow their dependencies, so menuconfig must not load
    the file itself.
    """
    repair_locale()
    repair_term()
    import menuconfig  # now, because the import itself sets the locale and reads the styles

    os.environ["KCONFIG_CONFIG"] = str(path)
    tree.kconf.config_header = HEADER
    checked, loaded, node_text = menuconfig._check_valid, menuconfig._load_config, menuconfig._node_str

    def check(symbol: Any, text: str) -> bool:
        """Refuse in the input field what is refused in a file."""
        try:
            check_text(tree, symbol, text, "here")
        except ConfigError as error:
            menuconfig._error(f"{text!r}: {error.why or error.what}")
            return False
        return bool(checked(symbol, text))

    # menuconfig offers no hooks, so three private functions are replaced while it runs.
    menuconfig._check_valid = check
    menuconfig._load_config = lambda: not path.exists()  # return whether there are unsaved changes at the start
    menuconfig._node_str = lambda node: node_text(node).replace(" (NEW)", " (default)")
    try:
        menuconfig.menuconfig(tree.kconf)
    except curses.error as error:
        raise ConfigError(
            f"the terminal is too small or lacks a capability ({error})", hint="enlarge it, or set TERM=xterm"
        ) from None
    finally:
        menuconfig._check_valid, menuconfig._load_config, menuconfig._node_str = checked, loaded, node_text


def repair_locale() -> None:
    """Switch to C.UTF-8 if LANG or LC_ALL names a locale that is not installed, which is common over ssh."""
    try:
        locale.setlocale(locale.LC_ALL, "")
    except locale.Error:
        for name in [name for name in os.environ if name.startswith("LC_")]:
            del os.environ[name]
        os.environ["LC_ALL"] = "C.UTF-8"


def repair_term() -> None:
    """Switch to xterm if TERM is unset or unknown, and refuse a terminal without a cursor."""
    if os.environ.get("TERM") == "dumb":
        raise ConfigError(
            "TERM=dumb cannot draw a menu", hint="run it in a terminal, or use make defconfig-<name> NAME=value"
        )
    try:
        curses.setupterm()
    except curses.error:
        os.environ["TERM"] = FALLBACK_TERM
