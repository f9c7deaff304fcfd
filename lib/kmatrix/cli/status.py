"""The command that shows how a matrix stands: live on a terminal, plain elsewhere, as JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from kmatrix.cli.again import yes
from kmatrix.cli.arguments import Arguments
from kmatrix.cli.progress import COLOURS, clock, short
from kmatrix.cli.targets import find_target, running_target
from kmatrix.launch.overview import Overview
from kmatrix.launch.views import MatrixView, RunView
from kmatrix.records import SCHEMA, Status

if TYPE_CHECKING:
    from rich.console import Group

EVERY_S = 1.0
UNKNOWN = "-"
TITLES = ("run", "status", "step", "loss", "val", "tok/s", "MFU", "on", "memory", "time", "left")
LEFT = (0, 1)  # columns of words
URGENCY = (Status.RUNNING, Status.FAILED, Status.STOPPED, Status.PLANNED, Status.SKIPPED, Status.FINISHED)


def status(arguments: Arguments) -> int:
    """Show the matrix that is running, else the newest, or TARGET=."""
    overview = Overview(running_target(arguments) or find_target(arguments))
    if yes(arguments, "JSON"):
        print(json.dumps(as_json(overview.look()), indent=2))
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        watch(overview)
    else:
        print("\n".join(plain(overview.look())))
    return 0


def as_json(view: MatrixView) -> dict[str, object]:
    """Return the whole view for programs; unknown is None."""
    return {"schema": SCHEMA, **asdict(view), "counts": view.counts}


def plain(view: MatrixView) -> list[str]:
    """Return the view as lines: a sentence, a table, and what is to be said of single runs."""
    rows = [TITLES, *(cells(run) for run in view.runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    lines = [headline(view)]
    for row in rows:
        fitted = [
            cell.ljust(width) if column in LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(fitted).rstrip())
    return [*lines, *(text for _, text in remarks(view))]


def watch(overview: Overview) -> None:
    """Draw the view until the runner has ended, or Ctrl+C; the last one stays."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    view = overview.look()
    if view.running:
        with Live(console=console, auto_refresh=False, transient=True) as live, suppress(KeyboardInterrupt):
            while view.running:
                live.update(drawn(view, console.height - 1), refresh=True)
                time.sleep(EVERY_S)
                view = overview.look()
    console.print(drawn(view))


def drawn(view: MatrixView, height: int | None = None) -> Group:
    """Return the view for a terminal, in colours. height: lines that there are; what matters least is left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column, title in enumerate(TITLES):
        table.add_column(title, justify="left" if column in LEFT else "right", no_wrap=column > 0)
    said = [Text(text, style=COLOURS.get(status, "")) for status, text in remarks(view)]
    shown = view.runs if height is None else most_urgent(view.runs, max(1, height - len(said) - 3))
    for run in shown:
        name, state, *rest = cells(run)
        table.add_row(name, Text(state, style=COLOURS.get(run.status, "")), *rest)
    if hidden := len(view.runs) - len(shown):
        said.insert(0, Text(f"and {hidden} more, which do not fit here"))
    return Group(Text(headline(view), style="bold"), table, *said)


def most_urgent(runs: Sequence[RunView], room: int) -> list[RunView]:
    """Return as many runs as there is room for, in their order: those that run first, finished ones last."""
    kept = sorted(runs, key=lambda run: URGENCY.index(run.status))[:room]
    names = {run.name for run in kept}
    return [run for run in runs if run.name in names]


def headline(view: MatrixView) -> str:
    """`test_matrix_results_...: running, 1 finished, 1 running, 2 planned, left 1:02:03, until 14:05`."""
    parts = [str(view.status), *(f"{count} {name}" for name, count in view.counts.items())]
    if view.running and view.left_s is not None:
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + view.left_s))
        parts += [f"left {clock(view.left_s)}", f"until {end}"]
    return f"{view.name}: {', '.join(parts)}"


def cells(run: RunView) -> tuple[str, ...]:
    """Return one run as the cells of its row."""
    steps = UNKNOWN if run.step is None else str(run.step) + (f"/{run.max_iters}" if run.max_iters else "")
    unit = "gpu" if run.device == "cuda" else "cpu"
    return (
        run.name,
        "reused" if run.reused_from else str(run.status),
        steps,
        _number(run.loss, ".3f"),
        _number(run.val_loss, ".4f"),
        UNKNOWN if run.tokens_per_second is None else short(run.tokens_per_second),
        UNKNOWN if run.mfu is None else f"{run.mfu:.1%}",
        UNKNOWN if run.ranks is None else f"{run.ranks} {unit}",
        UNKNOWN if run.memory_mib is None else f"{run.memory_mib / 1024:.1f}G",
        UNKNOWN if run.elapsed_s is None else clock(run.elapsed_s),
        UNKNOWN if run.left_s is None else clock(run.left_s),
    )


def remarks(view: MatrixView) -> Iterator[tuple[Status, str]]:
    """Yield what is to be said of single runs beside their numbers."""
    for run in view.runs:
        if run.reason and run.status not in (Status.FINISHED, Status.PLANNED):
            yield run.status, f"{run.name} {run.status}: {run.reason}"
        if run.reused_from:
            yield run.status, f"{run.name} was taken over from {run.reused_from}"
        elif run.attempt > 1:
            batch = f", micro-batch {run.micro_batch}" if run.micro_batch else ""
            yield run.status, f"{run.name}: attempt {run.attempt}{batch}"
        for alert in run.alerts:
            yield Status.FAILED, f"! {run.name}  {alert}"
    if not view.running and view.status is Status.STOPPED:
        yield Status.STOPPED, f"go on: make continue TARGET={view.name}"


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
