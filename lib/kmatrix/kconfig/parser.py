"""Parse Kconfig files: kconfiglib without commands and environment, and with markers such as $(float,0,1)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kconfiglib as kc

from kmatrix.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Marker:
    """One marker line. It belongs to the symbol above it."""

    filename: str
    line: int
    name: str
    args: tuple[str, ...]


# kconfiglib calls `_mark` while it parses, and passes no object of ours: markers are collected here.
_seen: list[Marker] = []


def parse(kconfig: str, *, srctree: Path) -> tuple[Any, list[Marker]]:
    """Parse the files. Return kconfiglib's object and the markers. Raises ConfigError with file and line."""
    # kconfiglib has no arguments for these. KCONFIG_FUNCTIONS names the module with the dictionary `functions`.
    os.environ.update(srctree=str(srctree), KCONFIG_FUNCTIONS=__name__, KCONFIG_WARN_UNDEF="y", CONFIG_="CONFIG_")
    _seen.clear()  # an earlier parse may have failed half-way
    try:
        kconf = Parser(kconfig, warn_to_stderr=False)
    except (kc.KconfigError, OSError) as error:
        raise ConfigError(tidy(str(error)), hint="fix the Kconfig file") from None
    return kconf, list(_seen)


def tidy(text: str) -> str:
    """Return a message of kconfiglib as one line, without its prefix."""
    return re.sub(r"\s+", " ", text.strip().removeprefix("error: ").removeprefix("warning: "))


def _mark(kconf: Any, name: str, *args: str) -> str:
    _seen.append(Marker(kconf.filename, kconf.linenr, name, args))
    return ""


class Parser(kc.Kconfig):  # type: ignore[misc]  # kconfiglib has no types
    """The parser of kconfiglib without commands, variables and the environment. It overrides private methods."""

    def _fn_val(self, args: list[str]) -> str:
        """Expand `$(name,...)`. Only markers are allowed."""
        if args[0] not in functions:
            known = ", ".join(f"$({name})" for name in functions)
            raise kc.KconfigError(
                f"{self.filename}:{self.linenr}: $({','.join(args)}): only {known} are allowed; "
                "commands and environment variables are not read"
            )
        return str(super()._fn_val(args))

    def _expand_str(self, line: str, start: int) -> tuple[str, int]:
        """Refuse `$NAME` in quotes, which kconfiglib would read from the environment."""
        line, end = super()._expand_str(line, start)
        if "$" in line[start:end]:
            raise kc.KconfigError(
                f"{self.filename}:{self.linenr}: $ is not allowed in a text: the environment is not read"
            )
        return line, end


# kconfiglib looks up this name: function, fewest and most arguments (None: any number).
functions = {
    "float": (_mark, 2, 3),
    "oneof": (_mark, 1, None),
    "duration": (_mark, 0, 0),
    "slug": (_mark, 0, 0),
    "neutral": (_mark, 0, 1),
    "label": (_mark, 1, 1),
}
