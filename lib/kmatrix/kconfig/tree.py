"""The parsed Kconfig files: symbols, choices, markers, and the texts that each symbol accepts."""

from __future__ import annotations

import bisect
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kconfiglib as kc

from kmatrix.errors import ConfigError
from kmatrix.forms import FORMS, PROJECT_NAME, PROJECT_RULE
from kmatrix.kconfig.ranges import values_of_range
from kmatrix.records.paths import ROOT
from kmatrix.records.train_config import NEUTRAL
from kmatrix.redaction.redactor import SHORTEST, is_key, looks_random, named_keys, redactor

BOOLS = (kc.BOOL, kc.TRISTATE)  # without modules, a tristate is a bool
MATRIX = "MATRIX_"  # prefix: MATRIX_X sweeps X
OF_MACHINE = "lib/kmatrix/"  # the Kconfig files of settings that the trainer does not read
FORBID = "FORBID_"  # prefix: an invalid combination; its help text is the reason
NOT_AN_AXIS = (  # although they begin with MATRIX_
    *("MATRIX_COUPLED", "MATRIX_EXCLUDE", "MATRIX_EQUAL", "MATRIX_BASELINE", "MATRIX_CONFIDENCE"),
    *("MATRIX_MIN_DIFFERENCE", "MATRIX_SEEDS_AUTO", "MATRIX_SEEDS_MIN", "MATRIX_SEEDS_MAX"),
)
HEADER = "# kmatrix configuration: made by make, edited by make menuconfig. Every line takes effect.\n"
Symbol = Any  # kconfiglib has no types
Choice = Any
# Durations
UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
NUMBER = r"[0-9]+(?:\.[0-9]+)?"
PART = re.compile(rf"({NUMBER})([dhms])")
PROMPTLESS_CHOICE = re.compile(r"<choice[^>]*> \(defined at [^)]*\) defined without a prompt")
KNOWN_FORMS = "expected a duration above zero: 90, 90s, 15m, 1h30m, 2.5h, 2d"
LONGEST_S = 10_000 * 86400.0  # of a duration: a longer one is a typing error, or infinite
OF_STRINGS = ("float", "oneof", "duration", "slug", "form")  # markers of strings
WHOLE = re.compile(r"0|-?[1-9][0-9]*")  # one spelling per number, so that equal values give equal ids


@dataclass(frozen=True, slots=True)
class Assignment:
    """One line of a configuration, or one NAME=value of the command line."""

    name: str  # the symbol without CONFIG_
    value: str  # its text: "y" for the member of a choice
    where: str  # file:line, or the words of the command line


