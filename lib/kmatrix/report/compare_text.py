"""What `make compare` prints: one table for each configuration that both have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmatrix.records import Status
from kmatrix.report.compare import Compared, Pair, Row, Symbol
from kmatrix.report.layout import UNKNOWN, section, table, wrap
from kmatrix.report.repeat import named
from kmatrix.report.values import RunNumbers
from kmatrix.stats import Word

TITLES = ("", "base", "new", "difference", "", "95 % interval", "new is")
DIGITS = {"nats a token": 4, "s": 1}  # behind the point; others have none


def render(found: Compared) -> str:
    """Return the comparison as text."""
    title = "Comparison"
    lines = [title, "=" * len(title), *wrap(f"base  {found.base.name}"), *wrap(f"new   {found.new.name}"), ""]
    lines += [*section("Set differently", list(_symbols(found))), ""]
    for pair in found.pairs:
        lines += [*section(pair.name, list(_pair(pair))), ""]
    for where, names in (("base", found.only_base), ("new", found.only_new)):
        if names:
            lines += [*wrap(f"only in {where}: {'; '.join(names)}"), ""]
    if not found.pairs:
        lines += ["they have no configuration in common", ""]
    return "\n".join([*lines, *wrap(_method(found))]).rstrip() + "\n"


def _symbols(found: Compared) -> Iterator[str]:
    several = len(found.pairs) > 1
    matter = [symbol for symbol in found.symbols if not symbol.neutral]
    for symbol in matter:
        where = f"  ({named(symbol.runs)})" if several and len(symbol.runs) < len(found.pairs) else ""
        yield from wrap(f"{_symbol(symbol)}{where}")
    if not matter:
        yield "nothing that can change a result" if found.pairs else "nothing to compare"
    if neutral := [_symbol(symbol) for symbol in found.symbols if symbol.neutral]:
        yield from wrap(f"without consequence: {'; '.join(neutral)}")
    for text in found.about:
        yield from wrap(text, bullet="! ")


def _symbol(symbol: Symbol) -> str:
    return f"{symbol.name} {_value(symbol.base)} -> {_value(symbol.new)}"


def _value(text: str) -> str:
    return text or "(none)"


def _pair(pair: Pair) -> Iterator[str]:
    yield from wrap(f"base {_runs(pair.base)}; new {_runs(pair.new)}")
    if pair.rows:
        yield from table(TITLES, [_row(row) for row in pair.rows], left=(0, len(TITLES) - 1))
    else:
        yield "no finished run on either side"
    for note in pair.notes:
        yield from wrap(note, bullet="! ")


def _runs(runs: Sequence[RunNumbers]) -> str:
    """Say how many runs count, and how the others stand."""
    counted = [run for run in runs if run.counts]
    seeds = sorted(run.seed for run in counted if run.seed is not None)
    listed = f"{len(counted)} finished" + (f" (seed {' '.join(map(str, seeds))})" if seeds else "")
    others = [f"{sum(run.status is status for run in runs)} {status}" for status in Status if status != Status.FINISHED]
    return ", ".join([listed, *(text for text in others if not text.startswith("0 "))])


def _row(row: Row) -> list[str]:
    digits = DIGITS.get(row.measure.unit, 0)
    name = f"{row.measure.name}, {row.measure.unit}"
    shown = [UNKNOWN if value is None else f"{value:,.{digits}f}" for value in (row.base, row.new)]
    verdict = row.verdict
    if verdict is None or verdict.difference is None:
        return [name, *shown, UNKNOWN, "", "", ""]
    percent = f"{_signed(100 * verdict.difference / abs(row.base), 1)}%" if row.base else ""
    span = verdict.interval if not row.why_not else None
    interval = f"{span.low:+,.{digits}f} to {span.high:+,.{digits}f}" if span else ""
    return [name, *shown, _signed(verdict.difference, digits), percent, interval, _says(row)]


def _signed(difference: float, digits: int) -> str:
    """Return a difference with its sign; one that rounds to 0 has none."""
    text = f"{difference:+,.{digits}f}"
    return text.lstrip("+-") if float(text.replace(",", "")) == 0 else text


def _says(row: Row) -> str:
    """Return what may be said of new, with the evidence for it."""
    verdict = row.verdict
    if verdict is None:
        return ""
    if row.why_not:
        return f"{row.why_not}: not comparable"
    if row.p is None:
        if verdict.difference == 0:
            return "equal"
        return f"{verdict.reason.partition(':')[0]}: not evidence"
    p = "p < 0.001" if row.p < 0.001 else f"p {row.p:.3f}"
    return f"{row.word}, {p}"


def _method(found: Compared) -> str:
    """Say which tests stand behind the words, where there are any."""
    tested = [row for pair in found.pairs for row in pair.rows if row.p is not None]
    if not tested:
        return ""
    methods = " and ".join(dict.fromkeys(row.verdict.method for row in tested if row.verdict))
    several = ", p corrected after Holm over the configurations" if len(found.pairs) > 1 else ""
    return f'95 % interval of the difference, Student\'s t ({methods}){several}; "{Word.BETTER}" needs p < 0.05'
