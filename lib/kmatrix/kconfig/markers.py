"""The marker lines of our Kconfig files: `$(float,0,1)`, `$(oneof,a,b)`, `$(duration)`, `$(slug)`, `$(neutral)` ...

kconfiglib imports this module by name and calls a function at each marker; the Kconfig parsers of the
Linux kernel expand an unknown function to nothing, so the files stay readable for them. No other macro is
let through: what a configuration means depends on its files alone, never on a command or the environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import kconfiglib as kc


@dataclass(frozen=True, slots=True)
class Marker:
    """One marker line; it belongs to the symbol above it."""

    filename: str
    line: int
    name: str
    args: tuple[str, ...]


_seen: list[Marker] = []


def take() -> list[Marker]:
    """Return the markers since the last call, and forget them."""
    taken = list(_seen)
    _seen.clear()
    return taken


def _mark(kconf: Any, name: str, *args: str) -> str:
    _seen.append(Marker(kconf.filename, kconf.linenr, name, args))
    return ""


class Parser(kc.Kconfig):  # type: ignore[misc]  # kconfiglib has no types
    """kconfiglib's parser without commands, variables and the environment. Both methods are private names of its."""

    def _fn_val(self, args: list[str]) -> str:
        """Expand `$(name,...)`: the markers, and nothing else."""
        if args[0] not in functions:
            known = ", ".join(f"$({name})" for name in functions)
            raise kc.KconfigError(
                f"{self.filename}:{self.linenr}: $({','.join(args)}): known are only {known}; "
                "commands and the environment are not read"
            )
        return str(super()._fn_val(args))

    def _expand_str(self, line: str, start: int) -> tuple[str, int]:
        """Refuse `$NAME` in quotes, which kconfiglib would take from the environment."""
        line, end = super()._expand_str(line, start)
        if "$" in line[start:end]:
            raise kc.KconfigError(f"{self.filename}:{self.linenr}: a text holds no $: the environment is not read")
        return line, end


functions = {
    "float": (_mark, 2, 3),
    "oneof": (_mark, 1, None),
    "duration": (_mark, 0, 0),
    "slug": (_mark, 0, 0),
    "neutral": (_mark, 0, 1),
    "label": (_mark, 1, 1),
}
