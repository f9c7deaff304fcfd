"""What a value must be, and why one is not in force."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import kconfiglib as kc

from kmatrix.errors import ConfigError
from kmatrix.kconfig import duration
from kmatrix.kconfig.tree import BOOLS, MATRIX, NOT_AN_AXIS, Tree, help_text, tidy
from kmatrix.redaction import is_key

WHOLE = re.compile(r"0|-?[1-9][0-9]*")
SLUG = re.compile(r"(?!registry-)[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")  # a name that every tracker takes
SHOWN = 20  # mistakes in one message


@dataclass(frozen=True, slots=True)
class Assignment:
    """One line of a configuration, or one NAME=value of the command line.

    name: the symbol without CONFIG_.  value: its text ("y" for the member of a choice).
    where: file:line, or the words of the command line.
    """

    name: str
    value: str
    where: str


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an assignment is not in force.

    absent: the symbol does not exist in this configuration; otherwise its value is illegal in it.
    """

    text: str
    absent: bool


def check_text(tree: Tree, symbol: Any, text: str, where: str) -> None:
    """Refuse a text that the symbol could never hold, whatever else is set."""
    name, kind = symbol.name, symbol.orig_type
    if not text.isprintable() and kind == kc.STRING:
        raise ConfigError(f"{where}: CONFIG_{name}={text!a}", why="a string holds no control characters")
    if kind == kc.STRING and is_key(text):
        raise ConfigError(
            f"{where.partition('=')[0]}: CONFIG_{name} would hold a key",
            why="what is in a configuration ends up in results and reports",
            fix="give keys in the environment only: see docs/trackers.md",
        )
    text = text if text.isprintable() else ascii(text)
    what = f"{where} CONFIG_{name}={text!r}" if where.endswith(" of") else f"{where}: CONFIG_{name}={text}"
    if kind in BOOLS and text not in ("n", "y"):
        raise ConfigError(what, why="it is a bool: y or n")
    if kind == kc.INT and not WHOLE.fullmatch(text):
        raise ConfigError(what, why="it is a whole number, written in plain decimal digits")
    if kind == kc.HEX and not re.fullmatch(r"0[xX][0-9a-fA-F]+", text):
        raise ConfigError(what, why="it is a hexadecimal number: 0x and digits")
    if name in tree.floats:
        _check_float(tree, name, text, what)
    if name in tree.oneofs and text not in tree.oneofs[name]:
        raise ConfigError(what, why=f"it is one of {', '.join(tree.oneofs[name])}")
    if name in tree.durations and text and duration.seconds(text) is None:
        raise ConfigError(what, why=duration.KNOWN_FORMS)
    if name in tree.slugs and text and not SLUG.fullmatch(text):
        raise ConfigError(what, why="it is a name of small letters, digits and hyphens, at most 64, not registry-...")
    if name.startswith(MATRIX) and name not in NOT_AN_AXIS and kind == kc.STRING:
        _check_list(tree, name, text, where)


def same_as(tree: Tree, name: str, text: str) -> str:
    """Return one spelling for all that mean the same value: 1e-3 and 0.001 are one number, 90 and 1m30s one time."""
    if text and name in tree.durations:
        return str(duration.seconds(text))
    return same_number(text) if text and name in tree.floats else text


def same_number(text: str) -> str:
    """Return one spelling of a number; of both zeros one."""
    return repr(float(text) + 0.0)


def twice(tree: Tree, name: str, values: Sequence[str]) -> str:
    """Return the values that stand more than once in a list of legal ones, in any spelling; empty where none does."""
    plain = [same_as(tree, name, value) for value in values]
    return ", ".join(dict.fromkeys(v for v, p in zip(values, plain, strict=True) if plain.count(p) > 1))


def split_list(text: str) -> list[str]:
    """Return the values of a list: separated by spaces or commas."""
    return [value for value in re.split(r"[\s,]+", text) if value]


def cause(tree: Tree, assignment: Assignment) -> Cause | None:
    """Return why an assignment is not in force now, or None where it is."""
    symbol = tree.kconf.syms[assignment.name]
    if symbol.str_value == assignment.value and (
        symbol.visibility or not _has_prompt(symbol) or assignment.value == "n"
    ):
        return None
    if symbol.choice:
        return _choice_cause(symbol)
    if not _has_prompt(symbol):
        return Cause(f"it has no prompt: its value is computed, and is {symbol.str_value!r} here", absent=False)
    if not symbol.visibility:
        return Cause(unmet(symbol), absent=symbol.orig_type not in BOOLS or assignment.value == "n")
    limits = [_limits(entry, symbol.kconfig) for entry in symbol.ranges if kc.expr_value(entry[2])]
    others = [_limits(entry, symbol.kconfig) for entry in symbol.ranges if not kc.expr_value(entry[2])]
    if limits:
        return Cause("; ".join([f"out of range: {limits[0]}", *others]), absent=False)
    return Cause(f"it became {symbol.str_value!r}", absent=False)


