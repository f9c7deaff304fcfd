"""One screen from one view: a pure function of the values, the width and the height."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from kmatrix.alerts import Severity
from kmatrix.gpu.formats import SIMULATED, aggregate
from kmatrix.gpu.top.ink import (
    UNICODE,
    Glyphs,
    bar,
    cell,
    chart,
    flow,
    heat,
    number,
    printable,
    seconds,
    share,
    sparkline,
)
from kmatrix.gpu.top.values import UNITS, Metric, Row, View, balance, value_of
from kmatrix.stats import cv_text

GIB = 1024.0  # MiB
HOT = 100.0  # C: the ceiling of temperatures
KEYS = "q quit  up/down GPU  m metric  l large"
REPLAY_KEYS = "space pause  left/right 10 s  [ ] 60 s  0 start  e end"
MOST_ALERTS = 3  # lines
LEAST_CHART = 4  # lines: a title and three of a chart
CHART_WIDTH = 24  # columns: a chart is at least this wide where the terminal is
LETTERS = {  # a sign for each reason of throttling
    "power cap": "P",
    "hardware slowdown": "H",
    "heat (software)": "T",
    "heat (hardware)": "T",
    "power brake": "B",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the table. Widths in columns of the terminal: `least`, `good` where there is room, `most`.

    priority: 0 is always there; the highest is left out first.
    """

    title: str
    least: int
    priority: int
    text: Callable[[Row, int, Glyphs], Text]
    good: int = 0
    most: int = 0


def render(view: View, *, width: int, height: int | None = None, signs: Glyphs = UNICODE) -> list[Text]:
    """Return the lines of the screen: at most `height`, each at most `width` columns.

    height: None for as many lines as the table needs, without charts and keys.
    """
    if width <= 0 or (height is not None and height <= 0):
        return []
    room = height if height is not None else len(view.rows) + 12
    lines = [*_header(view, width), *_alerts(view, width)][: max(1, room - 2)]
    least = 1 if room - len(lines) > 2 else 0  # of the totals: the GPUs come first
    foot = _totals(view, width)[: max(least, room - len(lines) - len(view.rows) - 1)]
    keys = _keys(view, width) if height is not None and room - len(lines) - len(foot) >= 4 else []
    left = room - len(lines) - len(foot) - len(keys)
    if view.large and height is not None and left >= LEAST_CHART:
        return lines + _charts(view, width, left, signs) + foot + keys
    table = _table(view, width, left, signs)
    spare = left - len(table) - 1
    charts = _charts(view, width, spare, signs) if height is not None and spare >= LEAST_CHART else []
    gap = [Text()] * (left - len(table) - len(charts)) if keys else []
    return [*lines, *table, *foot, *gap[:1], *charts, *gap[1:], *keys]


def plain(lines: Sequence[Text]) -> str:
    """Return the lines without colours and without spaces at their ends."""
    return "".join(line.plain.rstrip() + "\n" for line in lines)


def columns_for(rows: Sequence[Row], width: int) -> list[tuple[Column, int]]:
    """Return the columns that fit, in the order of the screen, each with its width: one space between two."""
    chosen: list[Column] = []
    for column in sorted(_columns(rows), key=lambda column: column.priority):
        if sum(one.least for one in chosen) + len(chosen) + column.least <= width:
            chosen.append(column)
        elif column.priority == 0:
            return [(column, width)]
    widths = [column.least for column in chosen]
    spare = width - sum(widths) - len(chosen) + 1
    for place, column in enumerate(chosen):
        more = min(spare, max(0, column.good - widths[place]))
        widths[place], spare = widths[place] + more, spare - more
    while spare > 0 and any(has < column.most for has, column in zip(widths, chosen, strict=True)):
        for place, column in enumerate(chosen):
            if spare > 0 and widths[place] < column.most:
                widths[place] += 1
                spare -= 1
    sized = dict(zip((column.title for column in chosen), widths, strict=True))
    return [(column, sized[column.title]) for column in _columns(rows) if column.title in sized]


