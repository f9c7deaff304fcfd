"""The command that says when: progress and time left of each run and of the matrix, memory of each GPU, cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict

from kmatrix.cli.again import yes
from kmatrix.cli.arguments import Arguments
from kmatrix.cli.progress import clock
from kmatrix.cli.targets import find_target, running_target
from kmatrix.launch.overview import TO_COME, Overview
from kmatrix.launch.views import MatrixView, RunView
from kmatrix.records import SCHEMA, Status

UNKNOWN = "-"
TITLES = ("run", "status", "step", "epoch", "left", "ends", "from")
LEFT = (0, 1, 6)  # columns of words
DATE = "%Y-%m-%d %H:%M"


def estimate(arguments: Arguments) -> int:
    """Print when the runs of the matrix that is running end, else of the newest, or of TARGET=."""
    now = time.time()
    view = Overview(running_target(arguments) or find_target(arguments)).look(now)
    if yes(arguments, "JSON"):
        print(json.dumps(as_json(view, now), indent=2))
    else:
        print("\n".join(lines(view, now)))
    return 0


def as_json(view: MatrixView, now: float) -> dict[str, object]:
    """Return the estimate for programs; times are in seconds from `now` (Unix seconds); unknown is None."""
    return {"schema": SCHEMA, "now": now, **asdict(view), "counts": view.counts}


def lines(view: MatrixView, now: float) -> list[str]:
    """Return the estimate as text: a table, the memory of the devices, and the matrix as a whole."""
    rows = [TITLES, *(_cells(run, now) for run in view.runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    found = [f"{view.name}: {', '.join(f'{count} {name}' for name, count in view.counts.items())}"]
    for row in rows:
        fitted = [
            cell.ljust(width) if column in LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        found.append("  ".join(fitted).rstrip())
    return [*found, *_memory(view), *_whole(view, now)]


def _cells(run: RunView, now: float) -> tuple[str, ...]:
    """Return one run as the cells of its row."""
    open_ = run.status in TO_COME
    steps = UNKNOWN if run.step is None else str(run.step) + (f"/{run.max_iters}" if run.max_iters else "")
    read = [_epochs(number) for number in (run.epochs, run.all_epochs) if number is not None]
    return (
        run.name,
        "reused" if run.reused_from else str(run.status),
        steps,
        "/".join(read) or UNKNOWN,
        UNKNOWN if not open_ or run.left_s is None else clock(run.left_s),
        UNKNOWN if not open_ or run.ends_s is None else _date(now + run.ends_s),
        str(run.left_from) if open_ and run.left_from else "",
    )


def _memory(view: MatrixView) -> Iterator[str]:
    """Yield the most that each device of a run held."""
    for run in view.runs:
        if run.memory:
            unit = "GPU" if run.device == "cuda" else "device"
            held = (
                f"{unit} {device.device} {device.most / 1024:.1f}"
                + (f" of {device.total / 1024:.1f}" if device.total else "")
                for device in run.memory
            )
            yield f"memory of {run.name}, GiB: {', '.join(held)}"


def _whole(view: MatrixView, now: float) -> Iterator[str]:
    """Yield what is to be said of the matrix."""
    if not any(run.status in TO_COME for run in view.runs):
        yield "nothing is left to run"
    elif view.left_s is None:
        unknown = [run.name for run in view.runs if run.status in TO_COME and run.left_s is None]
        yield f"end: not known yet, since nothing was measured for {', '.join(unknown)}"
    elif view.running:
        yield f"end: {_date(now + view.left_s)}, in {clock(view.left_s)}"
    else:
        yield f"left: {clock(view.left_s)}; nobody runs it: make continue TARGET={view.name}"
    if any(run.dollars is not None for run in view.runs):
        ahead = UNKNOWN if view.all_dollars is None else f"${view.all_dollars:,.2f}"
        spent = sum(run.dollars or 0.0 for run in view.runs)
        yield f"cost: ${spent:,.2f} so far, {ahead} in the end"
    if failed := sum(run.status in (Status.FAILED, Status.SKIPPED) for run in view.runs):
        yield f"{failed} failed or skipped: not counted"


def _epochs(number: float) -> str:
    """0.96, and 0.00072 where two digits behind the point would be nothing."""
    return f"{number:.2f}" if number >= 0.01 or not number else f"{number:.2g}"


def _date(at: float) -> str:
    return time.strftime(DATE, time.localtime(at))
