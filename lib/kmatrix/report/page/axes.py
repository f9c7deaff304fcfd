"""The section of the page on axes: the loss over each numeric axis, and over two axes at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from kmatrix.report.numbers import LOSS, MatrixNumbers
from kmatrix.report.page.parts.figures import (
    WIDTH,
    Panel,
    Scale,
    far_off,
    padded,
    polyline,
    spread_labels,
)
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.text import fixed, name
from kmatrix.text import plural

LEAST_VALUES = 3  # of an axis with a figure: two values are a comparison, which the ranking has
MOST_LINES = 8  # of a figure: those with the lowest losses
MOST_FIGURES = 6
MOST_MAPS = 6
LEAST_FILLED = 0.6  # share of the cells of a map that have a loss
FLAT = 0.00005  # nats/token: a smaller difference of means reads 0.0000
LEVELS = 7  # of a map: 0 (worst) to 6 (best)
LOGARITHMIC = 8.0  # largest / smallest value from which an axis is logarithmic
LABEL_ROOM, LABEL_GAP, LETTERS = 120, 14, 18  # names at the right of a figure
TICK_LETTER, TICK_GAP = 6.2, 7.0  # width of a letter below a figure, and least distance of two values

Place = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLine:
    """The configurations that differ in one axis only. Places are units of the panel."""

    short: str  # what they have in common
    colour: str
    dash: int
    index: int  # of the best of them: data-g
    points: str  # of a polyline through the means
    means: tuple[tuple[float, float, str], ...]  # place, and what a pointer that rests on it shows
    seeds: tuple[Place, ...]  # each finished run
    label_y: float
    best: str  # value of the axis with the lowest mean
    best_loss: float
    spread: float  # highest - lowest mean
    is_edge: bool  # the best value is the lowest or the highest that was tried, and not all are equal
    beyond: int  # values whose mean is above the figure


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisFigure:
    """The loss over one numeric axis."""

    axis: str
    panel: Panel
    lines: tuple[AxisLine, ...]  # lowest loss first
    omitted: int  # lines without a place in the figure
    is_logarithmic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatCell:
    """The mean loss of one configuration. level: 0 to 6, the lower the loss the higher."""

    loss: float
    runs: int
    level: int
    is_best: bool
    index: int  # of the configuration: data-g


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """The loss over two axes; other axes have one value."""

    seeds: int | None  # of each configuration; None if they differ
    common: str  # what all configurations have in common; "" if there are no other axes
    row_axis: str
    column_axis: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatCell | None, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxesSection:
    """What the section shows."""

    figures: tuple[AxisFigure, ...] = field(repr=False)
    maps: tuple[HeatMap, ...] = field(repr=False)
    omitted_maps: int = 0


def axes(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> AxesSection | None:
    """Return the section, or None if no axis has several numbers, and no two axes have several values."""
    if not numbers.rankings or numbers.rankings[0].metric != LOSS:
        return None
    ranked = [group for group in groups if group.ranking == 0 and group.rank is not None]
    values = {label: _ordered({group.numbers.axes.get(label, "") for group in ranked} - {""}) for label in numbers.axes}
    varying = {label: found for label, found in values.items() if len(found) > 1}
    numeric = [label for label, found in varying.items() if len(found) >= LEAST_VALUES and _are_numbers(found)]
    figures = [_figure(label, list(lines)) for label in numeric[:MOST_FIGURES] if (lines := [*_lines(label, ranked)])]
    maps = [one for pair in combinations(varying, 2) for one in _maps(pair, varying, ranked)]
    if not figures and not maps:
        return None
    maps.sort(key=_lowest)
    return AxesSection(figures=tuple(figures), maps=tuple(maps[:MOST_MAPS]), omitted_maps=max(0, len(maps) - MOST_MAPS))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _are_numbers(values: Sequence[str]) -> bool:
    return all(_number(value) is not None for value in values)


def _ordered(values: set[str]) -> tuple[str, ...]:
    """Return values in the order of their numbers, else of their names."""
    if _are_numbers(tuple(values)):
        return tuple(sorted(values, key=float))
    return tuple(sorted(values))


def _common(group: PageGroup, without: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(item for item in group.numbers.axes.items() if item[0] not in without)


def _name_of(rest: Sequence[tuple[str, str]], all_rests: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Return what tells these configurations from the others: "muon, wd 0.1"."""
    shared = set.intersection(*(set(one) for one in all_rests)) if len(all_rests) > 1 else set()
    own = [(label, value) for label, value in rest if (label, value) not in shared]
    words = [value if _number(value) is None else f"{label} {value}" for label, value in own or rest]
    return name(", ".join(words))


