"""The parsed Kconfig files: symbols, choices, markers, and the texts that each symbol accepts."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kconfiglib as kc

from kmatrix.errors import ConfigError
from kmatrix.forms import form_problem, seconds
from kmatrix.kconfig.ranges import values_of_range
from kmatrix.records.paths import ROOT
from kmatrix.records.train_config import NEUTRAL
from kmatrix.redaction.redactor import SHORTEST, is_key, looks_random, named_keys, redactor

MATRIX = "MATRIX_"  # prefix: MATRIX_X sweeps X
FORBID = "FORBID_"  # prefix: an invalid combination; its help text is the reason
OF_MACHINE = "lib/kmatrix/"  # the Kconfig files of settings that the trainer does not read
NOT_AN_AXIS = (  # although they begin with MATRIX_
    *("MATRIX_COUPLED", "MATRIX_EXCLUDE", "MATRIX_EQUAL", "MATRIX_BASELINE", "MATRIX_CONFIDENCE"),
    *("MATRIX_MIN_DIFFERENCE", "MATRIX_SEEDS_AUTO", "MATRIX_SEEDS_MIN", "MATRIX_SEEDS_MAX"),
)
HEADER = "# kmatrix configuration: made by make, edited by make menuconfig. Every line takes effect.\n"
Symbol = Any  # kconfiglib has no types
Choice = Any
WHOLE = re.compile(r"0|-?[1-9][0-9]*")  # one spelling per number, so that equal values give equal ids


@dataclass(frozen=True, slots=True)
class Assignment:
    """One line of a configuration, or one NAME=value of the command line."""

    name: str  # the symbol without CONFIG_
    value: str  # its text: "y" for the member of a choice
    where: str  # file:line, or the words of the command line


class _Parsed(kc.Kconfig):  # type: ignore[misc]  # kconfiglib has no types
    """The files, with the markers that they have: symbol, marker and its arguments."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, str, tuple[str, ...]]] = []
        super().__init__(warn_to_stderr=False)


def _mark(kconf: Any, name: str, *args: str) -> str:
    """Note a marker of the symbol above it: the one that was defined last."""
    kconf.marks.append((kconf.defined_syms[-1].name, name, args))
    return ""


# kconfiglib looks up this name: function, fewest and most arguments (None: any number).
functions = {"float": (_mark, 2, 3), "form": (_mark, 1, None), "label": (_mark, 1, 1)}