def _columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return every column in the order of the screen; names and runs are one where the GPUs differ in them."""
    digits = max((len(str(row.sample.gpu_index)) for row in rows), default=1)
    names = {row.sample.gpu_name for row in rows}
    runs = _runs(rows)
    run = Column(title="run", least=8, most=min(40, max(map(len, runs), default=0)), priority=8, text=_run)
    name = Column(title="name", least=12, most=min(40, max(map(len, names), default=0)), priority=9, text=_name)
    return (
        Column(title="GPU", least=max(3, digits), priority=0, text=_index),
        Column(title="rank", least=4, priority=6, text=_rank),
        *([run] if len(runs) > 1 else []),
        *([name] if len(names) > 1 else []),
        Column(title="util", least=4, good=12, most=25, priority=1, text=_utilization),
        Column(title="mem GiB", least=11, good=18, most=32, priority=2, text=_memory),
        Column(title="W/limit", least=8, most=24, priority=3, text=_power),
        Column(title="temp", least=4, priority=4, text=_temperature),
        Column(title="SM MHz", least=6, priority=8, text=_clock),
        Column(title="throt", least=5, most=10, priority=7, text=_throttle),
        Column(title="new", least=4, priority=8, text=_age),
        Column(title="last 60 s", least=9, good=20, most=60, priority=5, text=_spark),
    )


def _header(view: View, width: int) -> list[Text]:
    samples = [row.sample for row in view.rows]
    parts = [Text("gputop", style="bold")]
    if any(sample.simulated for sample in samples):
        parts.append(Text("SIMULATED", style="bold black on yellow"))
    parts.append(_whole(f"{view.mode} {view.clock}", "bold yellow" if view.mode == "paused" else "cyan"))
    if titles := [view.title] if view.title else _runs(view.rows):
        parts.append(_whole(", ".join(titles) if len(titles) < 3 else f"{len(titles)} runs"))
    names = {sample.gpu_name.removesuffix(SIMULATED).strip() for sample in samples}
    count = f"{len(samples)} {view.noun}" + ("" if len(samples) == 1 else "s")
    parts.append(_whole(f"{count} {names.pop()}" if len(names) == 1 else count))
    lines = flow(parts, width, 3)
    for notice in view.notices:
        lines.append(_whole(notice, "yellow"))
        lines[-1].truncate(width)
    return lines


def _runs(rows: Sequence[Row]) -> list[str]:
    """Return the runs that have these GPUs, each once."""
    return list(dict.fromkeys(row.run for row in rows if row.run))


def _alerts(view: View, width: int) -> list[Text]:
    """Say what is wrong, the critical first, with what to do where there is room; of many, how many more there are."""
    lines = []
    for alert in view.alerts[:MOST_ALERTS]:
        text = f"! {alert.text}"
        advice = f" ({alert.advice})"
        text += advice if cell_len(text + advice) <= width else ""
        lines.append(_whole(text, "bold red" if alert.severity is Severity.CRITICAL else "yellow"))
    if more := len(view.alerts) - MOST_ALERTS:
        lines += [_whole(f"! and {more} more", "yellow")] if more > 0 else []
    for line in lines:
        line.truncate(width)
    return lines


def _whole(text: str, style: str = "") -> Text:
    """Return a text of its own width, safe to print."""
    return cell(text, cell_len(printable(text)), style)


def _table(view: View, width: int, room: int, signs: Glyphs) -> list[Text]:
    """The titles and the GPUs: around the selected one where they do not all fit."""
    if room <= 0:
        return []
    columns = columns_for(view.rows, width)
    lines = [_join([cell(column.title, has, "dim") for column, has in columns])] if room > len(view.rows) > 0 else []
    room -= len(lines)
    first, last = _window(len(view.rows), view.position, room if len(view.rows) <= room else room - 1)
    for row in view.rows[first:last]:
        line = _join([column.text(row, has, signs) for column, has in columns])
        if row.sample.gpu_index == view.selected:
            line.stylize("reverse", 0, len(str(row.sample.gpu_index)) + 1)
        lines.append(line)
    if last - first < len(view.rows) and len(lines) < room:
        lines.append(
            _join([cell(f"rows {first + 1}-{last} of {len(view.rows)}: up/down for the others", width, "dim")])
        )
    return lines


def _window(count: int, position: int, room: int) -> tuple[int, int]:
    """Return which of `count` things to show in `room` places, with the selected one among them."""
    room = max(1, room)
    first = max(0, min(position - room // 2, count - room))
    return first, min(count, first + room)


def _join(cells: Sequence[Text]) -> Text:
    return Text(" ", end="").join(cells)


def _totals(view: View, width: int) -> list[Text]:
    samples = tuple(row.sample for row in view.rows)
    if not samples:
        return []
    total = aggregate(samples)
    used, whole = total["total_memory_used"], total["total_memory_total"]
    parts = [
        Text("total", style="bold"),
        _whole(f"util {number(total['average_utilization'], '%')}"),
        _whole(f"mem {_gib(used)}/{_gib(whole)} GiB"),
        _whole(f"power {number(total['total_power'], ' W')}"),
        _whole(f"max {number(total['max_temperature'], ' C')}"),
    ]
    lost = sum(not sample.is_known for sample in samples)
    if lost:
        parts.append(_whole(f"{lost} lost", "bold red"))
    words = [Text("balance", style="bold")]
    for metric in (Metric.MEMORY, Metric.UTILIZATION, Metric.POWER):
        even = balance(samples, metric)
        text = "n/a" if even.cv is None else f"CV {cv_text(even.cv)} {even.quality}"
        words.append(_whole(f"{metric} {text}", "red" if even.quality == "Poor" else ""))
    return flow(parts, width, 3) + flow(words, width, 3)


def _charts(view: View, width: int, room: int, signs: Glyphs) -> list[Text]:
    """The chosen metric of each GPU, side by side; the selected one is always among them."""
    if not view.rows:
        return []
    across = max(1, min(len(view.rows), (width + 1) // (CHART_WIDTH + 1)))
    down = max(1, min(room // LEAST_CHART, -(-len(view.rows) // across)))
    across = min(across, -(-len(view.rows) // down))
    first, last = _window(len(view.rows), view.position, across * down)
    wide, tall = max(1, (width - across + 1) // across), room // down
    shown, lines = view.rows[first:last], []
    for start in range(0, len(shown), across):
        blocks = [_chart(row, view, wide, tall, signs) for row in shown[start : start + across]]
        lines += [_join(parts) for parts in zip(*blocks, strict=True)]
    for line in lines:
        line.truncate(width)
    return lines


def _chart(row: Row, view: View, width: int, height: int, signs: Glyphs) -> list[Text]:
    """A title and the last minute of one GPU, each line `width` columns."""
    metric = view.metric
    history = row.history.get(metric, ())
    ceiling = ceiling_of(row, metric, view.rows)
    value = number(value_of(row.sample, metric), f" {UNITS[metric]}")
    rank = "" if row.rank is None else f" rank {row.rank}"
    title = cell(
        f"GPU {row.sample.gpu_index}{rank} {metric} {value} of {number(ceiling)}",
        width,
        "reverse" if row.sample.gpu_index == view.selected else "bold",
    )
    per_column = max(1, len(history))
    stretched = [history[i * per_column // width] for i in range(width)] if 0 < len(history) < width else history
    return [title, *(cell(line, width, "cyan") for line in chart(stretched, ceiling, width, height - 1, signs))]


def ceiling_of(row: Row, metric: Metric, rows: Sequence[Row]) -> float | None:
    """Return what a full bar of a metric stands for: a limit where there is one, else the most on the screen."""
    sample = row.sample
    limit = {
        Metric.UTILIZATION: 100.0,
        Metric.MEMORY: sample.memory_total,
        Metric.POWER: sample.power_limit,
        Metric.TEMPERATURE: HOT,
        Metric.CLOCK: None,
    }[metric]
    if limit:
        return limit
    seen = [value for one in rows for value in one.history.get(metric, ()) if value is not None]
    seen += [value for one in rows if (value := value_of(one.sample, metric)) is not None]
    return max(seen, default=None)


def _keys(view: View, width: int) -> list[Text]:
    return [cell(f"{KEYS}  {REPLAY_KEYS}" if view.mode in ("replay", "paused") else KEYS, width, "dim")]


def _index(row: Row, width: int, _signs: Glyphs) -> Text:
    return cell(str(row.sample.gpu_index), width, "bold red" if not row.sample.is_known else "bold")


def _rank(row: Row, width: int, _signs: Glyphs) -> Text:
    return cell(number(row.rank), width, right=True)


def _run(row: Row, width: int, _signs: Glyphs) -> Text:
    return cell(row.run or "-", width)


def _name(row: Row, width: int, _signs: Glyphs) -> Text:
    return cell(row.sample.gpu_name, width)


def _with_bar(text: str, part: float | None, width: int, style: str, signs: Glyphs) -> Text:
    """A number, and a bar beside it where there are at least four columns for one."""
    room = width - len(text) - 1
    if room < 4:
        return cell(text, width, style, right=True)
    return _join([cell(bar(part, room, signs), room, style), cell(text, len(text), style, right=True)])


def _utilization(row: Row, width: int, signs: Glyphs) -> Text:
    if not row.sample.is_known:
        return cell("lost", width, "bold red", right=True)
    part = share(row.sample.utilization, 100.0)
    return _with_bar(number(row.sample.utilization, "%").rjust(4), part, width, "green" if part else "dim", signs)


def _spark(row: Row, width: int, signs: Glyphs) -> Text:
    return cell(sparkline(row.history.get(Metric.UTILIZATION, ()), 100.0, width, signs), width, "cyan", right=True)


def _memory(row: Row, width: int, signs: Glyphs) -> Text:
    part = share(row.sample.memory_used, row.sample.memory_total)
    text = f"{_gib(row.sample.memory_used)}/{_gib(row.sample.memory_total)}".rjust(11)
    return _with_bar(text, part, width, heat(part), signs)


def _power(row: Row, width: int, signs: Glyphs) -> Text:
    part = share(row.sample.power, row.sample.power_limit)
    return _with_bar(
        f"{number(row.sample.power)}/{number(row.sample.power_limit)}".rjust(8), part, width, heat(part), signs
    )


def _temperature(row: Row, width: int, _signs: Glyphs) -> Text:
    return cell(number(row.sample.temperature, "C"), width, heat(share(row.sample.temperature, HOT)), right=True)


def _clock(row: Row, width: int, _signs: Glyphs) -> Text:
    return cell(number(row.sample.sm_clock), width, right=True)


def _throttle(row: Row, width: int, _signs: Glyphs) -> Text:
    if row.throttle is None:
        return cell("-", width, "dim")
    return cell("".join(dict.fromkeys(LETTERS.get(reason, reason[:1]) for reason in row.throttle)), width, "bold red")


def _age(row: Row, width: int, _signs: Glyphs) -> Text:
    return cell(seconds(row.age), width, "red" if row.age is not None and row.age > 5 else "", right=True)


def _gib(mib: float | None) -> str:
    return number(None if mib is None else mib / GIB, digits=1)
