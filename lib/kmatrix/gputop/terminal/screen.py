"""Render a view as lines of text: a pure function of the view, the width and the height."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len
from rich.text import Text

from kmatrix.gpu.balance import cv_text
from kmatrix.gpu.formats.samples import SIMULATED, aggregate
from kmatrix.gputop.terminal.glyphs import (
    UNICODE,
    Glyphs,
    bar,
    cell,
    chart,
    cut,
    flow,
    number,
    share,
    sparkline,
    styled,
)
from kmatrix.gputop.terminal.pages import page
from kmatrix.gputop.terminal.process_table import LEAST, detail_lines, host_line, process_table, run_line
from kmatrix.gputop.view import SPARKS, UNITS, DeviceRow, Metric, View, balance, value_of
from kmatrix.status.alerts import Severity, Thresholds, one_line
from kmatrix.text import UNKNOWN, duration, memory_size, plural, wrap

GIB = 1024.0  # MiB
MIB = 2**20  # bytes
HOT = 100.0  # degrees C: a full bar
NEAR = 0.95  # of the limit of an alert: yellow
OLD_S = 2.0  # age of values that is worth a column: drivers change some at least once per second
# The last line of the screen.
KEYS = "q quit  h help  up/down select  a alerts  c charts  l large  m metric"
REPLAY_KEYS = "space pause  left/right 10 s  [ ] 60 s  0 start  e end"
MAX_ALERTS = 3  # lines
MAX_RUNS = 3  # lines about the progress of runs
MAX_DETAILS = 3  # lines about the selected GPU
MOST_KEPT = 4  # processes that have room before the last rows of a long table of GPUs
# Why no charts are below the table: whether they have room instead of it.
NO_CHARTS = {True: "no room for charts: l shows them alone", False: "no room for charts: enlarge the terminal"}
MIN_CHART = 4  # lines: a title and three lines of chart
CHART_WIDTH = 24  # columns: minimum width of a chart, if the terminal is wide enough


DEFAULTS = Thresholds()


MISSING = {"lost": "bold red", "not running": "dim"}  # reason of a row without values -> style


EXTRA = (  # title, width, priority, form and names of ExtraMetrics
    ("SM", 4, 10, "{}%", ("sm_active",)),
    ("tensor", 6, 10, "{}%", ("tensor_active",)),
    ("DRAM", 4, 11, "{}%", ("dram_active",)),
    ("ECC", 4, 12, "{}", ("ecc_uncorrected",)),
    ("XID", 4, 12, "{}", ("xid",)),
    ("HBM", 4, 13, "{}C", ("memory_temperature",)),
    ("fan", 4, 15, "{}%", ("fan",)),
    ("PCIe MiB/s", 11, 16, "{}/{}", ("pcie_tx", "pcie_rx")),
    ("NVLink MiB/s", 13, 17, "{}/{}", ("nvlink_tx", "nvlink_rx")),
)
DEFECTS = ("ecc_uncorrected", "xid")  # in red


LETTERS = {  # one letter per throttle reason
    "power cap": "P",
    "hardware slowdown": "H",
    "heat (software)": "T",
    "heat (hardware)": "T",
    "power brake": "B",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenColumn:
    """One column of the table. Widths are columns of the terminal."""

    title: str
    least: int  # minimum width
    priority: int  # 0: always shown; columns with the highest number are dropped first
    text: Callable[[DeviceRow, int, Glyphs], Text]
    good: int = 0  # preferred width
    most: int = 0  # maximum width


def render(view: View, *, width: int, height: int | None = None, glyphs: Glyphs = UNICODE) -> list[Text]:
    """Return the lines of the screen: at most `height` lines of at most `width` columns.

    `height`: None for as many lines as the table needs, without charts and keys.
    """
    if width <= 0 or (height is not None and height <= 0):
        return []
    # In this order of importance: header and alerts, the rows of GPUs, totals, keys, charts.
    room = height if height is not None else len(view.rows) + 12
    if view.page and height is not None:
        return page(view, width, height)
    lines = [*_header(view, width), *_alerts(view, width)][: max(1, room - 2)]
    least = 1 if room - len(lines) > 2 else 0  # line of totals: rows of GPUs have priority
    foot = _totals(view, width)[: max(least, room - len(lines) - len(view.rows) - 1)]
    has_keys = height is not None and room - len(lines) - len(foot) >= 4
    left = room - len(lines) - len(foot) - has_keys
    # A long table scrolls, so that what is below it has room: processes, and a blank line and charts.
    below = max(left // 2, left - len(view.rows) - 1)
    wanted = (view.large or view.charts) and height is not None and bool(view.rows)
    has_charts = wanted and (left if view.large else below - 1) >= MIN_CHART
    no_charts = NO_CHARTS[left >= MIN_CHART] if wanted and not has_charts else ""
    keys = _keys(view, width, no_charts) if has_keys else []
    # What is left: charts alone if they were requested, otherwise the table with charts below it.
    if view.large and has_charts:
        return lines + _charts(view, width, left, glyphs) + foot + keys
    processes = view.processes or ()
    least_charts = MIN_CHART if has_charts else 0
    has_list = bool(processes) and height is not None and below - has_charts - least_charts > LEAST
    kept = has_charts + least_charts + (LEAST + min(len(processes), MOST_KEPT) if has_list else 0)
    table = _table(view, width, left - min(below, kept), glyphs)
    spare = left - len(table) - 1
    details = _details(view, width)[: max(0, spare - kept)] if height is not None else []
    spare -= len(details)
    listed: list[Text] = []
    if view.processes is not None and (height is None or spare - least_charts > LEAST):
        most = len(processes) + LEAST if height is None else spare - least_charts - 1
        listed = process_table(processes, width, most)
        listed = [Text(), *listed] if listed else []
    elif view.no_processes and view.processes is None and (height is None or spare - least_charts > 1):
        listed = [Text(), cut(view.no_processes, width, "dim")]
    spare -= len(listed)
    charts = _charts(view, width, spare, glyphs) if has_charts else []
    # Blank lines push the keys to the last line of the terminal.
    gap = [Text()] * (left - len(table) - len(details) - len(listed) - len(charts)) if keys else []
    return [*lines, *table, *foot, *details, *listed, *gap[:1], *charts, *gap[1:], *keys]


def plain(lines: Sequence[Text]) -> str:
    """Return the lines as plain text, without trailing spaces."""
    return "".join(line.plain.rstrip() + "\n" for line in lines)


def columns_for(rows: Sequence[DeviceRow], width: int, limits: Thresholds = DEFAULTS) -> list[tuple[ScreenColumn, int]]:
    """Return the columns that fit, in screen order and with their widths, separated by one space."""
    # Choose columns by priority, at their minimum width.
    chosen: list[ScreenColumn] = []
    for column in sorted(_columns(rows, limits), key=lambda column: column.priority):
        if sum(one.least for one in chosen) + len(chosen) + column.least <= width:
            chosen.append(column)
        elif column.priority == 0:
            return [(column, width)]
    # Give each its preferred width, in order of priority; share the rest evenly, up to the maximum widths.
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
    return [(column, sized[column.title]) for column in _columns(rows, limits) if column.title in sized]


def _columns(rows: Sequence[DeviceRow], limits: Thresholds) -> tuple[ScreenColumn, ...]:
    """Return all columns in screen order. Name and run are columns only if the GPUs differ in them."""
    digits = max((len(str(row.sample.gpu_index)) for row in rows), default=1)
    names = {row.sample.gpu_name for row in rows}
    runs = _runs(rows)
    # Equal names would fill the screen: they are in the header instead.
    run = ScreenColumn(title="run", least=8, most=min(40, max(map(len, runs), default=0)), priority=8, text=_run)
    name = ScreenColumn(title="name", least=12, most=min(40, max(map(len, names), default=0)), priority=9, text=_name)
    return (
        ScreenColumn(title="GPU", least=max(3, digits), priority=0, text=_index),
        ScreenColumn(title="rank", least=4, priority=6, text=_rank),
        *([run] if len(runs) > 1 else []),
        *([name] if len(names) > 1 else []),
        ScreenColumn(title="util", least=4, good=12, most=25, priority=1, text=partial(_utilization, limits)),
        ScreenColumn(title="mem GiB", least=11, good=18, most=32, priority=2, text=partial(_memory, limits)),
        ScreenColumn(title="W/limit", least=8, most=24, priority=3, text=_power),
        ScreenColumn(title="temp", least=4, priority=4, text=partial(_temperature, limits)),
        ScreenColumn(title="SM MHz", least=6, priority=8, text=_clock),
        ScreenColumn(title="throt", least=5, most=10, priority=7, text=_throttle),
        *_extra_columns(rows),
        ScreenColumn(title="new", least=6, priority=8, text=_age),
        ScreenColumn(title="last 2 min", least=len("last 2 min"), most=SPARKS, priority=5, text=_spark),
    )


def _header(view: View, width: int) -> list[Text]:
    samples = [row.sample for row in view.rows]
    parts = [Text("gputop", style="bold")]
    if view.simulated or any(sample.simulated for sample in samples):
        parts.append(Text("SIMULATED", style="bold black on yellow"))
    parts.append(styled(f"{view.mode} {view.clock}", "bold yellow" if view.mode == "paused" else "cyan"))
    if titles := [view.title] if view.title else _runs(view.rows):
        parts.append(styled(", ".join(titles) if len(titles) < 3 else f"{len(titles)} runs"))
    names = {sample.gpu_name.removesuffix(SIMULATED).strip() for sample in samples}
    count = plural(len(samples), view.noun)
    parts.append(styled(f"{count} {names.pop()}" if len(names) == 1 else count))
    if view.driver:
        parts.append(styled(view.driver, "dim"))
    lines = flow(parts, width, 3)
    lines += [cut(host_line(view.host), width)] if view.host else []
    lines += [cut(run_line(run), width, "cyan") for run in view.progress[:MAX_RUNS]]
    for notice in view.notices:
        lines += [cut(part, width, "yellow") for part in wrap(notice, width=width)]  # its hint must be readable
    return lines


def _runs(rows: Sequence[DeviceRow]) -> list[str]:
    """Return the distinct runs on these GPUs."""
    return list(dict.fromkeys(row.run for row in rows if row.run))


def _alerts(view: View, width: int) -> list[Text]:
    """Return the first alerts, with their advice if it fits, and the number of further alerts."""
    lines = []
    for alert in view.alerts[:MAX_ALERTS]:
        text = f"! {one_line(alert)}"
        text = text if cell_len(text) <= width else f"! {alert.text}"
        lines.append(styled(text, "bold red" if alert.severity is Severity.CRITICAL else "yellow"))
    if more := len(view.alerts) - MAX_ALERTS:
        lines += [styled(f"! and {more} more: key a", "yellow")] if more > 0 else []
    for line in lines:
        line.truncate(width)
    return lines


def _details(view: View, width: int) -> list[Text]:
    """Return the lines about the selected GPU."""
    if not view.rows:
        return []
    row = view.rows[view.position]
    parts = [styled(part) for part in detail_lines(row)]
    name = styled(f"{view.noun} {row.sample.gpu_index}", "bold")
    return flow([name, *parts], width, MAX_DETAILS) if parts else []


def _table(view: View, width: int, room: int, glyphs: Glyphs) -> list[Text]:
    """Return titles and rows. If not all rows fit, show those around the selected one."""
    if room <= 0:
        return []
    columns = columns_for(view.rows, width, view.limits)
    # Titles also if not all rows fit: numbers need their names. In two lines, two rows have priority.
    has_titles = bool(view.rows) and room > min(len(view.rows), 2)
    lines = [_join([cell(column.title, has, "dim") for column, has in columns])] if has_titles else []
    room -= len(lines)
    first, last = _window(len(view.rows), view.position, room if len(view.rows) <= room else room - 1)
    for row in view.rows[first:last]:
        line = _join([column.text(row, has, glyphs) for column, has in columns])
        if row.sample.gpu_index == view.selected:
            line.stylize("reverse", 0, len(str(row.sample.gpu_index)) + 1)
        lines.append(line)
    if last - first < len(view.rows) and last - first < room:
        lines.append(_join([cell(f"rows {first + 1}-{last} of {len(view.rows)}: up/down scrolls", width, "dim")]))
    return lines


def _window(count: int, position: int, room: int) -> tuple[int, int]:
    """Return the range of `count` items to show in `room` lines, including the selected one."""
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
    used, whole = (
        None if mib is None else mib * MIB for mib in (total["total_memory_used"], total["total_memory_total"])
    )
    parts = [
        Text("total", style="bold"),
        styled(f"util {number(total['average_utilization'], '%')}"),
        styled(f"mem {memory_size(used, whole)}"),
        styled(f"power {number(total['total_power'], ' W')}"),
        styled(f"max {number(total['max_temperature'], ' C')}"),
    ]
    for reason, style in MISSING.items():
        if count := sum(row.missing == reason for row in view.rows):
            parts.append(styled(f"{count} {reason}", style))
    # The metrics of which the report states the balance.
    balances = [Text("balance", style="bold")]
    for metric in (Metric.MEMORY, Metric.UTILIZATION, Metric.POWER):
        even = balance(samples, metric)
        text = "n/a" if even is None else f"CV {cv_text(even.cv)} {even.quality}"
        balances.append(styled(f"{metric} {text}", "red" if even and even.quality == "Poor" else ""))
    return flow(parts, width, 3) + flow(balances, width, 3)


def _charts(view: View, width: int, room: int, glyphs: Glyphs) -> list[Text]:
    """Return charts of the selected metric, side by side, including the selected GPU."""
    if not view.rows:
        return []
    # As many side by side as fit, then fewer again so that the rows of charts are filled evenly.
    across = max(1, min(len(view.rows), (width + 1) // (CHART_WIDTH + 1)))
    down = max(1, min(room // MIN_CHART, -(-len(view.rows) // across)))
    across = min(across, -(-len(view.rows) // down))
    first, last = _window(len(view.rows), view.position, across * down)
    wide, tall = max(1, (width - across + 1) // across), room // down
    shown, lines = view.rows[first:last], []
    for start in range(0, len(shown), across):
        blocks = [_chart(row, view, wide, tall, glyphs) for row in shown[start : start + across]]
        lines += [_join(parts) for parts in zip(*blocks, strict=True)]
    for line in lines:
        line.truncate(width)
    return lines


def _chart(row: DeviceRow, view: View, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Return the title and the chart of one GPU, each line `width` columns."""
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
    # A chart that is wider than the history repeats values: resampling would leave the left part blank.
    stretched = [history[i * len(history) // width] for i in range(width)] if 0 < len(history) < width else history
    return [title, *(cell(line, width, "cyan") for line in chart(stretched, ceiling, width, height - 1, glyphs))]


def ceiling_of(row: DeviceRow, metric: Metric, rows: Sequence[DeviceRow]) -> float | None:
    """Return the value of a full bar: the limit of the metric, else the maximum on the screen."""
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


def _keys(view: View, width: int, notice: str) -> list[Text]:
    """Return the last line: a notice about the screen, else the keys."""
    if notice:
        return [cell(notice, width, "yellow")]
    return [cell(f"{KEYS}  {REPLAY_KEYS}" if view.mode in ("replay", "paused") else KEYS, width, "dim")]


def _index(row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    return cell(str(row.sample.gpu_index), width, MISSING.get(row.missing, "bold"))


def _rank(row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    return cell(number(row.rank), width, right=True)


def _run(row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    return cell(row.run or "-", width)


def _name(row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    return cell(row.sample.gpu_name, width)


def _with_bar(text: str, part: float | None, width: int, style: str, glyphs: Glyphs) -> Text:
    """Return a number, with a bar before it if there are at least four columns for one."""
    room = width - len(text) - 1
    if room < 4:
        return cell(text, width, style, right=True)
    return _join([cell(bar(part, room, glyphs), room, style), cell(text, len(text), style, right=True)])


def _utilization(limits: Thresholds, row: DeviceRow, width: int, glyphs: Glyphs) -> Text:
    if row.missing:
        return cell(row.missing, width, MISSING[row.missing], right=True)
    part = share(row.sample.utilization, 100.0)
    low = limits.gpu_utilization and part is not None and 100 * part < limits.gpu_utilization
    style = "yellow" if low else "green" if part else "dim"
    return _with_bar(number(row.sample.utilization, "%").rjust(4), part, width, style, glyphs)


def _spark(row: DeviceRow, width: int, glyphs: Glyphs) -> Text:
    return cell(sparkline(row.sparks, 100.0, width, glyphs), width, right=True)


def _heat(value: float | None, limit: float) -> str:
    """Return the style of a value with an upper limit, of an alert; 0: no limit."""
    if value is None:
        return "dim"
    if not limit or value < NEAR * limit:
        return "green"
    return "red" if value >= limit else "yellow"


def _memory(limits: Thresholds, row: DeviceRow, width: int, glyphs: Glyphs) -> Text:
    part = share(row.sample.memory_used, row.sample.memory_total)
    # Only the limit itself counts: a GPU that is nearly full is used well.
    full = bool(limits.vram) and (row.sample.memory_percent or 0.0) >= limits.vram
    style = "dim" if part is None else "red" if full else "green"
    text = f"{_gib(row.sample.memory_used)}/{_gib(row.sample.memory_total)}".rjust(11)
    return _with_bar(text, part, width, style, glyphs)


def _power(row: DeviceRow, width: int, glyphs: Glyphs) -> Text:
    part = share(row.sample.power, row.sample.power_limit)
    return _with_bar(
        f"{number(row.sample.power)}/{number(row.sample.power_limit)}".rjust(8),
        part,
        width,
        "dim" if part is None else "green",  # a GPU at its limit is used well
        glyphs,
    )


def _temperature(limits: Thresholds, row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    style = _heat(row.sample.temperature, limits.temperature)
    return cell(number(row.sample.temperature, "C"), width, style, right=True)


def _clock(row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    return cell(number(row.sample.sm_clock), width, right=True)


def _throttle(row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    if row.throttle is None:
        return cell("-", width, "dim")
    # Without repetitions: both kinds of heat have the same letter.
    return cell("".join(dict.fromkeys(LETTERS.get(reason, reason[:1]) for reason in row.throttle)), width, "bold red")


def _age(row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    old = row.age is not None and row.age >= OLD_S
    return cell(duration(row.age) if old else "", width, "red" if row.age and row.age > 5 else "", right=True)


def _extra_columns(rows: Sequence[DeviceRow]) -> list[ScreenColumn]:
    """Return the columns of the expensive metrics that a GPU has: the first ones dropped on a narrow terminal."""
    known = {name for row in rows for name, _ in row.sample.extra}
    return [
        ScreenColumn(title=title, least=width, priority=priority, text=partial(_extra, form, names))
        for title, width, priority, form, names in EXTRA
        if any(name in known for name in names)
    ]


def _extra(form: str, names: Sequence[str], row: DeviceRow, width: int, _glyphs: Glyphs) -> Text:
    extra = dict(row.sample.extra)
    values = [number(extra.get(name)) for name in names]
    bad = any(extra.get(name) for name in names if name in DEFECTS)
    text = UNKNOWN if all(value == UNKNOWN for value in values) else form.format(*values)
    return cell(text, width, "bold red" if bad else "", right=True)


def _gib(mib: float | None) -> str:
    """Return a number of GiB without the unit, which is in the title of the column."""
    return number(None if mib is None else mib / GIB, digits=1)
