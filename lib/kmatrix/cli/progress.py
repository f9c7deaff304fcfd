"""Show a matrix that is being run: on a terminal the table of `make status`, elsewhere a line per event."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from kmatrix.cli.status import colourless, drawn, is_terminal, screen
from kmatrix.clock import clock
from kmatrix.records.runs import Status
from kmatrix.status.alerts import Severity, one_line, read_alerts
from kmatrix.status.look import Look
from kmatrix.status.view import JobView, MatrixView, RunView, Viewer
from kmatrix.status.wanted import wanted
from kmatrix.text import count, duration, plural, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REFRESH_S = 1.0  # between two views
EVERY_S = 30.0  # between two plain lines of a run
OVER = (Status.FINISHED, Status.FAILED, Status.STOPPED, Status.SKIPPED)


@dataclass(kw_only=True)
class Display:
    """Show each look that it is called with, at most one per second. Leaving the context restores the terminal.

    An output that is closed ends the display, never the runs.
    """

    stream: TextIO = field(default_factory=lambda: sys.stdout)
    _viewer: Viewer | None = None
    _last: tuple[Look, Mapping[str, JobView]] | None = None  # not shown yet
    _due: float = float("-inf")  # monotonic seconds
    _is_closed: bool = False
    _statuses: dict[str, tuple[Status, int]] = field(default_factory=dict)  # run -> status and attempt, as shown last
    _lines: dict[str, float] = field(default_factory=dict)  # run -> monotonic seconds of its last line
    _order: dict[str, int] = field(default_factory=dict)  # run -> its number, from 1, in the order of starts
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
        if self._last is not None and kind is None:
            self._show(*self._last, is_last=True)
        try:
            self._end_live()
        except (OSError, ValueError):
            self._is_closed = True

    def __call__(self, seen: Look, jobs: Mapping[str, JobView] | None = None) -> None:
        """Show a matrix. jobs: run -> its job on a cluster."""
        self._last = seen, jobs or {}
        if clock.monotonic() >= self._due:
            self._due = clock.monotonic() + REFRESH_S
            self._show(*self._last)

    def _show(self, seen: Look, jobs: Mapping[str, JobView], *, is_last: bool = False) -> None:
        if self._is_closed:
            return
        self._viewer = self._viewer or Viewer(path=seen.path)
        view = self._viewer.view(seen, jobs)
        try:
            self._print_alerts(view)
            if self._console is not None:
                self._draw(self._console, view, is_last=is_last)
            else:
                for line in self._changes(view, len(wanted(seen))):
                    self._print(line)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._is_closed = True

    def _print_alerts(self, view: MatrixView) -> None:
        """Print the alerts that began since the last view."""
        for run in view.runs:
            known = self._statuses.get(run.name, (run.status, 0))[0]
            for alert in read_alerts(view.path / run.name) if Status.RUNNING in (run.status, known) else ():
                key = run.name, alert.kind, alert.about, str(alert.since)
                if key not in self._alerts and (alert.until is None or self._statuses):  # not those of before
                    style = "red" if alert.severity is Severity.CRITICAL else "yellow"
                    self._print(f"! {run.name}  {one_line(alert)}", style)
                self._alerts.add(key)
        if self._console is not None:
            self._statuses = {run.name: (run.status, run.attempt) for run in view.runs}

    def _changes(self, view: MatrixView, total: int) -> Iterator[str]:
        """Yield a line per run that started or ended since the last view, and per run that trains, every 30 s."""
        is_first, now = not self._statuses, clock.monotonic()
        for run in view.runs:
            before = self._statuses.get(run.name)
            self._statuses[run.name] = state = run.status, run.attempt
            if run.status is Status.RUNNING:
                number = self._order.setdefault(run.name, len(self._order) + 1)
                if before != state or now - self._lines.get(run.name, now) >= EVERY_S:
                    self._lines[run.name] = now
                    yield running_line(run, f"{number}/{max(total, number)}")
            elif run.status in OVER and before != state and not is_first:
                number = self._order.setdefault(run.name, len(self._order) + 1)
                yield ended_line(run, f"{number}/{max(total, number)}")

    def _print(self, text: str, style: str = "") -> None:
        """Print a permanent line, above the table on a terminal."""
        if self._console is None:
            self.stream.write(printable(text) + "\n")
            self.stream.flush()
            return
        from rich.text import Text

        # soft_wrap: the terminal wraps, so that a copied line has no line breaks.
        self._console.print(Text(printable(text), style="" if colourless() else style), soft_wrap=True)

    def _draw(self, console: Console, view: MatrixView, *, is_last: bool) -> None:
        """Draw the table; the last one stays on screen, complete."""
        from rich.live import Live

        if is_last:
            self._end_live()
            console.print(drawn(screen(view, width=console.width)), soft_wrap=True)
            return
        if self._live is None:
            # auto_refresh would start a thread, although looks come several times per second.
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        # One line less than the terminal: a full screen would scroll at each refresh.
        self._live.update(drawn(screen(view, width=console.width, height=console.height - 1)), refresh=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def running_line(run: RunView, place: str) -> str:
    """Return `run 2/4 gpt2_muon_2cpu  step 120/300  loss 2.71  val 2.80  41k tok/s  left 12s`, without unknown values.

    place: its number, and that of all runs.
    """
    until = "" if run.max_iters is None else f"/{run.max_iters}"
    begun = f"step {run.step}{until}" if run.step is not None else ""
    parts = [f"run {place} {run.name}", begun or (f"resuming at step {run.start}{until}" if run.start else "starting")]
    parts += [] if run.loss is None else [f"loss {run.loss:.2f}"]
    parts += [] if run.val_loss is None else [f"val {run.val_loss:.2f}"]
    parts += [] if run.tokens_per_second is None else [f"{count(run.tokens_per_second)} tok/s"]
    parts += [] if run.left_s is None else [f"left {duration(run.left_s)}"]
    parts += [plural(len(run.alerts), "alert")] if run.alerts else []
    return "  ".join(parts)


def ended_line(run: RunView, place: str) -> str:
    """Return `run 2/4 gpt2_muon_2cpu  finished  val 2.8012  1m23s`, with the reason of a failure."""
    parts = [f"run {place} {run.name}", run.status.value]
    parts += [] if run.val_loss is None else [f"val {run.val_loss:.4f}"]
    parts += [] if run.elapsed_s is None else [duration(run.elapsed_s)]
    return "  ".join([*parts, *filter(None, [run.reason])])
