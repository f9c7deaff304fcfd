"""Edit a configuration with menuconfig."""

from __future__ import annotations

import curses
import locale
import os
from pathlib import Path
from typing import Any

from kmatrix.errors import ConfigError
from kmatrix.kconfig.tree import HEADER, Tree, check_text


def edit(tree: Tree, path: Path) -> None:
    """Open menuconfig on the effective values. It saves to `path` on request.

    Values that were not asked for are shown as defaults and follow their dependencies, so menuconfig must not load
    the file itself.
    """
    try:
        locale.setlocale(locale.LC_ALL, "")
    except locale.Error:  # LANG or LC_ALL names one that is not installed, which is common over ssh
        for name in [name for name in os.environ if name.startswith("LC_")]:
            del os.environ[name]
        os.environ["LC_ALL"] = "C.UTF-8"
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
            f"the terminal is too small, or TERM={os.environ.get('TERM', '')} is not known ({error})",
            hint="enlarge it, or set TERM=xterm; without a screen: make defconfig-<name> NAME=value",
        ) from None
    finally:
        menuconfig._check_valid, menuconfig._load_config, menuconfig._node_str = checked, loaded, node_text
