"""Show and watch a matrix: a live table on a terminal, a line per event elsewhere, JSON for programs."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from kmatrix import locks
from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import asked_statuses, find_target, running_target
from kmatrix.cli.watch.jobs import look_with_jobs
from kmatrix.cli.watch.screen import drawn, plain, screen
from kmatrix.clock import clock
from kmatrix.records.control import stop
from kmatrix.records.decode import SCHEMA, indented_text
from kmatrix.records.matrix import LOCAL
from kmatrix.records.runs import Status
from kmatrix.runner.requests import kill
from kmatrix.status.alerts import one_line, read_alerts
from kmatrix.status.look import Look
from kmatrix.status.view import MatrixView, RunView, Viewer
from kmatrix.text import count, duration, plural, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

VIEW_S, SCHEDULER_S, POLL_S = 1.0, 10.0, 0.2  # between two views, on a cluster; between two looks for its end
EVERY_S = 30.0  # between two plain lines of a run
OVER = (Status.FINISHED, Status.FAILED, Status.STOPPED, Status.SKIPPED)


# New objects between two searches for cycles: a view of 10,000 runs has a million objects, and hardly a cycle. With the
# default of 700, these searches take a fifth of the time.
GARBAGE = 200_000


def status(arguments: Arguments) -> int:
    """Show the matrix that is running, else the newest, or TARGET=."""
    only, matrix = asked_statuses(arguments), running_target(arguments) or find_target(arguments)
    if is_terminal(sys.stdout) and not arguments.is_on("JSON"):
        watch(matrix.path, only=only)
        return 0
    view = view_of(matrix.path, only)
    if arguments.is_on("JSON"):
        print(indented_text({"schema": SCHEMA, **view.to_json()}))
    else:
        columns = os.environ.get("COLUMNS", "")  # `watch` sets it for its command
        print(printable("\n".join(plain(view, int(columns) if columns.isdecimal() and int(columns) else None))))
    return 0


def view_of(path: Path, only: frozenset[Status] = frozenset()) -> MatrixView:
    """Return the view of a matrix. only: runs with these statuses."""
    gc.set_threshold(GARBAGE)
    seen, jobs, silent = look_with_jobs(path)
    return Viewer(path=path).view(seen, jobs, silent=silent, only=only)


def is_terminal(stream: TextIO) -> bool:
    """Return whether an output is a terminal that can be drawn on."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def watch(path: Path, *, is_ours: bool = False, only: frozenset[Status] = frozenset()) -> Look:
    """Show a matrix until nothing of it runs or waits; return the last look. only: runs with these statuses.

    Ctrl+C ends the display. is_ours: it stops the matrix instead, and a second one kills what still runs.
    """
    gc.set_threshold(GARBAGE)
    viewer, told = Viewer(path=path), 0
    with Display() as display, _signals(is_ours) as asked, suppress(KeyboardInterrupt):
        while True:
            began, is_held = clock.monotonic(), locks.is_held(path / ".lock")
            seen, jobs, silent = look_with_jobs(path)
            view = viewer.view(seen, jobs, silent=silent, only=only)
            display(view)
            if not view.is_active:
                break
            if len(asked) > told:
                told += 1
                if told == 1:
                    stop(path, signal.Signals(asked[0]).name)
                    print("stopping: the runs save a checkpoint; Ctrl+C again kills them", flush=True)
                else:
                    kill(seen)
            now = clock.monotonic()  # half of a core at most, for thousands of runs
            until = now + max(VIEW_S if view.engine == LOCAL else SCHEDULER_S, now - began)
            while clock.monotonic() < until and len(asked) == told and is_held == locks.is_held(path / ".lock"):
                clock.sleep(POLL_S)
    return seen