@dataclass(slots=True)
class Tree:
    """All symbols of the Kconfig files, with the properties that markers such as $(float,...) give them."""

    kconf: Any
    floats: dict[str, tuple[float, float, bool]] = field(default_factory=dict)  # lowest, highest, may be empty
    oneofs: dict[str, tuple[str, ...]] = field(default_factory=dict)  # symbol -> allowed texts
    durations: set[str] = field(default_factory=set)  # symbols that hold a duration or ""
    slugs: set[str] = field(default_factory=set)  # symbols that hold a PROJECT_NAME, or ""
    forms: dict[str, str] = field(default_factory=dict)  # symbol -> name of the form of its text, or ""
    neutral: set[str] = field(default_factory=set)  # symbols that cannot change a result
    # Symbol with a path -> path -> hash of its content.
    contents: dict[str, dict[str, str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)  # symbol -> its label in the names of runs
    choices: dict[str, Choice] = field(default_factory=dict)  # axis name (common prefix of the members) -> choice
    members: dict[str, dict[str, Symbol]] = field(default_factory=dict)  # axis name -> lower-case suffix -> member

    @classmethod
    def parse(cls, kconfig: str = "Kconfig", *, srctree: Path) -> Tree:
        """Parse the files. Warnings, and mistakes that kconfiglib accepts, raise ConfigError with file and line."""
        # kconfiglib has no arguments for these. KCONFIG_FUNCTIONS names the module with the dictionary `functions`.
        os.environ.update(srctree=str(srctree), KCONFIG_FUNCTIONS=__name__, KCONFIG_WARN_UNDEF="y", CONFIG_="CONFIG_")
        _seen.clear()  # an earlier parse may have failed half-way
        try:
            kconf = Parser(kconfig, warn_to_stderr=False)
        except (kc.KconfigError, OSError) as error:
            raise ConfigError(tidy(str(error)), hint="fix the Kconfig file") from None
        choices = _by_axis(kconf.unique_choices)
        members = {
            axis: {member_text(axis, member.name): member for member in choice.syms} for axis, choice in choices.items()
        }
        tree = cls(kconf=kconf, choices=choices, members=members)
        tree._assign_markers(_seen)
        for name in NEUTRAL:  # the trainer's: one list for ids, resuming and comparing
            tree._mark_neutral(f"GPT2_{name.upper()}")
        tree._check_files()
        return tree

    @property
    def symbols(self) -> list[Symbol]:
        """All defined symbols, in the order of the files."""
        return list(self.kconf.unique_defined_syms)

    @property
    def machine(self) -> frozenset[str]:
        """Settings of a machine: directories, where runs execute, trackers, ports, commands."""
        found = (symbol.name for symbol in self.symbols if symbol.nodes[0].filename.startswith(OF_MACHINE))
        return frozenset(name for name in found if not name.startswith(MATRIX.rstrip("_")))

    def symbol(self, name: str, where: str) -> Symbol:
        """Return a defined symbol. Raises ConfigError with similar names for an unknown one."""
        found = self.kconf.syms.get(name)
        if found is None or not found.nodes:
            raise unknown(f"{where}: CONFIG_{name}", name, (symbol.name for symbol in self.symbols))
        return found

    def axis_of(self, symbol: Symbol) -> str:
        """Return the axis name of a symbol: that of its choice, or its own name."""
        return axis_name(symbol.choice) if symbol.choice else str(symbol.name)

    def value(self, name: str) -> str | None:
        """Return the effective text of a symbol or a choice, None if it does not apply in this configuration."""
        choice = self.choices.get(name)
        if choice is not None:
            picked = choice.selection
            return member_text(name, picked.name) if picked is not None else None
        symbol = self.kconf.syms.get(name)
        if symbol is None or not symbol.nodes:
            return None
        # In this order: evaluating str_value sets _write_to_conf, a private name that a test guards.
        text: str = symbol.str_value
        return text if symbol._write_to_conf else None

    def effective(self) -> dict[str, str]:
        """Return the effective texts of all settings that apply, MATRIX_ and FORBID_ symbols excluded."""
        return {name: text for name in self.names() if (text := self.value(name)) is not None}

    def apply(self, assignments: Iterable[Assignment]) -> dict[str, str]:
        """Set these symbols, MATRIX_ symbols excluded, over the defaults, and return the effective texts."""
        self.reset()
        for item in assignments:
            if not item.name.startswith("MATRIX"):  # they describe the matrix, a single run has none
                self.kconf.syms[item.name].set_value(item.value)
        return self.effective()

    def typed_values(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the typed values of all settings. texts: effective ones."""
        return {name: self.typed(name, texts.get(name)) for name in self.names()}

    def typed(self, name: str, text: str | None) -> object:
        """Return a text as a bool, int, float or str, a duration in seconds; None for None or an empty number."""
        if text is None or name in self.choices:
            return text
        if name in self.floats:
            return float(text) if text else None
        if name in self.durations:
            return seconds(text)
        kind = self.kconf.syms[name].orig_type
        if kind in BOOLS:
            return text == "y"
        if kind == kc.INT:
            return int(text)
        return int(text, 16) if kind == kc.HEX else text

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all settings: symbols, and choices instead of their members."""
        own = [
            s.name
            for s in self.symbols
            if not s.choice and s.name != "MATRIX" and not s.name.startswith((MATRIX, FORBID))
        ]
        return [name for name in (*own, *self.choices) if name.startswith(prefix)]

    def reset(self) -> None:
        """Unset all values: defaults apply again."""
        self.kconf.unset_values()

    def config_text(self, header: str = HEADER) -> str:
        """Return the full configuration in the format of the Linux kernel's .config."""
        return str(self.kconf._config_contents(header))

    def minimal_text(self) -> str:
        """Return the lines that differ from the defaults: a defconfig."""
        return str(self.kconf._min_config_contents(""))

    def forbidden(self) -> list[str]:
        """Return the name and the help text of each FORBID_ symbol that is y."""
        return [f"{symbol.name}: {help_text(symbol)}" for symbol in self.forbidding()]

    def forbidding(self) -> list[Symbol]:
        """Return the FORBID_ symbols that are y."""
        return [symbol for symbol in self.symbols if symbol.name.startswith(FORBID) and symbol.str_value == "y"]

    def _assign_markers(self, found: Iterable[Marker]) -> None:
        """Assign each marker to the symbol defined above it."""
        # A macro does not learn to which symbol it belongs, only the current file and line.
        nodes: dict[str, list[Any]] = {}
        for node in self.kconf.node_iter():
            nodes.setdefault(node.filename, []).append(node)
        for of_file in nodes.values():
            of_file.sort(key=_line_of)
        for marker in found:
            where = f"{marker.filename}:{marker.line}"
            of_file = nodes.get(marker.filename, [])
            above = bisect.bisect_left(of_file, marker.line, key=_line_of)
            owner = of_file[above - 1].item if above else None
            if not isinstance(owner, kc.Symbol):
                raise ConfigError(f"{where}: no symbol above $({marker.name})")
            self._mark(owner, marker, where)

    def _mark(self, symbol: Symbol, marker: Marker, where: str) -> None:
        if marker.name in OF_STRINGS:
            self._mark_string(symbol, marker, where)
        elif marker.name == "neutral":
            self._mark_neutral(self.axis_of(symbol))
        else:
            self.labels[symbol.name] = marker.args[0]

    def _mark_neutral(self, axis: str) -> None:
        """Mark a symbol as neutral, or a choice as a whole: its own name and those of its members."""
        self.neutral.update({axis, *(member.name for member in self.members.get(axis, {}).values())})

    def _mark_string(self, symbol: Symbol, marker: Marker, where: str) -> None:
        if symbol.orig_type != kc.STRING:
            raise ConfigError(f"{where}: $({marker.name}) needs a string, and {symbol.name} is not one")
        if marker.name == "float":
            self.floats[symbol.name] = _bounds(marker, where)
        elif marker.name == "oneof":
            self.oneofs[symbol.name] = marker.args
        elif marker.name == "duration":
            self.durations.add(symbol.name)
        elif marker.name == "slug":
            self.slugs.add(symbol.name)
        elif marker.name == "form":
            if marker.args[0] not in FORMS:
                raise ConfigError(f"{where}: $(form,{marker.args[0]})", why=f"known forms: {', '.join(FORMS)}")
            self.forms[symbol.name] = marker.args[0]

    def _check_files(self) -> None:
        """Refuse mistakes in the Kconfig files that kconfiglib reports as warnings, or not at all."""
        for symbol in self.symbols:
            _ = symbol.str_value  # evaluation finds more: defaults outside their range, forced selects
        # A choice without a prompt is legal: it is never visible, or gets its prompt elsewhere.
        warned = [text for text in self.kconf.warnings if not PROMPTLESS_CHOICE.search(text)]
        if warned:
            raise ConfigError(tidy(warned[0]), hint="fix the Kconfig file")
        for symbol in self.symbols:
            self._check_axis(symbol)
        for symbol in self.symbols:
            self._check_defaults(symbol)

    def _check_defaults(self, symbol: Symbol) -> None:
        where = place(symbol)
        for default in (entry[0] for entry in symbol.defaults):
            if symbol.orig_type in BOOLS:
                if isinstance(default, kc.Symbol) and default.is_constant and default.name not in ("n", "y"):
                    raise ConfigError(f"{where}: bool {symbol.name} has default {default.name!r}", why="only y or n")
            elif isinstance(default, kc.Symbol) and _is_literal(default):
                check_text(self, symbol, default.name, f"{where}: default of")
                _check_default_range(symbol, default.name, where)
        # Without one, the value would be empty, and .config would contain the line CONFIG_X=.
        if symbol.orig_type in (kc.INT, kc.HEX) and all(entry[1] is not self.kconf.y for entry in symbol.orig_defaults):
            raise ConfigError(
                f"{where}: {symbol.name} has no default", why="every number needs one without a condition"
            )

    def _check_axis(self, symbol: Symbol) -> None:
        if not symbol.name.startswith(MATRIX) or symbol.name in NOT_AN_AXIS:
            return
        swept = self.kconf.syms.get(symbol.name[len(MATRIX) :])
        if swept is None or not swept.nodes:
            raise ConfigError(
                f"{place(symbol)}: {symbol.name} is not an axis", why=f"unknown symbol {symbol.name[len(MATRIX) :]}"
            )
        wanted = kc.BOOL if swept.choice else kc.STRING  # a checkbox per member, or a list of values
        if symbol.orig_type != wanted:
            raise ConfigError(f"{place(symbol)}: {symbol.name} must be a {kc.TYPE_TO_STR[wanted]}")


def stale(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of those symbols and choices whose values can have changed since they were read last.

    When a value is set, kconfiglib discards the visibility and the value of everything that depends on it.
    """
    return [name for name, item in settings.items() if item._cached_vis is None]


def _line_of(node: Any) -> int:
    return int(node.linenr)


def is_text(symbol: Symbol) -> bool:
    """Return whether a symbol holds a string."""
    return bool(symbol.orig_type == kc.STRING)


def axis_name(choice: Choice) -> str:
    """Return the axis name of a choice, the common prefix of its members: X_OPT_SGD, X_OPT_ADAM -> X_OPT.

    Members without a common prefix are named in full: the axis has the name of the choice, or that of its first member.
    """
    names = [member.name for member in choice.syms]
    prefix: str = os.path.commonprefix(names).rpartition("_")[0]  # noqa: RUF071 (a prefix of letters, not of path components)
    return prefix or (str(choice.name) if choice.name else f"CHOICE_{names[0]}" if names else "CHOICE")


def member_text(axis: str, member: str) -> str:
    """Return a member of a choice as a user writes it: in lower case, without the prefix that is the axis name."""
    return member.removeprefix(f"{axis}_").lower()


def _by_axis(choices: Iterable[Choice]) -> dict[str, Choice]:
    """Return the choices by axis name. Raises ConfigError if two have the same name."""
    found: dict[str, Choice] = {}
    for choice in choices:
        name, node = axis_name(choice), choice.nodes[0]
        if name in found:
            raise ConfigError(f"{node.filename}:{node.linenr}: a second choice whose members begin with {name}_")
        found[name] = choice
    return found


def _bounds(marker: Marker, where: str) -> tuple[float, float, bool]:
    """Return the lowest and highest value of a $(float,...), and whether it may be empty."""
    low, high, *rest = marker.args
    try:
        bounds = float(low), float(high)
    except ValueError:
        raise ConfigError(f"{where}: $(float,{low},{high}): the bounds must be numbers") from None
    if not bounds[0] <= bounds[1] or rest not in ([], ["empty"]):
        raise ConfigError(
            f"{where}: $({','.join([marker.name, *marker.args])})", why="expected LOW,HIGH or LOW,HIGH,empty"
        )
    return *bounds, bool(rest)


def _is_literal(symbol: Symbol) -> bool:
    """Return whether a default is a literal: a quoted text, or a number (for kconfiglib an undefined symbol)."""
    return bool(symbol.is_constant or not symbol.nodes)


def _check_default_range(symbol: Symbol, text: str, where: str) -> None:
    """Refuse a default outside all ranges with constant bounds; other ranges depend on the configuration."""
    limits = [entry[:2] for entry in symbol.ranges]
    if symbol.orig_type != kc.INT or not limits or not all(_is_literal(side) for pair in limits for side in pair):
        return
    if not any(int(low.name) <= int(text) <= int(high.name) for low, high in limits):
        known = " or ".join(f"[{low.name}, {high.name}]" for low, high in limits)
        raise ConfigError(f"{where}: default of CONFIG_{symbol.name}={text}", why=f"out of range: {known}")


def place(symbol: Symbol) -> str:
    """Return file:line of the first definition of a symbol."""
    return f"{symbol.nodes[0].filename}:{symbol.nodes[0].linenr}"


def help_text(symbol: Symbol) -> str:
    """Return the help of a symbol as one line."""
    return " ".join((symbol.nodes[0].help or "no reason given").split())


def unknown(
    what: str,
    name: str,
    known: Iterable[str],
    *,
    kind: str = "symbol",
    else_see: str = "`make menuconfig` (press / to search) or the Kconfig files",
) -> ConfigError:
    """Return the error for an unknown name, with similar known names as the hint. what: prefix, "" for none."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else f"see {else_see}"
    return ConfigError(f"{what}: unknown {kind} {name}".removeprefix(": "), hint=hint)


def tidy(text: str) -> str:
    """Return a message of kconfiglib as one line, without its prefix."""
    return re.sub(r"\s+", " ", text.strip().removeprefix("error: ").removeprefix("warning: "))


@dataclass(frozen=True, slots=True)
class Marker:
    """One marker line. It belongs to the symbol above it."""

    filename: str
    line: int
    name: str
    args: tuple[str, ...]


# kconfiglib calls `_mark` while it parses, and passes no object of ours: markers are collected here.
_seen: list[Marker] = []


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
    "form": (_mark, 1, 1),
    "neutral": (_mark, 0, 0),
    "label": (_mark, 1, 1),
}


def seconds(text: str) -> float | None:
    """Return a duration such as 1h30m in seconds; a plain number is in seconds. None: invalid, zero or too long."""
    if re.fullmatch(NUMBER, text):
        return _in_range(float(text))
    # Units in descending order, each once: "30m1h" and "1h1h" are more likely typing errors than durations.
    parts = PART.findall(text)
    order = ["dhms".index(unit) for _, unit in parts]
    if "".join(number + unit for number, unit in parts) != text or order != sorted(set(order)):
        return None
    return _in_range(sum(float(number) * UNITS[unit] for number, unit in parts))


def _in_range(duration: float) -> float | None:
    """Return a duration (s), None if it is zero or too long."""
    return duration if 0 < duration <= LONGEST_S else None


def check_text(tree: Tree, symbol: Any, text: str, where: str) -> None:
    """Refuse a text that the symbol cannot hold in any configuration."""
    name, kind = symbol.name, symbol.orig_type
    _refuse_key(tree, name, text, where)
    # .config has one line per symbol: a line break in a value would become a line of its own.
    if not text.isprintable() and kind == kc.STRING:
        raise ConfigError(f"{where}: CONFIG_{name}={text!a}", why="control characters are not allowed")
    text = text if text.isprintable() else ascii(text)
    what = f"{where} CONFIG_{name}={text!r}" if where.endswith(" of") else f"{where}: CONFIG_{name}={text}"
    if kind in BOOLS and text not in ("n", "y"):
        raise ConfigError(what, why="expected a bool: y or n")
    if kind == kc.INT and not WHOLE.fullmatch(text):
        zeros = " without leading zeros" if text.isascii() and text.isdecimal() else ""  # 1,000 is the values 1 and 000
        raise ConfigError(what, why=f"expected an integer in decimal digits{zeros}")
    if kind == kc.HEX and not re.fullmatch(r"0[xX][0-9a-fA-F]+", text):
        raise ConfigError(what, why="expected a hexadecimal number: 0x and digits")
    if name in tree.floats:
        _check_float(tree, name, text, what)
    if name in tree.oneofs and text not in tree.oneofs[name]:
        known = [word or "nothing" for word in tree.oneofs[name]]
        raise ConfigError(what, why=f"expected one of {', '.join(known)}")
    if name in tree.durations and text and seconds(text) is None:
        raise ConfigError(what, why=f"{KNOWN_FORMS}; at most 10000d")
    if name in tree.slugs and text and not PROJECT_NAME.fullmatch(text):
        raise ConfigError(what, why=PROJECT_RULE)
    if text and name in tree.forms and (why := FORMS[tree.forms[name]](text)):
        raise ConfigError(what, why=why)
    if name.startswith(MATRIX) and name not in NOT_AN_AXIS and kind == kc.STRING:
        _check_list(tree, name, text, where)


def _refuse_key(tree: Tree, name: str, text: str, where: str) -> None:
    """Raise ConfigError, without the key itself, if the value of a symbol contains one.

    A known key, such as the value of HF_TOKEN, is refused everywhere but in the defaults of the Kconfig files.
    """
    if len(text) < SHORTEST:  # almost all values; a search takes 0.1 ms
        return
    where = where.partition("=")[0]
    known = [] if where.endswith(" of") else redactor().known_in(text)
    # make also passes NAME=value in a variable of that name.
    known = [origin for origin in known if origin.rpartition(" ")[2] != where.rpartition(" ")[2]]
    if known:
        raise key_error(f"{where}: CONFIG_{name} would contain the {known[0]}", known[0])
    # A command of this machine, such as `notify --password=...`. In another text, `secret: ...` may be prose.
    named = [key for key in named_keys(text) if name in tree.machine or looks_random(key)]
    if is_key(text) or named:
        raise ConfigError(
            f"{where}: CONFIG_{name} would contain a key",
            why="configurations are copied into results and reports",
            hint="pass keys in environment variables only: see docs/trackers.md; a command can call a script with them",
        )


def key_error(what: str, origin: str) -> ConfigError:
    """Return the error for a setting that contains a known key. origin: "value of the variable HF_TOKEN"."""
    name = origin.rpartition(" ")[2]
    use = (
        f"if it is not secret, run this with `env -u {name}`"
        if "variable" in origin
        else "if it is not secret, change that file"
    )
    return ConfigError(
        what,
        why="configurations are copied into results and reports, and must not change there",
        hint=f"let a script read {name}, and name the script instead; {use}",
    )


def normalized(tree: Tree, name: str, text: str) -> str:
    """Return the normal form of a value: 1e-3 and 0.001 are the same number, 90 and 1m30s the same duration.

    A path is the hash of its content, if that is known.
    """
    if text and name in tree.durations:
        return str(seconds(text))
    if name in tree.contents:
        return tree.contents[name].get(text, text)
    return normalized_number(text) if text and name in tree.floats else text


def normalized_number(text: str) -> str:
    """Return the normal form of a number. 0.0 and -0.0 are the same."""
    return repr(float(text) + 0.0)  # -0.0 + 0.0 is 0.0


def repeated(tree: Tree, name: str, values: Sequence[str]) -> str:
    """Return the repeated values of a list, in any spelling, separated by commas; "" if there are none."""
    plain = [normalized(tree, name, value) for value in values]
    return ", ".join(dict.fromkeys(v for v, p in zip(values, plain, strict=True) if plain.count(p) > 1))


def split_list(text: str) -> list[str]:
    """Return the values of a list: separated by spaces or commas."""
    return [value for value in re.split(r"[\s,]+", text) if value]


def list_values(tree: Tree, name: str, values: Iterable[str], where: str) -> list[str]:
    """Return the values of a list for a symbol, with the values of each range such as 1e-4:1e-2:log5 in its place."""
    symbol = tree.kconf.syms.get(name)
    whole = symbol is not None and symbol.orig_type == kc.INT
    if not whole and name not in tree.floats:
        return list(values)
    found: list[str] = []
    for value in values:
        found += values_of_range(value, whole=whole, where=where) if ":" in value else [value]
    return found


def _check_float(tree: Tree, name: str, text: str, what: str) -> None:
    low, high, may_be_empty = tree.floats[name]
    if text == "" and may_be_empty:
        return
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # float() accepts more than a config file should: 1_000, Arabic digits, blanks around the number, nan.
    if "_" in text or not text.isascii() or text != text.strip() or math.isnan(number):
        raise ConfigError(what, why=f"expected a number in [{low:g}, {high:g}]")
    if not low <= number <= high:
        raise ConfigError(what, why=f"out of range: [{low:g}, {high:g}]")


def _check_list(tree: Tree, name: str, text: str, where: str) -> None:
    swept = tree.kconf.syms[name[len(MATRIX) :]]
    values = list_values(tree, swept.name, split_list(text), f"{where}: CONFIG_{name}")
    for value in values:
        check_text(tree, swept, value, f"{where}: CONFIG_{name}")
    if again := repeated(tree, swept.name, values):
        raise ConfigError(f"{where}: CONFIG_{name}={text}", why=f"repeated: {again}")


def open_tree(kconfig: str = "") -> Tree:
    """Parse the Kconfig files: the project's, or those of another top-level file."""
    if not kconfig:
        return Tree.parse(srctree=ROOT)
    path = Path(kconfig)
    if not path.is_file():
        raise ConfigError(f"KCONFIG={kconfig}: no such file")
    return Tree.parse(str(path.resolve()), srctree=ROOT if path.resolve().parent == ROOT else path.resolve().parent)
