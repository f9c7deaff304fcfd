"""menuconfig: kconfiglib's terminal screen, with our checks and without its crashes on odd terminals."""

from __future__ import annotations

import curses
import locale
import os
from pathlib import Path
from typing import Any

from kmatrix.errors import ConfigError
from kmatrix.kconfig.strict import check_text
from kmatrix.kconfig.tree import HEADER, Tree

FALLBACK_TERM = "xterm-256color"


def edit(tree: Tree, path: Path) -> None:
    """Open the screen on the values in force; it saves to `path` when the user says so.

    What was not asked for is shown as a default and follows, which is why the screen must not load the file itself.
    """
    repair_locale()
    repair_term()
    import menuconfig  # sets the locale and reads the styles when it is imported

    os.environ["KCONFIG_CONFIG"] = str(path)
    tree.kconf.config_header = HEADER
    checked, loaded, node_text = menuconfig._check_valid, menuconfig._load_config, menuconfig._node_str

    def check(symbol: Any, text: str) -> bool:
        """Refuse in the edit box what would be refused in a file."""
        try:
            check_text(tree, symbol, text, "here")
        except ConfigError as error:
            menuconfig._error(f"{text!r}: {error.why or error.what}")
            return False
        return bool(checked(symbol, text))

    menuconfig._check_valid = check
    menuconfig._load_config = lambda: not path.exists()  # whether there is something to save from the start
    menuconfig._node_str = lambda node: node_text(node).replace(" (NEW)", " (default)")
    try:
        menuconfig.menuconfig(tree.kconf)
    except curses.error as error:
        raise ConfigError(
            f"the terminal is too small or too simple ({error})", fix="enlarge it, or set TERM=xterm"
        ) from None
    finally:
        menuconfig._check_valid, menuconfig._load_config, menuconfig._node_str = checked, loaded, node_text


def repair_locale() -> None:
    """Fall back to C.UTF-8 where LANG or LC_ALL names a locale that is not installed, as over ssh."""
    try:
        locale.setlocale(locale.LC_ALL, "")
    except locale.Error:
        for name in [name for name in os.environ if name.startswith("LC_")]:
            del os.environ[name]
        os.environ["LC_ALL"] = "C.UTF-8"


def repair_term() -> None:
    """Fall back to xterm where TERM is unset or unknown here, and refuse a terminal without a cursor."""
    if os.environ.get("TERM") == "dumb":
        raise ConfigError(
            "TERM=dumb cannot draw a menu", fix="run it in a terminal, or use make defconfig-<name> NAME=value"
        )
    try:
        curses.setupterm()
    except curses.error:
        os.environ["TERM"] = FALLBACK_TERM
