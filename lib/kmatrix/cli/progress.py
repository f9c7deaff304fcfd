"""How runs are shown while they run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from kmatrix.alerts import Alert, Kind, Severity
from kmatrix.cli.terminal import Terminal
from kmatrix.launch.watch import Progress
from kmatrix.records import Status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

MOST_LINES = 8  # runs that are drawn at a time
EVERY_S = 30.0  # between two plain lines of a run
REFRESH_S = 0.25  # between two drawings of the live line
BAR = 24  # columns
LIVE = (Status.PLANNED, Status.RUNNING)  # a planned run is shown only while it waits for something
COLOURS = {Status.FINISHED: "green", Status.FAILED: "red", Status.STOPPED: "yellow", Status.SKIPPED: "yellow"}


class ProgressDisplay:
    """Draws each Progress that it is called with, a line for each run that goes on. A context manager: leaving it
    puts the terminal right.

    A stream that is gone (a closed pipe) ends the drawing, never the runs; a lost terminal makes it plain.
    """

    def __init__(
        self, stream: TextIO | None = None, *, every_s: float = EVERY_S, terminal: Terminal | None = None
    ) -> None:
        self._terminal = terminal
        self._stream = stream or sys.stdout
        self._every_s = every_s
        self._dead = False
        self._shown: dict[str, float] = {}  # run -> monotonic seconds of its last plain line
        self._told: set[tuple[str, Kind, str, float]] = set()  # alerts that were printed
        self._now: dict[str, Progress] = {}  # the runs that go on
        self._drawn = 0.0
        self._live: Live | None = None
        self._console: Console | None = None
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console

            self._console = Console(file=self._stream, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end_live()
        except OSError:
            self._dead = True

    def __call__(self, progress: Progress) -> None:
        """Show one moment of a run."""
        if self._terminal is not None and self._terminal.lost:
            self.__exit__(None, None, None)
            self._console = self._live = None
            self._terminal.leave()
            self._dead = False
        if self._dead:
            return
        try:
            for alert in self._new_alerts(progress):
                self._tell(progress, alert)
            if self._console is not None:
                self._draw(self._console, progress)
            else:
                self._print(progress)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._dead = True

    def _new_alerts(self, progress: Progress) -> list[Alert]:
        """Return the alerts that were not printed yet: each is told once, when it begins."""
        new = []
        for alert in progress.alerts:
            key = (progress.run, alert.kind, alert.about, alert.since)
            if key not in self._told:
                self._told.add(key)
                new.append(alert)
        return new

    def _tell(self, progress: Progress, alert: Alert) -> None:
        """Print what a run is warned of: a line that stays, on a terminal above the live one."""
        text = alert_line(progress, alert)
        if self._console is None:
            self._stream.write(text + "\n")
            self._stream.flush()
            return
        from rich.text import Text

        style = "red" if alert.severity is Severity.CRITICAL else "yellow"
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _print(self, progress: Progress) -> None:
        """One line at the start, one every 30 s, one at the end."""
        now, before = time.monotonic(), self._shown.get(progress.run)
        if progress.status in LIVE:
            if before is not None and now - before < self._every_s:
                return
            self._shown[progress.run] = now
        text = running_line(progress) if progress.status in LIVE else ended_line(progress)
        self._stream.write(text + "\n")
        self._stream.flush()

    def _draw(self, console: Console, progress: Progress) -> None:
        """The live line while a run goes on, and a line that stays when it has ended."""
        from rich.live import Live
        from rich.text import Text

        self._now[progress.run] = progress
        if progress.status not in LIVE:
            del self._now[progress.run]
            self._end_live()
            console.print(Text(ended_line(progress), style=COLOURS.get(progress.status, "")), soft_wrap=True)
            return
        now = time.monotonic()
        if self._live is None:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        elif now - self._drawn < REFRESH_S:
            return
        self._drawn = now
        self._live.update(_live_lines(list(self._now.values())[:MOST_LINES]), refresh=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def running_line(progress: Progress) -> str:
    """`run 2/4 gpt2_muon_2cpu  step 120/300  loss 2.71  val 2.80  41k tok/s  left 0:12`, less what is not known."""
    parts = [_name(progress)]
    if progress.step is None:
        parts.append("starting" if progress.status is Status.RUNNING else progress.status.value)
    else:
        parts.append(f"step {progress.step}" + (f"/{progress.max_iters}" if progress.max_iters is not None else ""))
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.2f}")
    if progress.val_loss is not None:
        parts.append(f"val {progress.val_loss:.2f}")
    if progress.tokens_per_second is not None:
        parts.append(f"{short(progress.tokens_per_second)} tok/s")
    if progress.left_s is not None:
        parts.append(f"left {clock(progress.left_s)}")
    if progress.alerts:
        parts.append(f"{len(progress.alerts)} alert{'s' if len(progress.alerts) > 1 else ''}")
    return "  ".join([*parts, progress.note] if progress.note else parts)


def ended_line(progress: Progress) -> str:
    """`run 2/4 gpt2_muon_2cpu  finished  val 2.8012  1:23`, and the reason where there is one."""
    parts = [_name(progress), progress.status.value]
    if progress.val_loss is not None:
        parts.append(f"val {progress.val_loss:.4f}")
    if progress.elapsed_s is not None:
        parts.append(clock(progress.elapsed_s))
    if progress.reason:
        parts.append(progress.reason)
    return "  ".join(parts)


def alert_line(progress: Progress, alert: Alert) -> str:
    """`! gpt2_muon_2gpu  GPU 1: 91 C, from 87 C on (look after cooling ...)`."""
    return f"! {progress.run}  {alert.text} ({alert.advice})"


def clock(seconds: float) -> str:
    """0:12, 1:23:45."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(value: float) -> str:
    """950, 4.1k, 41k, 1.2M."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            scaled = value / factor
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def _name(progress: Progress) -> str:
    place = f" {progress.index}/{progress.total}" if progress.index else ""
    return f"run{place} {progress.run}"


def _live_lines(runs: Sequence[Progress]) -> Table:
    """For each run a bar and the line beside it, cut at the edge of the terminal and never wrapped."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1), expand=False)
    line.add_column(width=BAR)
    line.add_column(no_wrap=True, overflow="ellipsis")
    for run in runs:
        share = run.step / run.max_iters if run.step is not None and run.max_iters else 0.0
        line.add_row(ProgressBar(total=1.0, completed=min(1.0, share), width=BAR), Text(running_line(run)))
    return line
