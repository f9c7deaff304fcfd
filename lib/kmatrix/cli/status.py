"""The commands `status` and `estimate`: a live display on a terminal, plain text elsewhere, JSON for programs."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from kmatrix.cli.commands import Arguments, yes
from kmatrix.cli.jobs import attempts, next_steps, place, queue_of, run_status, silence, troubles, waits
from kmatrix.cli.jobs import counts as job_counts
from kmatrix.cli.progress import COLOURS, colourless
from kmatrix.cli.targets import ask, asked_statuses, find_target, running_target, warn_interrupted
from kmatrix.engines.polling import Asking
from kmatrix.records.decode import SCHEMA
from kmatrix.records.runs import Status
from kmatrix.records.tracking import links, pending_messages
from kmatrix.status.activity import Activity
from kmatrix.status.outcomes import NOT_NEEDED
from kmatrix.status.view.matrix_view import DeviceMemory, FurtherSeeds, GpuView, MatrixView, RunView
from kmatrix.status.view.overview import Overview
from kmatrix.text import (
    UNKNOWN,
    Column,
    columns,
    count,
    duration,
    first_names,
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


EVERY_S = 1.0  # between two frames
# New objects between two searches for cycles: a view of 10,000 runs has a million objects, and hardly a cycle. With the
# default of 700, these searches take a fifth of the time.
GARBAGE = 200_000
QUARANTINED = "quarantined"  # start of a reason that is still shown after the matrix has ended
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
TITLES = ("run", "status", "step", "epoch", "left", "ends", "from")
LEFT = (0, 1, 6)  # columns of words


def status(arguments: Arguments) -> int:
    """Show the matrix that is running, else the newest, or TARGET=."""
    gc.set_threshold(GARBAGE)
    wanted = asked_statuses(arguments)
    matrix = running_target(arguments) or find_target(arguments)
    asking = Asking(lambda: ask(matrix))
    overview = Overview(matrix, wanted, asking.newest)
    warn_interrupted(arguments)
    try:
        if yes(arguments, "JSON"):
            print(json.dumps(as_json(overview.poll()), indent=2))
        elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            watch(overview)
        else:
            print(printable("\n".join(plain(overview.poll(), asked_width()))))
    finally:
        asking.end()
    return 0


def as_json(view: MatrixView) -> dict[str, object]:
    """Return the whole view for programs; unknown is None."""
    return {"schema": SCHEMA, **_fields(view), "counts": view.counts}


def _fields(view: MatrixView) -> dict[str, object]:
    """Return the fields of a view, without its path: a copied matrix has the same values."""
    return {name: value for name, value in asdict(view).items() if name != "path"}


def plain(view: MatrixView, width: int | None = None) -> list[str]:
    """Return the view as plain lines: a headline, the tables, and notes on single runs."""
    return [line.text for line in screen(view, width=width)]


def asked_width() -> int | None:
    """Return the width in COLUMNS, which `watch` sets for its command; None: as wide as needed."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) else None