def _lines(label: str, groups: Sequence[PageGroup]) -> Iterator[list[PageGroup]]:
    """Yield the configurations that differ only in this axis, in its order, if there are enough values."""
    families: dict[tuple[tuple[str, str], ...], list[PageGroup]] = {}
    for group in groups:
        if _number(group.numbers.axes.get(label, "")) is not None:
            families.setdefault(_common(group, [label]), []).append(group)
    for family in families.values():
        if len({group.numbers.axes[label] for group in family}) >= LEAST_VALUES:
            yield sorted(family, key=lambda group: float(group.numbers.axes[label]))


def _mean(group: PageGroup) -> float:
    mean = group.numbers.mean
    assert mean is not None  # a ranked configuration has one
    return mean


def _figure(label: str, families: Sequence[list[PageGroup]]) -> AxisFigure:
    families = sorted(families, key=lambda family: min(map(_mean, family)))
    shown = families[:MOST_LINES]
    xs = [float(group.numbers.axes[label]) for family in shown for group in family]
    is_logarithmic = min(xs) > 0 and max(xs) >= LOGARITHMIC * min(xs)
    empty = Panel(title=name(label), x_label=name(label), right=WIDTH - LABEL_ROOM)
    x = Scale(*padded([_along(value, is_logarithmic) for value in xs], 0.05), empty.left, empty.right)
    limit = far_off([_mean(group) for family in shown for group in family])
    near = [
        loss for family in shown for group in family for loss in group.numbers.losses.values() if _mean(group) <= limit
    ]
    y = Scale(*padded([value for value in near if value <= limit] or near), empty.bottom, empty.top)
    texts = dict.fromkeys(group.numbers.axes[label] for family in shown for group in family)
    panel = replace(empty, x_ticks=_ticks(texts, x, is_logarithmic), y_ticks=y.ticks(5))
    rests = [_common(family[0], [label]) for family in families]
    lines = [
        _line(label, family, _name_of(rest, rests), x, y, logarithmic=is_logarithmic)
        for family, rest in zip(shown, rests, strict=False)
    ]
    wanted = [line.label_y for line in lines]
    placed = spread_labels(wanted, LABEL_GAP, panel.top + 6, panel.bottom)
    used: dict[str, int] = {}
    named = []
    for line, at in zip(lines, placed, strict=True):
        dash = used.get(line.colour, 0)
        used[line.colour] = dash + 1
        named.append(replace(line, label_y=round(at + 4, 1), dash=dash % 4))
    return AxisFigure(
        axis=name(label),
        panel=panel,
        lines=tuple(named),
        omitted=len(families) - len(shown),
        is_logarithmic=is_logarithmic,
    )


def _along(value: float, logarithmic: bool) -> float:
    return math.log10(value) if logarithmic else value


def _ticks(texts: Mapping[str, None], x: Scale, logarithmic: bool) -> tuple[tuple[float, str], ...]:
    """Return the values of the axis as they were written, those that have room."""
    found: list[tuple[float, str]] = []
    for text in sorted(texts, key=float):
        at = x.at(_along(float(text), logarithmic))
        room = TICK_GAP + TICK_LETTER * (len(text) + len(found[-1][1])) / 2 if found else 0.0
        if not found or at - found[-1][0] >= room:
            found.append((at, name(text)))
    return tuple(found)