@dataclass(slots=True)
class Tree:
    """All symbols of the Kconfig files, with the properties that markers such as $(float,...) give them."""

    kconf: Any
    symbols: list[Symbol]  # in the order of the files
    forbid: list[Symbol]  # those that begin with FORBID_
    choices: dict[str, Choice]  # axis name (common prefix of the members) -> choice
    members: dict[str, dict[str, Symbol]]  # axis name -> lower-case suffix -> member
    machine: frozenset[str]  # settings of a machine: directories, where runs execute, trackers, ports, commands
    neutral: frozenset[str]  # these, and the trainer's: symbols and choices that cannot change a result
    floats: dict[str, tuple[float, float, bool]] = field(default_factory=dict)  # lowest, highest, may be empty
    forms: dict[str, tuple[str, ...]] = field(default_factory=dict)  # symbol -> form of its text, with arguments
    labels: dict[str, str] = field(default_factory=dict)  # symbol -> its label in the names of runs
    # Symbol with a path -> path -> hash of its content.
    contents: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, srctree: Path = ROOT) -> Tree:
        """Parse the Kconfig files of a checkout. A test lints those of the project."""
        # kconfiglib has no arguments for these. KCONFIG_FUNCTIONS names the module with the dictionary `functions`.
        os.environ.update(srctree=str(srctree), KCONFIG_FUNCTIONS=__name__, KCONFIG_WARN_UNDEF="y", CONFIG_="CONFIG_")
        try:
            kconf = _Parsed()
            kconf.warn = False  # about a value without effect, which `cause` reports
        except (kc.KconfigError, OSError) as error:
            raise ConfigError(" ".join(str(error).split()), hint="fix the Kconfig file") from None
        choices = {_prefix(choice): choice for choice in kconf.unique_choices}
        members = {axis: {member_text(axis, one.name): one for one in choice.syms} for axis, choice in choices.items()}
        symbols = list(kconf.unique_defined_syms)
        of_machine = [one for one in symbols if one.nodes[0].filename.startswith(OF_MACHINE)]
        machine = {one.name for one in of_machine if not one.name.startswith("MATRIX")}
        machine |= {axis for axis, choice in choices.items() if choice.syms[0].name in machine}
        trainers = {f"GPT2_{name.upper()}" for name in NEUTRAL}
        forbid = [one for one in symbols if one.name.startswith(FORBID)]
        tree = cls(kconf, symbols, forbid, choices, members, frozenset(machine), frozenset(machine | trainers))
        for name, marker, args in kconf.marks:
            if marker == "float":
                tree.floats[name] = float(args[0]), float(args[1]), len(args) > 2
            elif marker == "form":
                tree.forms[name] = args
            else:
                tree.labels[name] = args[0]
        return tree

    def symbol(self, name: str, where: str) -> Symbol:
        """Return a defined symbol. Raises ConfigError with similar names for an unknown one."""
        found = self.kconf.syms.get(name)
        if found is None or not found.nodes:
            raise unknown(f"{where}: CONFIG_{name}", name, (symbol.name for symbol in self.symbols))
        return found

    def axis_of(self, name: str) -> str:
        """Return the axis of a symbol: its choice, or itself."""
        return _prefix(choice) if (choice := self.kconf.syms[name].choice) else name

    def value(self, name: str) -> str | None:
        """Return the effective text of a symbol or a choice, None if it does not apply in this configuration."""
        choice = self.choices.get(name)
        if choice is not None:
            picked = choice.selection
            return member_text(name, picked.name) if picked is not None else None
        symbol = self.kconf.syms[name]
        # In this order: evaluating str_value sets _write_to_conf, a private name that a test guards.
        text: str = symbol.str_value
        return text if symbol._write_to_conf else None

    def effective(self) -> dict[str, str]:
        """Return the effective texts of all settings that apply, MATRIX_ and FORBID_ symbols excluded."""
        return {name: text for name in self.names() if (text := self.value(name)) is not None}

    def apply(self, assignments: Iterable[Assignment]) -> dict[str, str]:
        """Set these symbols, MATRIX_ symbols excluded, over the defaults, and return the effective texts."""
        self.set_only(item for item in assignments if not item.name.startswith("MATRIX"))
        return self.effective()

    def set_only(self, assignments: Iterable[Assignment]) -> None:
        """Set these symbols; the defaults apply to all others."""
        self.reset()
        for item in assignments:
            self.kconf.syms[item.name].set_value(item.value)

    def reset(self) -> None:
        """Unset all values: defaults apply again."""
        self.kconf.unset_values()

    def typed(self, name: str, text: str | None) -> object:
        """Return a text as a bool, int, float or str, a duration in seconds; None for None or an empty number."""
        if text is None or name in self.choices:
            return text
        if name in self.floats:
            return float(text) if text else None
        if self.is_duration(name):
            return seconds(text)
        kind = self.kconf.syms[name].orig_type
        return text == "y" if kind == kc.BOOL else int(text) if kind == kc.INT else text

    def typed_values(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the typed values of all settings. texts: effective ones."""
        return {name: self.typed(name, texts.get(name)) for name in self.names()}

    def is_duration(self, name: str) -> bool:
        """Return whether a symbol holds a duration or ""."""
        return self.forms.get(name) == ("duration",)

    def is_text(self, name: str) -> bool:
        """Return whether a comma belongs to the text of a symbol. Elsewhere it separates values."""
        if name in self.choices or self.kconf.syms[name].orig_type != kc.STRING:
            return name.startswith("MATRIX")  # lists of values are texts themselves, and cannot be swept
        return name not in self.floats and self.forms.get(name, ("",))[0] not in ("oneof", "duration")

    def names(self) -> list[str]:
        """Return the names of all settings: symbols, and choices instead of their members."""
        own = [one.name for one in self.symbols if not one.choice]
        return [name for name in (*own, *self.choices) if name != "MATRIX" and not name.startswith((MATRIX, FORBID))]

    def config_text(self, header: str = HEADER) -> str:
        """Return the full configuration in the format of the Linux kernel's .config."""
        return str(self.kconf._config_contents(header))

    def minimal_text(self) -> str:
        """Return the lines that differ from the defaults: a defconfig."""
        return str(self.kconf._min_config_contents(""))

    def forbidding(self) -> list[Symbol]:
        """Return the FORBID_ symbols that are y."""
        return [symbol for symbol in self.forbid if symbol.str_value == "y"]


def stale(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of those symbols and choices whose values can have changed since they were read last.

    When a value is set, kconfiglib discards the visibility and the value of everything that depends on it.
    """
    return [name for name, item in settings.items() if item._cached_vis is None]


def has_prompt(symbol: Symbol) -> bool:
    """Return whether a user can set a symbol; others are computed."""
    return any(node.prompt for node in symbol.nodes)


def _prefix(choice: Choice) -> str:
    """Return the axis name of a choice, the common prefix of its members: X_OPT_SGD, X_OPT_ADAM -> X_OPT."""
    names: list[str] = [member.name for member in choice.syms]
    return os.path.commonprefix(names).rpartition("_")[0]  # noqa: RUF071 (a prefix of letters, not of path components)


def member_text(axis: str, member: str) -> str:
    """Return a member of a choice as a user writes it: in lower case, without the prefix that is the axis name."""
    return member.removeprefix(f"{axis}_").lower()


def forbidden(symbol: Symbol) -> str:
    """Return the name of a FORBID_ symbol with its help, the reason, as one line."""
    return f"{symbol.name}: {' '.join((symbol.nodes[0].help or '').split())}"


def unknown(
    what: str,
    name: str,
    known: Iterable[str],
    *,
    kind: str = "symbol",
    else_see: str = "`make menuconfig` (press / to search) or the Kconfig files",
) -> ConfigError:
    """Return the error for an unknown name, with similar known names as the hint. what: prefix, "" for none."""
    near = difflib.get_close_matches(name, list(known), 3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else f"see {else_see}"
    return ConfigError(f"{what}: unknown {kind} {name}".removeprefix(": "), hint=hint)


def check_text(tree: Tree, symbol: Symbol, text: str, where: str) -> None:
    """Refuse a text that the symbol cannot hold in any configuration."""
    name = symbol.name
    _refuse_key(tree, name, text, where)
    if why := _problem(tree, symbol, text):
        raise ConfigError(f"{where}: CONFIG_{name}={text if text.isprintable() else ascii(text)}", why=why)
    if name.startswith(MATRIX) and name not in NOT_AN_AXIS and symbol.orig_type == kc.STRING:
        points(tree, name[len(MATRIX) :], split_list(text), f"{where}: CONFIG_{name}")


def _problem(tree: Tree, symbol: Symbol, text: str) -> str:
    """Return why a symbol cannot hold a text, "" if it can."""
    # .config has one line per symbol: a line break in a value would become a line of its own.
    if not text.isprintable():
        return "control characters are not allowed"
    if symbol.orig_type == kc.BOOL:
        return "" if text in ("n", "y") else "expected a bool: y or n"
    if symbol.orig_type == kc.INT:
        return "" if WHOLE.fullmatch(text) else "expected an integer in decimal digits without leading zeros"
    if symbol.name in tree.floats:
        return _float_problem(text, *tree.floats[symbol.name])
    return form_problem(tree.forms[symbol.name], text) if symbol.name in tree.forms else ""


def _float_problem(text: str, low: float, high: float, may_be_empty: bool) -> str:
    if text == "" and may_be_empty:
        return ""
    # float() accepts more than a config file should: 1_000, Arabic digits, blanks around the number, nan.
    try:
        number = float(text) if text.isascii() and "_" not in text and text == text.strip() else math.nan
    except ValueError:
        number = math.nan
    if math.isnan(number):
        return f"expected a number in [{low:g}, {high:g}]"
    if number == 0 and re.search("[1-9]", text.lower().partition("e")[0]):
        return "it rounds to 0"
    return "" if low <= number <= high else f"out of range: [{low:g}, {high:g}]"


def _refuse_key(tree: Tree, name: str, text: str, where: str) -> None:
    """Raise ConfigError, without the key itself, if the value of a symbol contains one."""
    if len(text) < SHORTEST:  # almost all values; a search takes 0.1 ms
        return
    given = where.partition("=")[0]
    what = f"{given}: CONFIG_{name} would contain"
    why = "configurations are copied into results and reports"
    for origin in redactor().known_in(text):
        variable = origin.rpartition(" ")[2]
        if variable != given.rpartition(" ")[2]:  # make also passes NAME=value in a variable of that name
            use = f"run this with `env -u {variable}`" if "variable" in origin else "change that file"
            hint = f"let a script read {variable}, and name the script instead; if it is not secret, {use}"
            raise ConfigError(f"{what} the {origin}", why=why, hint=hint)
    # A command of this machine, such as `notify --password=...`. In another text, `secret: ...` may be prose.
    if is_key(text) or any(name in tree.machine or looks_random(key) for key in named_keys(text)):
        hint = "pass keys in environment variables only: see docs/trackers.md; a command can call a script with them"
        raise ConfigError(f"{what} a key", why=why, hint=hint)


def normalized(tree: Tree, name: str, text: str) -> str:
    """Return the normal form of a value: 1e-3 and 0.001 are the same number, 90 and 1m30s the same duration.

    A path is the hash of its content, if that is known.
    """
    if text and tree.is_duration(name):
        return str(seconds(text))
    if name in tree.contents:
        return tree.contents[name].get(text, text)
    return repr(float(text) + 0.0) if text and name in tree.floats else text  # -0.0 + 0.0 is 0.0


def split_list(text: str) -> list[str]:
    """Return the values of a list: separated by spaces or commas."""
    return [value for value in re.split(r"[\s,]+", text) if value]


def points(tree: Tree, axis: str, values: Iterable[str], where: str) -> list[Assignment]:
    """Return an assignment per value of an axis, of a range such as 1e-4:1e-2:log5 one for each of its values.

    Raises ConfigError if a value is repeated, in any spelling.
    """
    whole = axis not in tree.choices and tree.kconf.syms[axis].orig_type == kc.INT
    texts: list[str] = []
    for value in values:
        ranged = ":" in value and (whole or axis in tree.floats)
        texts += values_of_range(value, whole=whole, where=where) if ranged else [value]
    found = [point(tree, axis, text, where) for text in texts]
    plain = [(item.name, normalized(tree, item.name, item.value)) for item in found]
    if len(set(plain)) < len(plain):
        again = (text for text, key in zip(texts, plain, strict=True) if plain.count(key) > 1)
        raise ConfigError(where, why=f"repeated: {', '.join(dict.fromkeys(again))}")
    return found


def point(tree: Tree, axis: str, value: str, where: str) -> Assignment:
    """Return the assignment that sets an axis (a choice or a symbol) to a value."""
    if members := tree.members.get(axis):
        member = members.get(value.lower().replace("-", "_"))  # muon-nanochat, as people write it
        if member is None:
            what = f"{where}: unknown value {value!r} of {axis}"
            raise ConfigError(what, why=f"expected one of {', '.join(members)}")
        return Assignment(member.name, "y", where)
    check_text(tree, tree.symbol(axis, where), value, where)
    return Assignment(axis, value, where)
