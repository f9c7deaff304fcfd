"""Where the marks of the static figures lie: strips in percent of their width, panels in units of their viewBox."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kmatrix.report.page.parts.text import MINUS

WIDTH, HEIGHT = 416, 300  # of a panel, in 1/16 rem
LEFT, RIGHT, TOP, BOTTOM = 56, 18, 14, 44  # margins of a panel
LETTER, LINE = 7.0, 13  # size of a letter of a label, and of its line
POINT = 5.0  # radius of a point with its edge
CROWD = 12  # points
MOST_DECIMALS = 8  # of a tick; smaller steps need an exponent
SAME_COST = 1.005  # ratio of two costs up to which they count as the same
SHORTEST_RANGE = 9.0  # of a horizontal line that is drawn: shorter ones hide below the point
OVERSHOOT = 0.02  # share of a strip by which a value beyond its edge is drawn outside

Tick = tuple[float, str]  # place, text
Place = tuple[float, float]


def nice_ticks(low: float, high: float, most: int = 5) -> tuple[list[float], float]:
    """Return round values between low and high, and their step: 1, 2 or 5 times a power of ten.

    At most `most` values (3 or more): every second one, if a step gives more and the next larger one fewer than two.
    """
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low], abs(low) or 1.0
    power = math.floor(math.log10(span))
    steps = [factor * 10.0**p for p in range(power - 2, power + 2) for factor in (1, 2, 5)]
    found: tuple[list[float], float] = ([low], span)
    for step in reversed(steps):  # the largest step that gives two ticks, or a smaller one that gives few enough
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 > most and len(found[0]) >= 2:
            break
        found = ([at * step for at in range(first, last + 1)] or [low], step)
    values, step = found
    return values[:: 1 if len(values) <= most else 2], step


def tick_text(value: float, step: float) -> str:
    """Return a tick with as many digits as it needs to differ from the next ones."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    if digits > MOST_DECIMALS and value:
        places = max(0, math.floor(math.log10(abs(value)) + 1e-9) + digits)
        mantissa, _, exponent = f"{value:.{places}e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", MINUS)
    return f"{value:,.{min(digits, MOST_DECIMALS)}f}".replace("-", MINUS)