@contextmanager
def _signals(are_noted: bool) -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM in the list that is returned, if they are to be noted."""
    noted = list[int]()

    def note(got: int, _: object) -> None:
        if got == signal.SIGINT or not noted:  # SIGTERM may come twice: make passes it on
            noted.append(got)

    former = {one: signal.signal(one, note) for one in ((signal.SIGINT, signal.SIGTERM) if are_noted else ())}
    try:
        yield noted
    finally:
        for one, handler in former.items():
            signal.signal(one, handler)


@dataclass(kw_only=True)
class Display:
    """Show each view that it is called with. Leaving the context restores the terminal, and leaves the last view there.

    An output that is closed ends the display, never the runs.
    """

    stream: TextIO = field(default_factory=lambda: sys.stdout)
    _last: MatrixView | None = None
    _is_closed: bool = False
    _known: dict[str, tuple[Status, int]] | None = None  # run -> status and attempt, as shown last
    _lines: dict[str, float] = field(default_factory=dict)  # run -> monotonic seconds of its last line
    _alerts: set[tuple[str, ...]] = field(default_factory=set)  # that were printed
    _console: Console | None = None
    _live: Live | None = None

    def __post_init__(self) -> None:
        if is_terminal(self.stream):
            from rich.console import Console

            self._console = Console(file=self.stream, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._live is not None:
                self._live.stop()
            if self._console is not None and self._last is not None and kind is None and not self._is_closed:
                # Complete: a printed page may scroll, and the terminal wraps commands, so that they can be copied.
                self._console.print(drawn(screen(self._last, width=self._console.width)), soft_wrap=True)
        except (OSError, ValueError):
            self._is_closed = True

    def __call__(self, view: MatrixView) -> None:
        """Show a matrix."""
        self._last = view
        if self._is_closed:
            return
        try:
            if self._console is None:
                for line in self._changes(view):
                    self.stream.write(printable(line) + "\n")
                self.stream.flush()
            elif view.is_active:
                self._draw(self._console, view)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._is_closed = True

    def _changes(self, view: MatrixView) -> Iterator[str]:
        """Yield a line per alert that began, per run that began or ended, and in 30 s per run that trains."""
        now, known = clock.monotonic(), self._known or {}
        for run in view.runs:
            before, state = known.get(run.name), (run.status, run.attempt)
            if Status.RUNNING in (run.status, before and before[0]):
                yield from self._new_alerts(view.path / run.name)
            if run.status is Status.RUNNING:
                if before != state or now - self._lines.get(run.name, now) >= EVERY_S:
                    self._lines[run.name] = now
                    yield running_line(run)
            elif run.status in OVER and before != state and self._known is not None:
                yield ended_line(run)
        self._known = {run.name: (run.status, run.attempt) for run in view.runs}

    def _new_alerts(self, run: Path) -> Iterator[str]:
        for alert in read_alerts(run):
            key = run.name, alert.kind, alert.about, str(alert.since)
            if key not in self._alerts and (alert.until is None or self._known is not None):  # not those of before
                yield f"! {run.name}  {one_line(alert)}"
            self._alerts.add(key)

    def _draw(self, console: Console, view: MatrixView) -> None:
        from rich.live import Live

        if self._live is None:
            # auto_refresh would start a thread.
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        # One line less than the terminal: a full screen would scroll at each refresh.
        self._live.update(drawn(screen(view, width=console.width, height=console.height - 1)), refresh=True)


def running_line(run: RunView) -> str:
    """Return `gpt2_muon_2cpu  step 120/300  loss 2.71  val 2.80  41k tok/s  left 12s`, without unknown values."""
    until = "" if run.max_iters is None else f"/{run.max_iters}"
    begun = f"step {run.step}{until}" if run.step is not None else ""
    parts = [run.name, begun or (f"resuming at step {run.start}{until}" if run.start else "starting")]
    parts += [] if run.loss is None else [f"loss {run.loss:.2f}"]
    parts += [] if run.val_loss is None else [f"val {run.val_loss:.2f}"]
    parts += [] if run.tokens_per_second is None else [f"{count(run.tokens_per_second)} tok/s"]
    parts += [] if run.left_s is None else [f"left {duration(run.left_s)}"]
    parts += [plural(len(run.alerts), "alert")] if run.alerts else []
    return "  ".join(parts)


def ended_line(run: RunView) -> str:
    """Return `gpt2_muon_2cpu  finished  val 2.8012  1m23s`, with the reason of a failure."""
    parts = [run.name, run.status.value]
    parts += [] if run.val_loss is None else [f"val {run.val_loss:.4f}"]
    parts += [] if run.elapsed_s is None else [duration(run.elapsed_s)]
    return "  ".join([*parts, *filter(None, [run.reason])])