def _limits(entry: Sequence[Any], kconf: Any) -> str:
    """Return a range with its condition."""
    low, high, condition = entry[:3]
    when = "" if condition is kconf.y else f" when {kc.expr_str(condition)}"
    return f"[{low.str_value}, {high.str_value}]{when}"


def unmet(symbol: Any) -> str:
    """Return the false terms of what a symbol depends on, with the values that they have."""
    terms = kc.split_expr(symbol.direct_dep, kc.AND)
    false = [kc.expr_str(term) for term in terms if not kc.expr_value(term)]
    false = [term for term in false if term != "<choice>"]
    values = sorted(
        {
            f"{item.name}={item.str_value}"
            for term in terms
            if not kc.expr_value(term)
            for item in kc.expr_items(term)
            if isinstance(item, kc.Symbol) and item.nodes
        }
    )
    if not false:
        return "it is hidden here"
    return f"needs {' && '.join(false)}" + (f" [{', '.join(values)}]" if values else "")


def put_in_force(tree: Tree, assignments: Sequence[Assignment]) -> None:
    """Set every assignment, and refuse the whole where one of them is not in force afterwards.

    Raises ConfigError with a line for each mistake: where it stands, the symbol, and the cause.
    """
    said = len(tree.kconf.warnings)
    for assignment in assignments:
        tree.kconf.syms[assignment.name].set_value(assignment.value)
    refuse(
        f"{item.where}: CONFIG_{item.name}={item.value}: {why.text}"
        for item in assignments
        if (why := cause(tree, item)) is not None
    )
    for symbol in tree.symbols:
        _ = symbol.str_value  # evaluation finds the rest: a symbol that is selected in spite of what it depends on
    refuse(tidy(text) for text in tree.kconf.warnings[said:])
    refuse(
        f"{symbol.name}: {help_text(symbol)}{blamed(tree, assignments, {item.name for item in symbol.referenced})}"
        for symbol in tree.forbidding()
    )


def blamed(tree: Tree, assignments: Iterable[Assignment], names: Iterable[str]) -> str:
    """Return where the symbols and choices of these names are set, in brackets; empty where they are defaults."""
    named = set(names)
    found = [
        f"{item.where}: CONFIG_{item.name}={item.value}"
        for item in assignments
        if (item.name in named or tree.axis_of(tree.kconf.syms[item.name]) in named) and item.value != "n"
    ]
    return f" ({'; '.join(found)})" if found else ""


def refuse(mistakes: Iterable[str]) -> None:
    """Raise one ConfigError for all mistakes, or do nothing where there are none."""
    found = list(mistakes)
    if len(found) == 1:
        raise ConfigError(found[0], fix="remove or change it; nothing was written")
    if found:
        more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        lines = "\n  ".join([*found[:SHOWN], *more])
        raise ConfigError(
            f"{len(found)} assignments cannot be put in force:\n  {lines}",
            fix="remove or change them; nothing was written",
        )


def _has_prompt(symbol: Any) -> bool:
    return any(node.prompt for node in symbol.nodes)


def _choice_cause(symbol: Any) -> Cause:
    if not symbol.choice.visibility:
        return Cause("its choice is hidden here", absent=True)
    if not symbol.visibility:
        return Cause(unmet(symbol), absent=False)
    taken = symbol.choice.selection
    return Cause(f"the choice took {taken.name if taken else 'nothing'}: one member can be y", absent=False)


def _check_float(tree: Tree, name: str, text: str, what: str) -> None:
    low, high, may_be_empty = tree.floats[name]
    if text == "" and may_be_empty:
        return
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if "_" in text or not text.isascii() or text != text.strip() or math.isnan(number):
        raise ConfigError(what, why=f"it is a number in [{low:g}, {high:g}]")
    if not low <= number <= high:
        raise ConfigError(what, why=f"out of range: [{low:g}, {high:g}]")


def _check_list(tree: Tree, name: str, text: str, where: str) -> None:
    swept = tree.kconf.syms[name[len(MATRIX) :]]
    values = split_list(text)
    for value in values:
        check_text(tree, swept, value, f"{where}: CONFIG_{name}")
    if again := twice(tree, swept.name, values):
        raise ConfigError(f"{where}: CONFIG_{name}={text}", why=f"it holds {again} twice")