def far_off(losses: Sequence[float], halves: Sequence[float] = ()) -> float:
    """Return the loss above which a configuration would squeeze the others, and is drawn as an arrow.

    Eight times the median distance to the lowest, and at least twenty times the median half interval, so that what is
    only clearly worse stays in the figure. Three configurations or fewer without intervals are all drawn.
    """
    ordered, widths = sorted(losses), sorted(halves)
    median = ordered[len(ordered) // 2] - ordered[0]
    if not widths and len(ordered) < 4:
        return ordered[-1]
    room = max(8 * median, 20 * widths[len(widths) // 2] if widths else 0.0)
    return ordered[0] + room if room > 0 else ordered[-1]


def padded(values: Iterable[float | None], room: float = 0.08, *, zero: bool = False) -> tuple[float, float]:
    """Return the range of the known values with room on both sides, as a share of it. zero: it holds 0."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if zero:
        known.append(0.0)
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    space = room * (high - low) or 0.01 * abs(high) or 1.0
    return low - space, high + space


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in a strip, in percent. before, after: it goes on beyond the left or the right edge."""

    begin: float
    end: float
    before: bool
    after: bool


@dataclass(frozen=True, slots=True)
class Scale:
    """Values -> percent of a strip, or units of a panel (begin may be larger than end: a vertical axis)."""

    low: float
    high: float
    begin: float = 0.0
    end: float = 100.0

    def at(self, value: float) -> float:
        """Return the place of a value; one that lies outside is a little beyond the edge."""
        return self._place(min(1 + OVERSHOOT, max(-OVERSHOOT, self._share(value))))

    def unbounded(self, value: float) -> float:
        """Return the place of a value that may lie outside, for figures that clip."""
        return self._place(self._share(value))

    def span(self, low: float, high: float) -> Span:
        """Return the place of an interval, cut at the edges."""
        first, last = min(self.begin, self.end), max(self.begin, self.end)
        begin, end = sorted((self.at(low), self.at(high)))
        return Span(max(first, begin), min(last, end), low < self.low, high > self.high)

    def beyond(self, value: float) -> bool:
        """Return whether a value lies outside."""
        return value > self.high or value < self.low

    def ticks(self, most: int = 4) -> tuple[Tick, ...]:
        values, step = nice_ticks(self.low, self.high, most)
        return tuple((self.at(value), tick_text(value, step)) for value in values)

    def _share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    def _place(self, share: float) -> float:
        return round(self.begin + share * (self.end - self.begin), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Where a name stands. anchor: start, middle or end."""

    x: float
    y: float
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A configuration in a panel: values before it is placed, units of the panel afterwards."""

    name: str
    tip: str  # what a pointer that rests on it shows
    colour: str
    group: int
    x: float
    y: float
    low: float | None = None  # interval of y; None: a single seed
    high: float | None = None
    left: float | None = None  # lowest and highest x of its runs
    right: float | None = None
    front: bool = False
    label: Label | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A figure with two axes, in units of its viewBox. The macro `frame` of _marks.html.j2 draws its axes."""

    title: str = ""
    x_label: str = ""
    y_label: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    points: tuple[Point, ...] = ()
    front: str = ""  # of a polyline
    omitted: int = 0  # points beyond the figure


def polyline(places: Iterable[Place]) -> str:
    """Return the points attribute of a polyline or a polygon."""
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def pareto(title: str, x_label: str, y_label: str, points: Sequence[Point], names: int = 8) -> Panel | None:
    """Return a loss over a cost, the lower the better, with the front: what no other configuration beats in both.

    Points that are far off in loss are left out and counted. names: labels, if there are more points than that.
    Returns None for fewer than two points.
    """
    if len(points) < 2:
        return None
    halves = [(point.high - point.low) / 2 for point in points if point.low is not None and point.high is not None]
    limit = far_off([point.y for point in points], halves)
    inside = [point for point in points if point.y <= limit]
    empty = Panel(title=title, x_label=x_label, y_label=y_label, omitted=len(points) - len(inside))
    x = Scale(*_cost_range(inside), empty.left, empty.right)
    y = Scale(*_loss_range(inside), empty.bottom, empty.top)
    best = pareto_front([(point.x, point.y) for point in inside])
    placed = [_placed(point, x, y, front=at in best) for at, point in enumerate(inside)]
    corners = [(x.at(inside[at].x), y.at(inside[at].y)) for at in best]
    panel = replace(empty, x_ticks=x.ticks(4), y_ticks=y.ticks(5), front=polyline(_stairs(corners)))
    # In a crowd only the front has names: other names would be next to points of others.
    most = names if len(placed) <= CROWD else len(best)
    return replace(panel, points=tuple(with_labels(panel, placed, most)))


def pareto_front(places: Sequence[Place]) -> list[int]:
    """Return the indices of the places that no other one beats (cost and loss, the lower the better), by cost.

    A lower loss beats a place also if it costs up to SAME_COST times as much: no one would pay for such a difference.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    costs = [places[at][0] for at in order]
    best = list(accumulate((places[at][1] for at in order), min))  # lowest loss up to each cost
    found: list[int] = []
    for at in order:
        cost, loss = places[at]
        affordable = bisect_right(costs, cost * SAME_COST)
        if loss <= best[affordable - 1] and (not found or loss < places[found[-1]][1]):
            found.append(at)
    return found


def with_labels(panel: Panel, points: Sequence[Point], most: int) -> list[Point]:
    """Return points with labels: those of the front, and others while there is room; no two labels overlap."""
    areas = [_area_of(point) for point in points]
    whiskers = [area for point in points for area in _whiskers(point)]
    taken = list(areas)
    order = sorted(range(len(points)), key=lambda at: not points[at].front)
    found = list(points)
    for at in order[: most if len(points) > most else None]:
        # A name across the interval of a point is better than none.
        spots = [spot for spot in _spots(points[at]) if _is_inside(spot[1], panel)]
        clear = [spot for spot in spots if not any(_overlap(spot[1], one) for one in whiskers)]
        for label, area in (*clear, *spots):
            if not any(_overlap(area, other) for other in taken if other != areas[at]):
                taken.append(area)
                found[at] = replace(points[at], label=label)
                break
    return found


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near the wanted ones, in the same order, at least `gap` apart, between low and high."""
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    placed = [0.0] * len(wanted)
    last = -math.inf
    for at in order:
        placed[at] = last = max(wanted[at], last + gap)
    limit = high
    for at in reversed(order):
        placed[at] = min(placed[at], limit)
        limit = placed[at] - gap
    return [max(low, place) for place in placed]


Area = tuple[float, float, float, float]  # left, top, right, bottom


def _placed(point: Point, x: Scale, y: Scale, *, front: bool) -> Point:
    return replace(
        point,
        x=x.at(point.x),
        y=y.at(point.y),
        low=None if point.low is None else y.at(point.low),
        high=None if point.high is None else y.at(point.high),
        left=None if point.left is None else x.at(point.left),
        right=None if point.right is None else x.at(point.right),
        front=front,
    )


def _cost_range(points: Sequence[Point]) -> tuple[float, float]:
    """Return the range of a cost axis: not from 0, but at least a quarter of the cost, so that 68.4 looks like 68.9."""
    known = [value for point in points for value in (point.x, point.left, point.right) if value is not None]
    middle, least = (min(known) + max(known)) / 2, 0.25 * max(known)
    return padded([*known, middle - least / 2, middle + least / 2])


def _loss_range(points: Sequence[Point]) -> tuple[float, float]:
    """Return the range of a loss axis. An interval of two seeds can be enormous: it is cut, and squeezes nothing."""
    losses = [point.y for point in points]
    values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    spread = max(losses) - min(losses)
    low, high = min(losses) - 0.6 * spread, max(losses) + 0.6 * spread
    return padded([min(max(value, low), high) for value in values] if spread else values, 0.1)


def _stairs(corners: Sequence[Place]) -> list[Place]:
    """Return a line that falls only at the corners: between two, the loss of the cheaper one is the best."""
    line: list[Place] = list(corners[:1])
    for x, y in corners[1:]:
        line += [(x, line[-1][1]), (x, y)]
    return line


def _area_of(point: Point) -> Area:
    return (point.x - POINT, point.y - POINT, point.x + POINT, point.y + POINT)


def _whiskers(point: Point) -> Iterable[Area]:
    """Yield the places of the lines of a point's interval and range."""
    if point.low is not None and point.high is not None:
        low, high = sorted((point.low, point.high))  # the vertical axis points down
        yield (point.x - 1, low, point.x + 1, high)
    if point.left is not None and point.right is not None and point.right - point.left > SHORTEST_RANGE:
        yield (point.left, point.y - 1, point.right, point.y + 1)


def _spots(point: Point) -> Iterable[tuple[Label, Area]]:
    """Yield the places where the name of a point may stand, best first, each with its area."""
    wide = LETTER * len(point.name)
    shift = {"start": 0.0, "middle": wide / 2, "end": wide}
    beside = ((8, 4, "start"), (-8, 4, "end"), (0, -9, "middle"), (0, 18, "middle"))
    corners = ((8, -8, "start"), (-8, -8, "end"), (8, 15, "start"), (-8, 15, "end"))
    for dx, dy, anchor in (*beside, *corners):
        left = point.x + dx - shift[anchor]
        area = (left, point.y + dy - LINE + 3, left + wide, point.y + dy + 3)
        yield Label(x=round(point.x + dx, 2), y=round(point.y + dy, 2), anchor=anchor), area


def _is_inside(area: Area, panel: Panel) -> bool:
    return area[0] >= panel.left and area[2] <= panel.right + 12 and area[1] >= 0 and area[3] <= panel.bottom


def _overlap(a: Area, b: Area) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
