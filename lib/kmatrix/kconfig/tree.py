"""A parsed Kconfig tree, checked as strictly as its users' configurations are."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kconfiglib as kc

from kmatrix.errors import ConfigError
from kmatrix.kconfig import duration, markers

BOOLS = (kc.BOOL, kc.TRISTATE)
MATRIX = "MATRIX_"
FORBID = "FORBID_"
NOT_AN_AXIS = ("MATRIX_COUPLED", "MATRIX_EXCLUDE", "MATRIX_EQUAL")
HEADER = "# kmatrix configuration: made by make, edited by make menuconfig. Every line is in force.\n"

Symbol = Any  # kconfiglib has no types
Choice = Any


@dataclass(slots=True)
class Tree:
    """Every symbol of the Kconfig files, with what the markers say of it.

    floats: symbol -> (lowest, highest, may be empty).  oneofs: symbol -> allowed texts.
    durations: symbols that hold a length of time, or nothing.
    slugs: symbols that hold a name of small letters, digits and hyphens, or nothing.
    neutral: symbols that cannot change a result.  neutral_unless: symbol -> another; it cannot while that one is empty.
    labels: what a symbol is called in a run's name.
    choices: axis name (the members' common prefix) -> choice.
    """

    kconf: Any
    floats: dict[str, tuple[float, float, bool]] = field(default_factory=dict)
    oneofs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    durations: set[str] = field(default_factory=set)
    slugs: set[str] = field(default_factory=set)
    neutral: set[str] = field(default_factory=set)
    neutral_unless: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    @classmethod
    def parse(cls, kconfig: str = "Kconfig", *, srctree: Path) -> Tree:
        """Parse the files. Any warning, and any slip that kconfiglib lets pass, is a ConfigError with file and line."""
        os.environ.update(
            srctree=str(srctree), KCONFIG_FUNCTIONS="kmatrix.kconfig.markers", KCONFIG_WARN_UNDEF="y", CONFIG_="CONFIG_"
        )
        markers.take()
        try:
            kconf = markers.Parser(kconfig, warn_to_stderr=False)
        except (kc.KconfigError, OSError) as error:
            raise ConfigError(tidy(str(error)), fix="mend the Kconfig file") from None
        tree = cls(kconf=kconf, choices=_by_axis(kconf.unique_choices))
        tree._place(markers.take())
        tree._refuse_slips()
        return tree

    @property
    def symbols(self) -> list[Symbol]:
        """Every symbol that is defined, in the order of the files."""
        return list(self.kconf.unique_defined_syms)

    def symbol(self, name: str, where: str) -> Symbol:
        """Return a defined symbol, or refuse the name with the nearest known ones."""
        found = self.kconf.syms.get(name)
        if found is None or not found.nodes:
            raise unknown(f"{where}: CONFIG_{name}", name, (symbol.name for symbol in self.symbols))
        return found

    def axis_of(self, symbol: Symbol) -> str:
        """The name under which a symbol is swept: its choice's axis name, or its own."""
        return axis_name(symbol.choice) if symbol.choice else str(symbol.name)

    def members(self, axis: str) -> dict[str, Symbol]:
        """Return the members of a choice by their lower-case suffix; nothing where there is no such choice."""
        choice = self.choices.get(axis)
        return {} if choice is None else {member.name[len(axis) + 1 :].lower(): member for member in choice.syms}

    def value(self, name: str) -> str | None:
        """Return the text in force of a symbol or a choice; None where it does not apply in this configuration."""
        choice = self.choices.get(name)
        if choice is not None:
            picked = choice.selection
            return str(picked.name[len(name) + 1 :]).lower() if picked is not None else None
        symbol = self.kconf.syms.get(name)
        if symbol is None or not symbol.nodes:
            return None
        text: str = symbol.str_value
        return text if symbol._write_to_conf else None  # the private name is held by a test

    def values(self) -> dict[str, str]:
        """Return every value in force, choices by their axis name; matrix and FORBID_ symbols are left out."""
        found = {name: self.value(name) for name in self.names()}
        return {name: text for name, text in found.items() if text is not None}

    def typed(self, name: str, text: str | None) -> object:
        """Return a text as the value that it stands for: bool, int, float, str; None for nothing. Times: seconds."""
        if text is None or name in self.choices:
            return text
        if name in self.floats:
            return float(text) if text else None
        if name in self.durations:
            return duration.seconds(text)
        kind = self.kconf.syms[name].orig_type
        if kind in BOOLS:
            return text == "y"
        if kind == kc.INT:
            return int(text)
        return int(text, 16) if kind == kc.HEX else text

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all symbols and choices (not their members) that hold a setting."""
        own = [
            s.name
            for s in self.symbols
            if not s.choice and s.name != "MATRIX" and not s.name.startswith((MATRIX, FORBID))
        ]
        return [name for name in (*own, *self.choices) if name.startswith(prefix)]

    def reset(self) -> None:
        """Forget every value that was set: defaults are in force again."""
        self.kconf.unset_values()

    def config_text(self, header: str = HEADER) -> str:
        """Return the full configuration in the format of the kernel's .config."""
        return str(self.kconf._config_contents(header))

    def minimal_text(self, header: str = "") -> str:
        """Return the lines that differ from the defaults: a defconfig."""
        return str(self.kconf._min_config_contents(header))

    def forbidden(self) -> list[str]:
        """Return, for each FORBID_ symbol that is y now, its name and the reason in its help text."""
        return [f"{symbol.name}: {help_text(symbol)}" for symbol in self.forbidding()]

    def forbidding(self) -> list[Symbol]:
        """Return the FORBID_ symbols that are y now."""
        return [symbol for symbol in self.symbols if symbol.name.startswith(FORBID) and symbol.str_value == "y"]

    def _place(self, found: Iterable[markers.Marker]) -> None:
        """Give each marker to the symbol whose definition stands above it."""
        nodes = list(self.kconf.node_iter())
        for marker in found:
            where = f"{marker.filename}:{marker.line}"
            above = [node for node in nodes if node.filename == marker.filename and node.linenr < marker.line]
            owner = max(above, key=lambda node: node.linenr).item if above else None
            if not isinstance(owner, kc.Symbol):
                raise ConfigError(f"{where}: $({marker.name}) stands below no symbol")
            self._mark(owner, marker, where)

    def _mark(self, symbol: Symbol, marker: markers.Marker, where: str) -> None:
        if marker.name in ("float", "oneof", "duration", "slug") and symbol.orig_type != kc.STRING:
            raise ConfigError(f"{where}: $({marker.name}) belongs to a string, and {symbol.name} is none")
        if marker.name == "float":
            self.floats[symbol.name] = _bounds(marker, where)
        elif marker.name == "oneof":
            self.oneofs[symbol.name] = marker.args
        elif marker.name == "duration":
            self.durations.add(symbol.name)
        elif marker.name == "slug":
            self.slugs.add(symbol.name)
        elif marker.name == "neutral" and marker.args:
            self.neutral_unless[symbol.name] = self.symbol(marker.args[0], where).name
        elif marker.name == "neutral":
            self.neutral.add(symbol.name)
        else:
            self.labels[symbol.name] = marker.args[0]

    def _refuse_slips(self) -> None:
        for symbol in self.symbols:
            _ = symbol.str_value  # evaluation finds more: defaults outside their range, forced selects
        if self.kconf.warnings:
            raise ConfigError(tidy(self.kconf.warnings[0]), fix="mend the Kconfig file")
        for symbol in self.symbols:
            self._refuse_lost_axis(symbol)
        for symbol in self.symbols:
            self._refuse_bad_defaults(symbol)

    def _refuse_bad_defaults(self, symbol: Symbol) -> None:
        from kmatrix.kconfig.strict import check_text

        where = place(symbol)
        for default in (entry[0] for entry in symbol.defaults):
            if symbol.orig_type in BOOLS:
                if isinstance(default, kc.Symbol) and default.is_constant and default.name not in ("n", "y"):
                    raise ConfigError(f"{where}: bool {symbol.name} has default {default.name!r}", why="only y or n")
            elif isinstance(default, kc.Symbol) and _is_text(default):
                check_text(self, symbol, default.name, f"{where}: default of")
                _refuse_outside(symbol, default.name, where)
        if symbol.orig_type in (kc.INT, kc.HEX) and all(entry[1] is not self.kconf.y for entry in symbol.orig_defaults):
            raise ConfigError(
                f"{where}: {symbol.name} has no default", why="every number needs one without a condition"
            )

    def _refuse_lost_axis(self, symbol: Symbol) -> None:
        if not symbol.name.startswith(MATRIX) or symbol.name in NOT_AN_AXIS:
            return
        swept = self.kconf.syms.get(symbol.name[len(MATRIX) :])
        if swept is None or not swept.nodes:
            raise ConfigError(f"{place(symbol)}: {symbol.name} sweeps nothing", why=f"no {symbol.name[len(MATRIX) :]}")
        wanted = kc.BOOL if swept.choice else kc.STRING
        if symbol.orig_type != wanted:
            raise ConfigError(f"{place(symbol)}: {symbol.name} must be a {kc.TYPE_TO_STR[wanted]}")


def axis_name(choice: Choice) -> str:
    """A choice's axis is its members' common prefix: X_OPTIMIZER_SGD, X_OPTIMIZER_ADAM -> X_OPTIMIZER."""
    names = [member.name for member in choice.syms]
    prefix: str = os.path.commonprefix(names).rpartition("_")[0]  # noqa: RUF071 (letter by letter is what is meant)
    if not prefix:
        node = choice.nodes[0]
        raise ConfigError(f"{node.filename}:{node.linenr}: the members of this choice share no AXIS_ prefix")
    return prefix


def _by_axis(choices: Iterable[Choice]) -> dict[str, Choice]:
    """Return the choices by their axis names; two of one name would be one axis."""
    found: dict[str, Choice] = {}
    for choice in choices:
        name, node = axis_name(choice), choice.nodes[0]
        if name in found:
            raise ConfigError(f"{node.filename}:{node.linenr}: a second choice whose members begin with {name}_")
        found[name] = choice
    return found


def _bounds(marker: markers.Marker, where: str) -> tuple[float, float, bool]:
    """Return lowest, highest and `may be empty` of a $(float,...)."""
    low, high, *rest = marker.args
    try:
        bounds = float(low), float(high)
    except ValueError:
        raise ConfigError(f"{where}: $(float,{low},{high}): the bounds are numbers") from None
    if not bounds[0] <= bounds[1] or rest not in ([], ["empty"]):
        raise ConfigError(
            f"{where}: $({','.join([marker.name, *marker.args])})", why="it is LOW,HIGH or LOW,HIGH,empty"
        )
    return *bounds, bool(rest)


def _is_text(symbol: Symbol) -> bool:
    """Whether it stands for itself: a quoted text, or a number (to kconfiglib a symbol without definition)."""
    return bool(symbol.is_constant or not symbol.nodes)


def _refuse_outside(symbol: Symbol, text: str, where: str) -> None:
    """Refuse a default that lies in none of the symbol's constant ranges; the others move."""
    limits = [entry[:2] for entry in symbol.ranges]
    if symbol.orig_type != kc.INT or not limits or not all(_is_text(side) for pair in limits for side in pair):
        return
    if not any(int(low.name) <= int(text) <= int(high.name) for low, high in limits):
        known = " or ".join(f"[{low.name}, {high.name}]" for low, high in limits)
        raise ConfigError(f"{where}: default of CONFIG_{symbol.name}={text}", why=f"out of range: {known}")


def place(symbol: Symbol) -> str:
    """Return file:line of a symbol's first definition."""
    return f"{symbol.nodes[0].filename}:{symbol.nodes[0].linenr}"


def help_text(symbol: Symbol) -> str:
    """Return a symbol's help as one line."""
    return " ".join((symbol.nodes[0].help or "no reason is given").split())


def unknown(
    what: str,
    name: str,
    known: Iterable[str],
    *,
    kind: str = "symbol",
    else_see: str = "`make menuconfig` (press / to search) or the Kconfig files",
) -> ConfigError:
    """Return the error for an unknown name, with the nearest known ones."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 3, cutoff=0.7)
    fix = f"did you mean {' or '.join(near)}?" if near else f"see {else_see}"
    return ConfigError(f"{what}: unknown {kind} {name}", fix=fix)


def tidy(text: str) -> str:
    """Return a message of kconfiglib as one line."""
    return re.sub(r"\s+", " ", text.strip().removeprefix("error: ").removeprefix("warning: "))
