"""The command `estimate`: when the runs of a matrix end, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import find_target, running_target
from kmatrix.cli.watch.jobs import queue_of, silence, waits
from kmatrix.cli.watch.screen import reserve_notes, run_counts, shown_status, steps
from kmatrix.cli.watch.status import view_of
from kmatrix.clock import clock
from kmatrix.records.decode import SCHEMA, indented_text
from kmatrix.records.runs import Status
from kmatrix.status.view import MatrixView, RunView
from kmatrix.text import UNKNOWN, columns, duration, make_command, money, printable, table, time_of_day

TITLES = ("run", "status", "step", "epoch", "left", "ends", "from")
LEFT = (0, 1, 6)  # columns of words


def estimate(arguments: Arguments) -> int:
    """Print when the runs of the matrix that is running end, else of the newest, or of TARGET=."""
    matrix = running_target(arguments) or find_target(arguments)
    view, now = view_of(matrix.path), clock.now()
    if arguments.is_on("JSON"):  # times are in seconds from `now`
        print(indented_text({"schema": SCHEMA, "now": now, **view.to_json()}))
    else:
        print(printable("\n".join(lines(view, now))))
    return 0


def lines(view: MatrixView, now: float) -> list[str]:
    """Return the estimate as text: a table, why runs wait, and the matrix as a whole. now: Unix seconds."""
    head = f"{view.name}: {', '.join(run_counts(view))}"
    rows = table(columns(TITLES, LEFT), [_cells(run, now) for run in view.runs])
    return [head, *rows, *filter(None, [silence(view)]), *waits(view), *_totals(view, now)]


def _cells(run: RunView, now: float) -> tuple[str, ...]:
    """Return one run as the cells of its row."""
    open_ = run.to_come
    read = [_epochs(number) for number in (run.epochs, run.all_epochs) if number is not None]
    return (
        run.name,
        shown_status(run),
        steps(run),
        "/".join(read) or UNKNOWN,
        UNKNOWN if not open_ or run.left_s is None else duration(run.left_s),
        UNKNOWN if not open_ or run.ends_s is None else time_of_day(now + run.ends_s),
        str(run.left_from) if open_ and run.left_from else "",
    )


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
        yield f"left: {duration(view.left_s)}; not running: {view.spent or make_command('continue', view.path)}"
    if any(run.reserve for run in view.runs) and any(run.to_come for run in view.runs) and view.most_s is not None:
        yield f"with all further seeds: {duration(view.most_s)}"
    yield from reserve_notes(view)
    if view.dollars is not None:
        yield f"cost: {money(view.dollars)} so far, {money(view.all_dollars)} in total"
    if failed := sum(run.status in (Status.FAILED, Status.SKIPPED) and not run.to_come for run in view.runs):
        yield f"{failed} failed or skipped: not counted"


def _epochs(number: float) -> str:
    """Return 0.96, 0.00072 if two decimals would round to zero, and <0.0001 below that."""
    if 0 < number < 0.0001:
        return "<0.0001"
    return f"{number:.2f}" if number >= 0.01 or not number else f"{number:.2g}"
