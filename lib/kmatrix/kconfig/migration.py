"""The symbols of the original project (mcgrof/AdamWPrune), and the lines that replace them here.

migration.toml has the data; docs/migration.md shows them, and a defconfig of the original is refused with them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kmatrix.errors import ConfigError
from kmatrix.kconfig.tree import Assignment
from kmatrix.text import columns, plural, table

DATA = Path(__file__).with_name("migration.toml")
STEPS = "GPT2_MAX_ITERS"  # has the same name there
NOTHING = "nothing to set"  # the value is the default here


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """A symbol of the original project."""

    name: str  # without CONFIG_; all names that begin so if it ends in *
    section: str
    ours: tuple[str, ...]  # lines without CONFIG_; {value} and {share} stand for the value
    values: Mapping[str, tuple[str, ...]]  # value -> its lines, if they are others
    why: str  # the reason if there is no equivalent, or a note
    same: bool  # the name is known here too, with another meaning

    def lines(self, value: str, steps: int | None) -> tuple[str, ...] | None:
        """Return the lines that replace a line with this value: none if no line is needed, None if there is none.

        steps: of the run, None if unknown.
        """
        if value in self.values:
            found = self.values[value]
        elif value == "n" and self.ours and not any("{value}" in line for line in self.ours):
            return ()
        elif not self.ours:
            return None
        else:
            found = self.ours
        share = f"{int(value) / steps:g}" if steps and value.isdecimal() else f"{value} / {STEPS}"
        return tuple(line.format(value=value, share=share) for line in found)

    def replacement(self, value: str, steps: int | None) -> str:
        """Return what to write instead of a line with this value, as one line of text."""
        lines = None if self.same else self.lines(value, steps)
        if lines is None:
            return f"{'another meaning' if self.same else 'none'}: {self.why}"
        return ", ".join(f"CONFIG_{line}" for line in lines) or NOTHING


@cache
def former_symbols() -> tuple[Former, ...]:
    """Return all known symbols of the original project, in the order of the file."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return tuple(
        Former(
            name=name,
            section=section["title"],
            ours=tuple(row.get("ours", ())),
            values={value: tuple(lines) for value, lines in row.get("values", {}).items()},
            why=row.get("why", ""),
            same=row.get("same", False),
        )
        for section in data["section"]
        for name, row in section["symbols"].items()
    )


def former_symbol(name: str) -> Former | None:
    """Return the symbol of the original project with this name, None if it had none."""
    exact = next((row for row in former_symbols() if row.name == name), None)
    if exact:
        return exact
    return next((row for row in former_symbols() if row.name.endswith("*") and name.startswith(row.name[:-1])), None)


def former_error(path: Path, former: Sequence[Assignment], known: Iterable[Assignment], rest: list[str]) -> ConfigError:
    """Return the error of a file with symbols of the original project: a table of their replacements.

    known: the lines of the file whose names are known here.  rest: its other mistakes.
    """
    known = list(known)
    steps = next((int(item.value) for item in known if item.name == STEPS and item.value.isdecimal()), None) or None
    changed = [item for item in known if (row := former_symbol(item.name)) and row.same]
    rows = []
    for item in sorted([*former, *changed], key=lambda item: int(item.where.rpartition(":")[2])):
        row = former_symbol(item.name)
        assert row
        rows.append((f"{item.where}: CONFIG_{item.name}={item.value}", row.replacement(item.value, steps)))
    lines = table(columns(["line", "here"], words=(0, 1)), rows)
    if rest:
        lines += ["other lines that have no effect:", *rest]
    text = "\n  ".join(lines)
    return ConfigError(
        f"{path} has {plural(len(former), 'symbol')} of the original project (mcgrof/AdamWPrune):\n  {text}",
        hint="replace them as shown, each line once; notes: docs/migration.md; nothing was written",
    )
