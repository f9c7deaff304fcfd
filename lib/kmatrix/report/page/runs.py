"""The section of the page with all runs: a table to filter and sort, and what its script shows of a run on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.records.runs import Status
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.text import dollars, duration, fine, percent, rate, shown, significant, whole
from kmatrix.report.page.parts.units import TOKEN_ENERGY, unit_of
from kmatrix.report.page.settings import RunDiffs, run_diffs

MANY_ROWS = 150  # from here on the browser lays out only the rows in view
MOST_ALERTS = 5  # of a run in its details
SENTENCE = 300  # characters of a reason, an alert or an adjustment in the details
WEB = ("https://", "http://")  # a link to anything else, such as javascript:, stays text

Number = Callable[[RunNumbers], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunColumn:
    """A column of numbers."""

    title: str
    number: Number
    text: Callable[[float | None], str]
    exact: bool = False  # the cell also holds the number itself: its text is rounded, or does not sort
    export: str = ""  # title of the column in a CSV file, if that needs a unit


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCell:
    """A number in the table."""

    text: str
    exact: float | None  # None: the text says it all, or the number is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerLink:
    """Where a tracker shows a run."""

    tracker: str
    target: str
    is_web: bool  # an address that a browser may open; otherwise a directory


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run."""

    place: int  # in MatrixNumbers.runs: data-i
    name: str
    status: Status
    is_reused: bool
    alerts: int
    axes: tuple[str, ...]  # "" if the run has no value on an axis
    cells: tuple[RunCell, ...]
    links: tuple[TrackerLink, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsSection:
    """The table of all runs, the best configuration first."""

    axes: tuple[str, ...]  # labels of the axes that vary
    columns: tuple[RunColumn, ...]  # those that any run has a number for
    rows: tuple[RunRow, ...]
    unknown: tuple[str, ...]  # titles of the columns that are left out, because no run has a number
    script: Mapping[str, object] = field(repr=False)

    @property
    def is_long(self) -> bool:
        return len(self.rows) > MANY_ROWS

    @property
    def has_links(self) -> bool:
        return any(row.links for row in self.rows)


def _final_loss(run: RunNumbers) -> float | None:
    return run.final_val_loss if run.counts else None  # the last loss of an unfinished run does not count


def _joules(run: RunNumbers) -> float | None:
    return run.gpu.main.joules_per_token if run.gpu else None


COLUMNS = (
    RunColumn(title="final loss", number=_final_loss, text=fine, exact=True),
    RunColumn(title="best loss", number=lambda run: run.best_val_loss, text=fine, exact=True),
    RunColumn(title="steps", number=lambda run: run.steps, text=whole),
    RunColumn(title="tokens/s", number=lambda run: run.tokens_per_second, text=rate),
    RunColumn(title="MFU", number=lambda run: run.mfu, text=lambda value: percent(value, 1), export="MFU (%)"),
    RunColumn(title="time", number=lambda run: run.seconds, text=duration, exact=True, export="time (s)"),
    RunColumn(title="peak MiB", number=lambda run: run.peak_memory_mib, text=whole),
    RunColumn(title="energy/token", number=_joules, text=significant),
    RunColumn(title="cost", number=lambda run: run.dollars, text=dollars),
)


def runs(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> RunsSection | None:
    """Return the section. A column without any number is left out and named."""
    known = [
        _energy_column(numbers.runs) if column.number is _joules else column
        for column in COLUMNS
        if any(column.number(run) is not None for run in numbers.runs)
    ]
    axes = [label for label, values in numbers.axes.items() if len(values) > 1]
    return RunsSection(
        axes=tuple(axes),
        columns=tuple(known),
        rows=tuple(_row(place, numbers.runs[place], axes, known) for place in _order(numbers, groups)),
        unknown=tuple(
            column.title for column in COLUMNS if not any(column.number(run) is not None for run in numbers.runs)
        ),
        script=_script(numbers, run_diffs(numbers, groups)),
    )


def _energy_column(runs_: Sequence[RunNumbers]) -> RunColumn:
    """Return the column of the energy per token, in the unit that gives its largest value digits."""
    size, unit = unit_of(TOKEN_ENERGY, max(value for run in runs_ if (value := _joules(run)) is not None))

    def number(run: RunNumbers) -> float | None:
        joules = _joules(run)
        return None if joules is None else joules / size

    return RunColumn(title=f"{unit}/token", number=number, text=significant)


def _order(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> list[int]:
    """Return the places of all runs: by configuration, then by seed."""
    group_of = {place: group.index for group in groups for place in group.places}
    return sorted(range(len(numbers.runs)), key=lambda at: (group_of[at], numbers.runs[at].seed or 0, at))


def _row(place: int, run: RunNumbers, axes: Sequence[str], columns: Sequence[RunColumn]) -> RunRow:
    return RunRow(
        place=place,
        name=run.name,
        status=run.status,
        is_reused=bool(run.reused_from),
        alerts=len(run.alerts),
        axes=tuple(run.axes.get(label, "") for label in axes),
        cells=tuple(_cell(run, column) for column in columns),
        links=tuple(
            TrackerLink(tracker=tracker, target=target, is_web=target.lower().startswith(WEB))
            for tracker, target in run.links.items()
        ),
    )


def _cell(run: RunNumbers, column: RunColumn) -> RunCell:
    number = column.number(run)
    return RunCell(text=column.text(number), exact=number if column.exact else None)


def _script(numbers: MatrixNumbers, diffs: RunDiffs) -> dict[str, object]:
    """Return the details of the runs. Only runs that have any are listed, with short keys: there may be 1,000.

    r reason, at attempts, al alerts, ad adjusted settings, ru where the run was trained.
    """
    details = {str(at): found for at, run in enumerate(numbers.runs) if (found := _details(run))}
    return {
        "reference": shown(diffs.reference, SENTENCE),
        "names": [shown(name, SENTENCE) for name in diffs.names],
        "values": list(diffs.values),
        "diffs": diffs.runs,
        "details": details,
    }


def _details(run: RunNumbers) -> dict[str, object]:
    found: dict[str, object] = {
        "r": shown(run.reason, SENTENCE),
        "at": len(run.attempts) if len(run.attempts) > 1 else 0,
        "al": [shown(alert.text, SENTENCE) for alert in run.alerts[:MOST_ALERTS]],
        "ad": [shown(change, SENTENCE) for change in run.adjusted[:MOST_ALERTS]],
        "ru": shown(run.reused_from, SENTENCE),
    }
    return {key: value for key, value in found.items() if value}
