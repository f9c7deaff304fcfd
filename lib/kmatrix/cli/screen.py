"""How a matrix looks on a screen of a size: a headline, its runs, its GPUs, and what is to be said of single runs.

Pure: a view and a size in, lines out. What fits least is left out in the order of its worth, and that is said.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kmatrix.cli.progress import clock, short
from kmatrix.cli.table import GAP, Column, Row, fitted, joined, wrapped
from kmatrix.launch.views import GpuView, MatrixView, RunView
from kmatrix.records import Status
from kmatrix.records.tracking import links, not_sent

UNKNOWN = "-"
QUARANTINED = "quarantined"  # what a GPU stays when its matrix has ended
FEWEST_RUNS = 3  # rows that runs keep whatever else there is to say
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
URGENCY = (Status.RUNNING, Status.FAILED, Status.STOPPED, Status.PLANNED, Status.SKIPPED, Status.FINISHED)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the screen. about: the status that gives it its colour; head: a title.

    part: first column and the one behind the last of what is coloured; None: the whole line.
    """

    text: str
    about: Status | None = None
    head: bool = False
    part: tuple[int, int] | None = None


def screen(view: MatrixView, *, width: int | None = None, height: int | None = None) -> list[Line]:
    """Return the lines of a matrix. width: columns, height: lines; None for as many as are needed."""
    head = [Line(text, head=True) for text in headline(view, width)]
    said = [Line(text, about) for about, words in remarks(view) for text in wrapped(words, width)]
    if height is None:
        return [*head, *run_lines(view, view.runs, width), *gpu_lines(view, width), *said]
    room = max(FEWEST_RUNS, height - len(head) - 1)
    gpus = gpu_lines(view, width)
    wanted = min(len(view.runs), max(FEWEST_RUNS, sum(run.status is Status.RUNNING for run in view.runs)))
    if wanted + len(gpus) + min(len(said), room // 3) > room:
        gpus = [Line(_gpus_in_short(view))] if view.gpus else []
    said = _cut(said, max(2, room - len(gpus) - len(view.runs), (room - len(gpus)) // 3))
    shown = most_urgent(view.runs, max(1, room - len(gpus) - len(said)))
    if hidden := len(view.runs) - len(shown):
        shown = most_urgent(view.runs, max(1, room - len(gpus) - len(said) - 1))
        hidden = len(view.runs) - len(shown)
        said.insert(0, Line(f"and {hidden} more, which do not fit here"))
    return [*head, *run_lines(view, shown, width), *gpus, *said][:height]


def headline(view: MatrixView, width: int | None = None) -> list[str]:
    """Return `test_matrix_results_...: running, 1 finished, 2 planned, left 1:02:03, until 14:05, cost $1.20 of $4.00`.

    Where that is too long, the name and its status stand in a line of their own.
    """
    parts = [f"{count} {name}" for name, count in view.counts.items()]
    if view.running and view.left_s is not None and view.ends is not None:
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(view.ends))
        parts += [f"left {clock(view.left_s)}", f"until {end}"]
    parts += [_cost(view)] if any(run.dollars is not None for run in view.runs) else []
    whole = f"{view.name}: {', '.join([str(view.status), *parts])}"
    if width is None or len(whole) <= width:
        return [whole]
    return [f"{view.name}: {view.status}", *wrapped("  " + ", ".join(parts), width)]


def run_lines(view: MatrixView, runs: Sequence[RunView], width: int | None) -> list[Line]:
    """Return the table of runs."""
    indices = {gpu.uuid: gpu.index for gpu in view.gpus}
    title, *rows = fitted(RUNS, [cells(run, [indices.get(uuid) for uuid in run.gpus]) for run in runs], width)
    start = len(title[0]) + GAP
    word = (start, start + len(title[1]))
    return [
        Line(joined(title), head=True),
        *(Line(joined(row), run.status, part=word) for row, run in zip(rows, runs, strict=True)),
    ]


def gpu_lines(view: MatrixView, width: int | None) -> list[Line]:
    """Return the table of the box's GPUs while the matrix runs; nothing where there are none, or nobody runs it."""
    if not view.running or not view.gpus:
        return []
    title, *rows = fitted(GPUS, [_gpu_cells(gpu) for gpu in view.gpus], width)
    about = [Status.FAILED if gpu.out else None for gpu in view.gpus]
    return [
        Line(""),
        Line(joined(title), head=True),
        *(Line(joined(row), status) for row, status in zip(rows, about, strict=True)),
    ]


def most_urgent(runs: Sequence[RunView], room: int) -> list[RunView]:
    """Return as many runs as there is room for, in their order: those that run first, finished ones last."""
    kept = sorted(runs, key=lambda run: URGENCY.index(run.status))[:room]
    names = {run.name for run in kept}
    return [run for run in runs if run.name in names]


def cells(run: RunView, gpus: Sequence[int | None] = ()) -> Row:
    """Return one run as the cells of its row. gpus: the indices of those that it has."""
    steps = UNKNOWN if run.step is None else str(run.step) + (f"/{run.max_iters}" if run.max_iters else "")
    done = None if run.step is None or not run.max_iters else run.step / run.max_iters
    return (
        run.name,
        "reused" if run.reused_from else str(run.status),
        steps,
        UNKNOWN if done is None else f"{min(done, 1.0):.0%}",
        _number(run.loss, ".3f"),
        _number(run.val_loss, ".4f"),
        UNKNOWN if run.tokens_per_second is None else short(run.tokens_per_second),
        UNKNOWN if run.mfu is None else f"{run.mfu:.1%}",
        _place(run, gpus),
        UNKNOWN if run.memory_mib is None else f"{run.memory_mib / 1024:.1f}G",
        UNKNOWN if run.elapsed_s is None else clock(run.elapsed_s),
        UNKNOWN if run.left_s is None else clock(run.left_s),
    )


def remarks(view: MatrixView) -> Iterator[tuple[Status | None, str]]:
    """Yield what is to be said of single runs and GPUs beside their numbers, failures and alerts first."""
    for run in view.runs:
        if run.reason and run.status in (Status.FAILED, Status.SKIPPED):
            yield run.status, f"{run.name} {run.status}: {run.reason}"
    for gpu in view.gpus:
        if gpu.out and (view.running or gpu.out.startswith(QUARANTINED)):
            yield Status.FAILED, f"GPU {_gpu(gpu)}: {gpu.out}"
    for run in view.runs:
        yield from ((Status.FAILED, f"! {run.name}  {alert}") for alert in run.alerts)
    for run in view.runs:
        yield from _history(run)
    for text in not_sent(((run.name, sent) for run in view.runs for sent in run.trackers), view.name):
        yield Status.FAILED, text
    for link in links(run.trackers for run in view.runs):
        yield None, link
    if not view.running and view.status is Status.STOPPED:
        yield Status.STOPPED, f"go on: make continue TARGET={view.name}"


def _history(run: RunView) -> Iterator[tuple[Status | None, str]]:
    """Yield why a run does not go on, and what came before this attempt."""
    if run.reason and run.status in (Status.STOPPED, Status.RUNNING):
        yield run.status, f"{run.name} {run.status}: {run.reason}"
    if run.reused_from:
        yield None, f"{run.name} was taken over from {run.reused_from}"
    elif run.attempt > 1:
        batch = f", micro-batch {run.micro_batch}" if run.micro_batch else ""
        yield None, f"{run.name}: attempt {run.attempt}{batch}"


def _cost(view: MatrixView) -> str:
    spent = sum(run.dollars or 0.0 for run in view.runs)
    to_come = view.all_dollars is not None and any(run.left_s for run in view.runs)
    return f"cost ${spent:,.2f}" + (f" of ${view.all_dollars:,.2f}" if to_come else "")


def _place(run: RunView, gpus: Sequence[int | None]) -> str:
    """`gpu 0,1` where it is known which, else `2 gpu`."""
    if run.status is Status.RUNNING and gpus and None not in gpus:
        return f"gpu {','.join(str(index) for index in gpus)}"
    if run.ranks is None:
        return UNKNOWN
    return f"{run.ranks} {'gpu' if run.device == 'cuda' else 'cpu'}"


def _gpu_cells(gpu: GpuView) -> Row:
    total = UNKNOWN if gpu.memory_total is None else f"{gpu.memory_total / 1024:.1f}"
    return (
        _gpu(gpu),
        gpu.run or gpu.out.partition(":")[0] or "free",  # why stands below
        _number(gpu.utilization, ".0f", "%"),
        UNKNOWN if gpu.memory_used is None else f"{gpu.memory_used / 1024:.1f}/{total}G",
        _number(gpu.power, ".0f", "W"),
        _number(gpu.temperature, ".0f", "C"),
    )


def _gpu(gpu: GpuView) -> str:
    """`2 NVIDIA A10G`."""
    return " ".join(filter(None, ["?" if gpu.index is None else str(gpu.index), gpu.name or gpu.uuid]))


def _gpus_in_short(view: MatrixView) -> str:
    taken, out = sum(bool(gpu.run) for gpu in view.gpus), sum(bool(gpu.out) for gpu in view.gpus)
    left_out = f", {out} left out" if out else ""
    return f"GPUs: {taken} in use, {len(view.gpus) - taken - out} free{left_out}"


def _cut(lines: list[Line], room: int) -> list[Line]:
    """Return the first lines, and how many are missing."""
    if len(lines) <= room:
        return lines
    return [*lines[: room - 1], Line(f"and {len(lines) - room + 1} more lines: make status | less")]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return UNKNOWN if value is None else format(value, form) + unit
