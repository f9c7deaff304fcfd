"""What the gallery says about each matrix: its verdict, leader, cost, date and curves, or why it cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from kmatrix.errors import KmatrixError
from kmatrix.records.paths import MatrixDir
from kmatrix.report.analysis import analyse
from kmatrix.report.numbers import MatrixNumbers
from kmatrix.report.page.curves import StaticCurves, static_curves
from kmatrix.report.page.parts.groups import PageGroup, page_groups
from kmatrix.report.page.parts.text import dollars, duration, fine, name, shown, signed
from kmatrix.report.page.provenance import Fact
from kmatrix.report.page.verdict import ShownVerdict, verdict
from kmatrix.report.pair_text import digits_for
from kmatrix.report.sentences.rankings import unit_of
from kmatrix.status.cost import total_dollars

LETTERS = 300  # of a fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Why a matrix cannot be read."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCard:
    """A matrix in the gallery. Either it has a verdict, or an error."""

    name: str  # can be displayed
    link: str  # its report.html, relative to the gallery; "" if it has none
    created: float | None = None  # Unix seconds
    verdict: ShownVerdict | None = None  # of its first ranking
    rankings: int = 0
    facts: tuple[Fact, ...] = ()
    curves: StaticCurves | None = None
    error: Unreadable | None = None


def card(matrix: MatrixDir, folder: Path) -> MatrixCard:
    """Return what the gallery says about a matrix. folder: that of the gallery."""
    link = _link(matrix.page, folder) if matrix.page.is_file() else ""
    try:
        numbers = analyse(matrix)
    except KmatrixError as error:
        why = Unreadable(what=shown(error.what), why=shown(error.why))
        return MatrixCard(name=name(matrix.name), link=link, error=why)
    except OSError as error:  # a folder of somebody else: the other matrices are shown
        why = Unreadable(what=shown(f"{error.filename or matrix.path} cannot be read"), why=shown(error.strerror or ""))
        return MatrixCard(name=name(matrix.name), link=link, error=why)
    groups = page_groups(numbers)
    section = verdict(numbers, groups)
    return MatrixCard(
        name=name(matrix.name),
        link=link,
        created=numbers.created,
        verdict=None if section is None else section.verdicts[0],
        rankings=len(numbers.rankings),
        facts=tuple(Fact(label=label, text=shown(text, LETTERS)) for label, text in _facts(numbers, groups) if text),
        curves=static_curves(groups),
    )


def _link(page: Path, folder: Path) -> str:
    """Return the relative address of a page: the folder can be moved and mailed as a whole."""
    relative = Path(os.path.relpath(page.resolve(), folder.resolve())).as_posix()
    # "./": a first part with a colon would be the scheme of an address.
    return f"./{quote(os.fsencode(relative))}"


def _facts(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> Iterator[tuple[str, str]]:
    """Yield label and text, "" if there is nothing to say."""
    short = {group.numbers.name: group.short for group in groups}
    ranking = next(iter(numbers.rankings), None)
    if ranking is not None and ranking.groups:
        leader, pair = ranking.groups[0], ranking.main_pair
        yield (
            "Lowest mean loss",
            f"{short[leader.name]}, {fine(leader.mean, digits_for(leader.interval))} {unit_of(ranking)}",
        )
        if pair is not None and pair.difference is not None:
            compared = f"{short.get(pair.a, pair.a)} compared with {short.get(pair.b, pair.b)}"
            digits = digits_for(pair.interval)
            span = pair.interval
            known = f" ({signed(span.low, digits)} to {signed(span.high, digits)})" if span else ""
            yield (
                "Difference",
                f"{signed(pair.difference, digits)}{known}, {compared}",
            )
    yield "Runs", ", ".join(f"{number:,} {state}" for state, number in numbers.states.items())
    yield "Configurations", f"{len(groups):,}"
    yield "Took", "" if numbers.took_s is None else duration(numbers.took_s)
    paid = total_dollars(run.dollars for run in numbers.runs)
    yield "Cost", "" if paid is None else dollars(paid)