def _line(label: str, family: Sequence[PageGroup], short: str, x: Scale, y: Scale, *, logarithmic: bool) -> AxisLine:
    places = [(x.at(_along(float(group.numbers.axes[label]), logarithmic)), group) for group in family]
    best = min(family, key=_mean)
    means = [_mean(group) for group in family]
    ends = [y.at(_mean(group)) for _, group in places]
    return AxisLine(
        short=short if len(short) <= LETTERS else f"{short[: LETTERS - 1]}…",
        colour=best.colour,
        dash=0,
        index=best.index,
        points=polyline((at, y.unbounded(_mean(group))) for at, group in places),
        means=tuple((at, y.unbounded(_mean(group)), _tip(label, group)) for at, group in places),
        seeds=tuple((at, y.unbounded(loss)) for at, group in places for loss in group.numbers.losses.values()),
        label_y=ends[-1],
        best=name(best.numbers.axes[label]),
        best_loss=_mean(best),
        spread=max(means) - min(means),
        is_edge=best in (family[0], family[-1]) and max(means) - min(means) >= FLAT,
        beyond=sum(mean > y.high for mean in means),
    )


def _tip(label: str, group: PageGroup) -> str:
    seeds = plural(len(group.numbers.losses), "seed")
    return f"{name(label)} {name(group.numbers.axes[label])}: {fixed(_mean(group))}, {seeds}"


def _maps(
    pair: tuple[str, str], values: Mapping[str, tuple[str, ...]], groups: Sequence[PageGroup]
) -> Iterator[HeatMap]:
    """Yield the maps of two axes, one for each combination of the others; the axis with more values has the columns."""
    row, column = sorted(pair, key=lambda label: len(values[label]))
    if len(values[column]) < LEAST_VALUES:
        return
    families: dict[tuple[tuple[str, str], ...], dict[tuple[str, str], PageGroup]] = {}
    for group in groups:
        at = (group.numbers.axes.get(row, ""), group.numbers.axes.get(column, ""))
        if all(at):
            families.setdefault(_common(group, pair), {})[at] = group
    rests = list(families)
    for rest, cells in families.items():
        # Values that none of these configurations has, such as the learning rates of another optimizer, are left out.
        rows = [value for value in values[row] if any(at[0] == value for at in cells)]
        columns = [value for value in values[column] if any(at[1] == value for at in cells)]
        if len(rows) < 2 or len(columns) < 2 or len(cells) < LEAST_FILLED * len(rows) * len(columns):
            continue
        shade = _shades([_mean(group) for group in cells.values()])
        best = min(cells.values(), key=_mean)
        counts = {len(group.numbers.losses) for group in cells.values()}
        yield HeatMap(
            seeds=counts.pop() if len(counts) == 1 else None,
            common=_name_of(rest, rests) if len(rests) > 1 else "",
            row_axis=name(row),
            column_axis=name(column),
            columns=tuple(map(name, columns)),
            rows=tuple(
                (name(value), tuple(_cell(cells.get((value, one)), shade, best) for one in columns)) for value in rows
            ),
        )


def _shades(losses: Sequence[float]) -> Scale:
    """Return the levels of losses: what is far off does not make all others look equal."""
    return Scale(min(losses), min(max(losses), far_off(losses)), LEVELS - 0.51, -0.49)


def _cell(group: PageGroup | None, shade: Scale, best: PageGroup) -> HeatCell | None:
    if group is None:
        return None
    level = round(min(LEVELS - 1, max(0.0, shade.at(_mean(group)))))
    return HeatCell(
        loss=_mean(group), runs=len(group.numbers.losses), level=level, is_best=group is best, index=group.index
    )


def _lowest(one: HeatMap) -> float:
    return min(cell.loss for _, cells in one.rows for cell in cells if cell is not None)