def watch(overview: Overview) -> None:
    """Refresh the display until nothing runs or waits, or Ctrl+C is pressed, and leave the last frame on screen."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    view = overview.poll()
    if view.is_active:
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, transient=True) as live:
            while view.is_active:
                # One line less than the terminal: a full screen would scroll at each refresh.
                live.update(drawn(screen(view, width=console.width, height=console.height - 1)), refresh=True)
                time.sleep(EVERY_S)
                view = overview.poll()
    # The last frame, complete: a printed page may scroll, and the terminal wraps commands.
    console.print(drawn(screen(view, width=console.width)), soft_wrap=True)


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
    parts = _counts(view)
    is_queued = view.jobs is not None and view.jobs.activity is Activity.QUEUED
    status = "queued" if is_queued else str(view.status)
    parts += [text] if view.jobs is not None and (text := job_counts(view.jobs)) else []
    if view.running and view.left_s is not None and view.ends is not None:
        parts += [f"left {duration(view.left_s)}", f"until {time_of_day(view.ends)}"]
    parts += [_cost(view)] if view.dollars is not None else []
    whole = f"{view.name}: {', '.join([status, *parts])}"
    if width is None or len(whole) <= width:
        return [whole]
    return [f"{view.name}: {status}", *wrap(", ".join(parts), "  ", width)]


def _counts(view: MatrixView) -> list[str]:
    """Return `12 finished`, `3 planned` and `5 in reserve`."""
    reserve = Counter(run.status.value for run in view.runs if run.reserve)
    shown_counts = {name: number - reserve[name] for name, number in view.counts.items()}
    parts = [f"{number} {name}" for name, number in shown_counts.items() if number]
    return parts + ([f"{reserve.total()} in reserve"] if reserve else [])


def _reserve_notes(view: MatrixView) -> Iterator[str]:
    """Yield what the last look at a verdict has decided, and why runs are in reserve."""
    yield from (f"verdict {text}" for text in view.looks)
    if number := sum(run.reserve for run in view.runs):
        yield f"{plural(number, 'run')} in reserve: {NOT_NEEDED}"


def run_lines(view: MatrixView, runs: Sequence[RunView], width: int | None) -> list[Line]:
    """Return the table of runs."""
    if not runs:
        return [Line("no run has this status")]
    indices = {gpu.uuid: gpu.index for gpu in view.gpus}
    rows = [cells(run, [indices.get(uuid) for uuid in run.gpus]) for run in runs]
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
    about = [Status.FAILED if gpu.out else None for gpu in view.gpus]
    return [
        Line(""),
        Line(title, head=True),
        *(Line(row, status) for row, status in zip(rows, about, strict=True)),
    ]


def most_urgent(runs: Sequence[RunView], room: int) -> list[RunView]:
    """Return the most relevant runs that fit, in their order: running ones are kept first, finished ones last."""
    kept = sorted(runs, key=lambda run: (run.reserve, URGENCY.index(run.status)))[
        :room
    ]  # stable: equal ones stay in order
    names = {run.name for run in kept}
    return [run for run in runs if run.name in names]


def cells(run: RunView, gpus: Sequence[int | None] = ()) -> tuple[str, ...]:
    """Return one run as the cells of its row. gpus: the indices of its GPUs."""
    done = None if run.step is None or not run.max_iters else run.step / run.max_iters
    return (
        run.name,
        _status(run),
        _steps(run),
        UNKNOWN if done is None else f"{min(done, 1.0):.0%}",
        _number(run.loss, ".3f"),
        _number(run.val_loss, ".4f"),
        count(run.tokens_per_second),
        UNKNOWN if run.mfu is None else f"{run.mfu:.1%}",
        _place(run, gpus),
        _memory(run.memory_mib),
        duration(run.elapsed_s),
        duration(run.left_s),
    )


def notes(view: MatrixView) -> Iterator[tuple[Status | None, str]]:
    """Yield notes on single runs and GPUs, failures and alerts first."""
    # In this order, because a small screen shows only the first notes.
    for run in view.runs:
        if run.reason and run.status in (Status.FAILED, Status.SKIPPED):
            yield run.status, f"{run.name} {run.status}: {run.reason}"
    for gpu in view.gpus:
        if gpu.out and (view.running or gpu.out.startswith(QUARANTINED)):
            yield Status.FAILED, f"GPU {_gpu(gpu)}: {gpu.out}"
    yield from ((Status.FAILED, f"! {text}") for text in troubles(view))
    for run in view.runs:
        yield from ((Status.FAILED, f"! {run.name}  {alert}") for alert in run.alerts)
    if missing := [run.name for run in view.runs if run.missing]:
        yield (
            Status.FAILED,
            f"no run.json: {first_names(missing)}; `{make_command('continue', view.path)}` makes them again",
        )
    yield from ((Status.STOPPED, text) for text in (*next_steps(view), *waits(view)))
    yield from ((None, text) for text in _reserve_notes(view))
    for run in view.runs:
        yield from _history(run)
    for text in pending_messages(((run.name, sent) for run in view.runs for sent in run.trackers), view.path):
        yield Status.FAILED, text
    for link in links(run.trackers for run in view.runs):
        yield None, link
    has_hint = view.jobs is not None and (view.jobs.unsubmitted or view.jobs.original)
    if not view.is_active and view.status is Status.STOPPED and not has_hint:
        if view.spent is not None:
            yield Status.STOPPED, f"the budget of the matrix is spent: {view.spent.text}"
        yield Status.STOPPED, f"continue: {_continue(view)}"


def _continue(view: MatrixView) -> str:
    """Return the command that continues a matrix: without a larger budget than one that is spent, it is refused."""
    larger = {} if view.spent is None else {view.spent.symbol: str(view.spent.more)}
    return make_command("continue", view.path, **larger)


def _history(run: RunView) -> Iterator[tuple[Status | None, str]]:
    """Yield the reason of a stop, and the history of a run."""
    stays = run.status in (Status.STOPPED, Status.RUNNING, Status.PLANNED)
    if run.reason and stays and not run.missing:
        yield run.status, f"{run.name} {run.status}: {run.reason}"
    if run.reused_from:
        yield None, f"{run.name} was reused from {run.reused_from}"
    elif text := attempts(run):
        yield None, text
    elif run.attempt > 1:
        batch = f", micro-batch {run.micro_batch}" if run.micro_batch else ""
        yield None, f"{run.name}: attempt {run.attempt}{batch}"


def _cost(view: MatrixView) -> str:
    to_come = view.all_dollars is not None and any(run.left_s for run in view.runs)
    return f"cost {money(view.dollars)}" + (f" of {money(view.all_dollars)}" if to_come else "")


def _status(run: RunView) -> str:
    if run.reserve:
        return "reserve"
    return "missing" if run.missing else "reused" if run.reused_from else run_status(run)


def _steps(run: RunView) -> str:
    """Return `120/300`, or `120` if the number of steps is unknown."""
    return UNKNOWN if run.step is None else str(run.step) + (f"/{run.max_iters}" if run.max_iters else "")


def _place(run: RunView, gpus: Sequence[int | None]) -> str:
    """Return `gpu 0,1` if the GPUs are known, else `2 gpu`; on a cluster `n1,n2`, before the start `2 nodes`."""
    if text := place(run):
        return text
    if run.status is Status.RUNNING and gpus and None not in gpus:
        return f"gpu {','.join(str(index) for index in gpus)}"
    if run.ranks is None:
        return UNKNOWN
    return f"{run.ranks} {'gpu' if run.device == 'cuda' else 'cpu'}"


def _gpu_cells(gpu: GpuView) -> tuple[str, ...]:
    return (
        _gpu(gpu),
        gpu.run or gpu.out.partition(":")[0] or "free",  # the reason after the colon is in the notes below
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
    taken, out = sum(bool(gpu.run) for gpu in view.gpus), sum(bool(gpu.out) for gpu in view.gpus)
    left_out = f", {out} left out" if out else ""
    return f"GPUs: {taken} in use, {len(view.gpus) - taken - out} free{left_out}"


def _cut(lines: list[Line], room: int) -> list[Line]:
    """Return the first lines, and how many are missing."""
    if len(lines) <= room:
        return lines
    return [*lines[: room - 1], Line(f"and {len(lines) - room + 1} more lines: {make_command('status')} | less")]


def _memory(mib: float | None, total: float | None = None) -> str:
    return memory_size(None if mib is None else mib * 2**20, None if total is None else total * 2**20)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return UNKNOWN if value is None else format(value, form) + unit


def estimate(arguments: Arguments) -> int:
    """Print when the runs of the matrix that is running end, else of the newest, or of TARGET=."""
    gc.set_threshold(GARBAGE)
    now = time.time()
    matrix = running_target(arguments) or find_target(arguments)
    view = Overview(matrix, ask=lambda: ask(matrix)).poll(now)
    if yes(arguments, "JSON"):
        print(json.dumps(estimate_json(view, now), indent=2))
    else:
        print(printable("\n".join(lines(view, now))))
    return 0


def estimate_json(view: MatrixView, now: float) -> dict[str, object]:
    """Return the estimate for programs; times are in seconds from `now` (Unix seconds); unknown is None."""
    return {"schema": SCHEMA, "now": now, **_fields(view), "counts": view.counts}


def lines(view: MatrixView, now: float) -> list[str]:
    """Return the estimate as text: a table, the memory of the devices, and the matrix as a whole."""
    head = f"{view.name}: {', '.join(_counts(view))}"
    rows = table(columns(TITLES, LEFT), [_cells(run, now) for run in view.runs])
    jobs = [text for text in (silence(view), *next_steps(view), *waits(view)) if text]
    return [head, *rows, *_peak_memory(view), *_cut_schedules(view), *jobs, *_totals(view, now)]


def _cut_schedules(view: MatrixView) -> Iterator[str]:
    """Yield a warning for each share of the schedule at which the budgets of runs end them."""
    shares: dict[str, list[str]] = {}
    for run in view.runs:
        if run.schedule_share is not None:
            shares.setdefault(f"{100 * run.schedule_share:.0f} %", []).append(run.name)
    for share, names in shares.items():
        yield f"warning: the budget ends at {share} of the schedule of {first_names(names)}"


def _cells(run: RunView, now: float) -> tuple[str, ...]:
    """Return one run as the cells of its row."""
    open_ = run.to_come
    read = [_epochs(number) for number in (run.epochs, run.all_epochs) if number is not None]
    return (
        run.name,
        _status(run),
        _steps(run),
        "/".join(read) or UNKNOWN,
        UNKNOWN if not open_ or run.left_s is None else duration(run.left_s),
        UNKNOWN if not open_ or run.ends_s is None else time_of_day(now + run.ends_s),
        str(run.left_from) if open_ and run.left_from else "",
    )


def _peak_memory(view: MatrixView) -> Iterator[str]:
    """Yield the maximum memory of each device of a run."""
    for run in view.runs:
        if run.memory:
            unit = "GPU" if run.device == "cuda" else "device"
            held = (f"{_on_host(device)} {_memory(device.most, device.total)}" for device in run.memory)
            yield f"memory of {run.name}: {', '.join(f'{unit} {each}' for each in held)}"


def _on_host(device: DeviceMemory) -> str:
    """Return the number of a device; over several nodes with its host."""
    return f"{device.device} on {device.host}" if device.host else device.device


def _totals(view: MatrixView, now: float) -> Iterator[str]:
    """Yield the totals of the matrix."""
    if not any(run.to_come for run in view.runs):
        yield "nothing is left to run"
    elif view.left_s is None and (text := queue_of(view)):
        yield f"time left: unknown ({text})"
    elif view.left_s is None:
        unknown = [run.name for run in view.runs if run.to_come and run.left_s is None]
        yield f"time left: unknown (no measurement for {', '.join(unknown)} yet)"
    elif view.is_active:
        yield f"end: {time_of_day(now + view.left_s)}, in {duration(view.left_s)}"
    else:
        spent = "" if view.spent is None else f"the budget of the matrix is spent ({view.spent.text}), "
        yield f"left: {duration(view.left_s)}; {spent}not running: {_continue(view)}"
    if view.seeds is not None:
        yield _further(view.seeds, is_open=any(run.to_come for run in view.runs))
    yield from (text for text in _reserve_notes(view) if view.seeds is None)
    if view.dollars is not None:
        yield f"cost: {money(view.dollars)} so far, {money(view.all_dollars)} in total"
    if failed := sum(run.status in (Status.FAILED, Status.SKIPPED) for run in view.runs):
        yield f"{failed} failed or skipped: not counted"


def _further(seeds: FurtherSeeds, *, is_open: bool) -> str:
    """Return how long the matrix takes with further seeds: as expected, and at most."""
    reserve = f"{plural(seeds.runs, 'run')} in reserve"
    if not is_open:
        return f"{reserve}: {NOT_NEEDED}"
    most = "at most " + ("an unknown time" if seeds.most_s is None else duration(seeds.most_s))
    if seeds.likely_runs is None:
        return f"with further seeds: {most} ({reserve}); nothing is expected before the first look at the losses"
    likely = "an unknown time" if seeds.likely_s is None else duration(seeds.likely_s)
    return f"with further seeds: about {likely} ({plural(seeds.likely_runs, 'run')}), {most} ({reserve})"


def _epochs(number: float) -> str:
    """Return 0.96, 0.00072 if two decimals would round to zero, and <0.0001 below that."""
    if 0 < number < 0.0001:
        return "<0.0001"
    return f"{number:.2f}" if number >= 0.01 or not number else f"{number:.2g}"
