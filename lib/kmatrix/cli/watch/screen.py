"""A matrix as lines of text, as `make status` shows them: a headline, the tables of runs and GPUs, and notes."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kmatrix.cli.watch.jobs import counts as job_counts
from kmatrix.cli.watch.jobs import place, run_status, silence, waits
from kmatrix.records.runs import Status
from kmatrix.records.tracking import first_of_each, pending_messages
from kmatrix.status.live import GpuView
from kmatrix.status.view import TO_COME, MatrixView, RunView
from kmatrix.status.wanted import NOT_NEEDED
from kmatrix.text import (
    UNKNOWN,
    Column,
    count,
    duration,
    make_command,
    memory_size,
    money,
    plural,
    printable,
    table,
    time_of_day,
    wrap,
)

if TYPE_CHECKING:
    from rich.text import Text


COLOURS = {
    Status.RUNNING: "cyan",
    Status.FINISHED: "green",
    Status.FAILED: "red",
    Status.STOPPED: "yellow",
    Status.SKIPPED: "yellow",
}
FEWEST_RUNS = 3  # rows that are reserved for runs
RUNS = (
    Column(title="run", words=True),
    Column(title="status", words=True),
    Column(title="step", worth=11),
    Column(title="done", worth=4),
    Column(title="loss", worth=9),
    Column(title="val", worth=7),
    Column(title="tok/s", worth=8),
    Column(title="MFU", worth=6),
    Column(title="on", worth=5),
    Column(title="memory", worth=3),
    Column(title="time", worth=2),
    Column(title="left", worth=10),
)
GPUS = (
    Column(title="GPU", words=True),
    Column(title="run", words=True),
    Column(title="util", worth=4),
    Column(title="memory", worth=3),
    Column(title="power", worth=1),
    Column(title="temp", worth=2),
)
# Which runs are shown if not all fit: first those that need attention.
URGENCY = (Status.RUNNING, Status.FAILED, Status.STOPPED, Status.PLANNED, Status.SKIPPED, Status.FINISHED)


def plain(view: MatrixView, width: int | None = None) -> list[str]:
    """Return the view as plain lines: a headline, the tables, and notes on single runs."""
    return [line.text for line in screen(view, width=width)]


def drawn(lines: list[Line]) -> Text:
    """Return the lines for a terminal, in colours unless NO_COLOR is set."""
    from rich.text import Text

    lines = [replace(line, text=printable(line.text).replace("\n", " ")) for line in lines]
    text = Text("\n".join(line.text for line in lines), no_wrap=True, overflow="ellipsis")
    start = 0
    for line in lines if not colourless() else ():
        begin, end = line.part or (0, len(line.text))
        style = "bold" if line.head else COLOURS.get(line.about, "") if line.about else ""
        if style:
            text.stylize(style, start + begin, start + end)
        start += len(line.text) + 1
    return text


def colourless() -> bool:
    """Return whether NO_COLOR disables colors (no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the screen."""

    text: str
    about: Status | None = None  # status that decides the color
    head: bool = False  # a title
    part: tuple[int, int] | None = None  # colored columns, from and until; None: the whole line


def screen(view: MatrixView, *, width: int | None = None, height: int | None = None) -> list[Line]:
    """Return the lines of a matrix. width: columns, height: lines; None for as many as are needed."""
    head = [Line(text, head=True) for text in headline(view, width)]
    if text := silence(view):
        head += [Line(line, Status.FAILED) for line in wrap(text, width=width)]
    # A command stays on one line, to be copied, which the terminal wraps; a live screen has no room for that.
    whole = height is None
    below = [
        Line(text, about)
        for about, words in notes(view)
        for text in wrap(words, width=None if whole and "make " in words else width)
    ]
    if height is None:
        return [*head, *run_lines(view, view.runs, width), *gpu_lines(view, width), *below]
    # If not everything fits: the GPUs become one line, then notes are cut to a third, then runs are left out.
    room = max(FEWEST_RUNS, height - len(head) - 1)
    gpus = gpu_lines(view, width)
    wanted = min(len(view.runs), max(FEWEST_RUNS, sum(run.status is Status.RUNNING for run in view.runs)))
    if wanted + len(gpus) + min(len(below), room // 3) > room:
        gpus = [Line(_gpu_counts(view))] if view.gpus else []
    below = _cut(below, max(2, room - len(gpus) - len(view.runs), (room - len(gpus)) // 3))
    shown = most_urgent(view.runs, max(1, room - len(gpus) - len(below)))
    if hidden := len(view.runs) - len(shown):
        shown = most_urgent(view.runs, max(1, room - len(gpus) - len(below) - 1))  # 1: the line about hidden runs
        hidden = len(view.runs) - len(shown)
        below.insert(0, Line(f"and {plural(hidden, 'more run')}"))
    return [*head, *run_lines(view, shown, width), *gpus, *below][:height]


def headline(view: MatrixView, width: int | None = None) -> list[str]:
    """Return `test_matrix_results_...: running, 1 finished, 2 planned, left 1:02:03, until 14:05, cost $1.20 of $4.00`.

    If that is too long, name and status have a line of their own.
    """
    parts = [*run_counts(view), *job_counts(view)]
    status = "queued" if view.waiting and not view.running else str(view.status)
    if view.running and view.left_s is not None and view.ends is not None:
        parts += [f"left {duration(view.left_s)}", f"until {time_of_day(view.ends)}"]
    parts += [_cost(view)] if view.dollars is not None else []
    whole = f"{view.name}: {', '.join([status, *parts])}"
    if width is None or len(whole) <= width:
        return [whole]
    return [f"{view.name}: {status}", *wrap(", ".join(parts), "  ", width)]


def run_counts(view: MatrixView) -> list[str]:
    """Return `12 finished`, `3 planned` and `5 in reserve`."""
    reserve = Counter(run.status.value for run in view.runs if run.reserve)
    shown_counts = {name: number - reserve[name] for name, number in view.counts.items()}
    parts = [f"{number} {name}" for name, number in shown_counts.items() if number]
    return parts + ([f"{reserve.total()} in reserve"] if reserve else [])


def reserve_notes(view: MatrixView) -> Iterator[str]:
    """Yield why runs are in reserve."""
    if number := sum(run.reserve for run in view.runs):
        yield f"{plural(number, 'run')} in reserve: {NOT_NEEDED}"


def run_lines(view: MatrixView, runs: Sequence[RunView], width: int | None) -> list[Line]:
    """Return the table of runs."""
    if not runs:
        return [Line("no run has this status")]
    indices = {gpu.uuid: gpu.index for gpu in view.gpus}
    rows = [cells(run, place(view, run) or _gpu_numbers(run, indices)) for run in runs]
    title, *lines = table(RUNS, rows, width)
    start = title.index(RUNS[1].title)  # the status has a colour
    return [
        Line(title, head=True),
        *(
            Line(line, run.status, part=(start, start + len(row[1])))
            for line, row, run in zip(lines, rows, runs, strict=True)
        ),
    ]


def gpu_lines(view: MatrixView, width: int | None) -> list[Line]:
    """Return the table of this machine's GPUs; empty without GPUs, or if no runner holds the matrix."""
    if not view.running or not view.gpus:
        return []
    title, *rows = table(GPUS, [_gpu_cells(gpu) for gpu in view.gpus], width)
    return [Line(""), Line(title, head=True), *map(Line, rows)]


def most_urgent(runs: Sequence[RunView], room: int) -> list[RunView]:
    """Return the most relevant runs that fit, in their order: running ones are kept first, finished ones last."""
    by_urgency = sorted(runs, key=lambda run: (run.reserve, URGENCY.index(run.status)))  # equal ones stay in order
    names = {run.name for run in by_urgency[:room]}
    return [run for run in runs if run.name in names]


def cells(run: RunView, where: str = "") -> tuple[str, ...]:
    """Return one run as the cells of its row. where: its hosts or GPUs, if they are known."""
    done = None if run.step is None or not run.max_iters else run.step / run.max_iters
    return (
        run.name,
        shown_status(run),
        steps(run),
        UNKNOWN if done is None else f"{min(done, 1.0):.0%}",
        _number(run.loss, ".3f"),
        _number(run.val_loss, ".4f"),
        count(run.tokens_per_second),
        UNKNOWN if run.mfu is None else f"{run.mfu:.1%}",
        where or (UNKNOWN if run.ranks is None else f"{run.ranks} {'gpu' if run.device == 'cuda' else 'cpu'}"),
        _memory(run.memory_mib),
        duration(run.elapsed_s),
        duration(run.left_s),
    )


def notes(view: MatrixView) -> Iterator[tuple[Status | None, str]]:
    """Yield notes on the matrix and on single runs, failures and alerts first."""
    # In this order, because a small screen shows only the first notes.
    for run in view.runs:
        if run.reason and run.status in (Status.FAILED, Status.SKIPPED):
            yield run.status, f"{run.name} {run.status}: {run.reason}"
    for run in view.runs:
        yield from ((Status.FAILED, f"! {run.name}  {alert}") for alert in run.alerts)
    if view.stop is not None:
        yield Status.STOPPED, f"{'stopping' if view.running else 'stopped'}: {view.stop}"
    yield from ((Status.STOPPED, text) for text in waits(view))
    yield from ((None, text) for text in reserve_notes(view))
    for run in view.runs:
        yield from _history(run)
    for text in pending_messages(((run.name, sent) for run in view.runs for sent in run.trackers), view.path):
        yield Status.FAILED, text
    for link in first_of_each((one.tracker, one.link) for run in view.runs for one in run.trackers):
        yield None, link
    if not view.is_active and view.status is Status.STOPPED:
        yield Status.STOPPED, view.spent or f"continue: {make_command('continue', view.path)}"


def _history(run: RunView) -> Iterator[tuple[Status | None, str]]:
    """Yield the reason of a stop, and the history of a run."""
    if run.reason and run.status in TO_COME:
        yield run.status, f"{run.name} {run.status}: {run.reason}"
    if run.reused_from:
        yield None, f"{run.name} was reused from {run.reused_from}"
    elif run.attempt > 1:
        parts = [f"attempt {run.attempt}"] + ([f"micro-batch {run.micro_batch}"] if run.micro_batch else [])
        last = f" ({run.last_end})" if run.last_end else ""
        parts += [f"before: {', '.join(_in_a_row(run.ends))}{last}"] if run.ends else []
        yield None, f"{run.name}: {', '.join(parts)}"


def _in_a_row(kinds: Sequence[str]) -> Iterator[str]:
    """Yield `3 x time limit` for equal ends in a row."""
    for kind, several in itertools.groupby(kinds):
        number = len(list(several))
        yield kind if number == 1 else f"{number} x {kind}"


def _cost(view: MatrixView) -> str:
    to_come = view.all_dollars is not None and any(run.left_s for run in view.runs)
    return f"cost {money(view.dollars)}" + (f" of {money(view.all_dollars)}" if to_come else "")


def shown_status(run: RunView) -> str:
    if run.reserve:
        return "reserve"
    return "reused" if run.reused_from else run_status(run)


def steps(run: RunView) -> str:
    """Return `120/300`, or `120` if the number of steps is unknown."""
    return UNKNOWN if run.step is None else str(run.step) + (f"/{run.max_iters}" if run.max_iters else "")


def _gpu_numbers(run: RunView, indices: Mapping[str, int | None]) -> str:
    """Return `gpu 0,1` of a run that trains, "" if they are not known."""
    numbers = [indices.get(uuid) for uuid in run.gpus] if run.status is Status.RUNNING else []
    return f"gpu {','.join(map(str, numbers))}" if numbers and None not in numbers else ""


def _gpu_cells(gpu: GpuView) -> tuple[str, ...]:
    return (
        _gpu(gpu),
        gpu.run or "free",
        _number(gpu.utilization, ".0f", "%"),
        _memory(gpu.memory_used, gpu.memory_total),
        _number(gpu.power, ".0f", "W"),
        _number(gpu.temperature, ".0f", "C"),
    )


def _gpu(gpu: GpuView) -> str:
    """Return `2 NVIDIA A10G`, on a cluster `n1:2 NVIDIA A10G`."""
    number = "?" if gpu.index is None else str(gpu.index)
    return " ".join(filter(None, [f"{gpu.host}:{number}" if gpu.host else number, gpu.name or gpu.uuid]))


def _gpu_counts(view: MatrixView) -> str:
    """Return `GPUs: 3 in use, 1 free`."""
    taken = sum(bool(gpu.run) for gpu in view.gpus)
    return f"GPUs: {taken} in use, {len(view.gpus) - taken} free"


def _cut(lines: list[Line], room: int) -> list[Line]:
    """Return the first lines, and how many are missing."""
    if len(lines) <= room:
        return lines
    return [*lines[: room - 1], Line(f"and {len(lines) - room + 1} more lines: {make_command('status')} | less")]


def _memory(mib: float | None, total: float | None = None) -> str:
    return memory_size(None if mib is None else mib * 2**20, None if total is None else total * 2**20)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return UNKNOWN if value is None else format(value, form) + unit
