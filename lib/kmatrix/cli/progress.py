"""How runs are shown while they run: a live line for each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from kmatrix.alerts import Alert, Kind, Severity
from kmatrix.cli.table import ELLIPSIS, NAME_LEAST, shortened
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
BAR, BAR_LEAST = 24, 8  # columns; a bar that would be shorter is left out
LIVE = (Status.PLANNED, Status.RUNNING)  # a planned run is shown only while it waits for something
COLOURS = {
    Status.RUNNING: "cyan",
    Status.FINISHED: "green",
    Status.FAILED: "red",
    Status.STOPPED: "yellow",
    Status.SKIPPED: "yellow",
}


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

    def tell(self, text: str) -> None:
        """Print a line that stays, about no run in particular."""
        if self._dead:
            return
        try:
            self._stay(f"note: {text}", "yellow")
        except (OSError, ValueError):
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
        self._stay(alert_line(progress, alert), "red" if alert.severity is Severity.CRITICAL else "yellow")

    def _stay(self, text: str, style: str) -> None:
        """Print a line that stays, on a terminal above the live one."""
        if self._console is None:
            self._stream.write(text + "\n")
            self._stream.flush()
            return
        from rich.text import Text

        self._console.print(Text(text, style="" if colourless() else style), soft_wrap=True)

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
            style = "" if colourless() else COLOURS.get(progress.status, "")
            console.print(Text(ended_line(progress), style=style), soft_wrap=True)
            return
        now = time.monotonic()
        if self._live is None:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        elif now - self._drawn < REFRESH_S:
            return
        self._drawn = now
        most = max(1, min(MOST_LINES, console.height - 3))
        self._live.update(_live_lines(list(self._now.values()), most, console.width), refresh=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def running_line(progress: Progress, width: int | None = None) -> str:
    """`run 2/4 gpt2_muon_2cpu  step 120/300  loss 2.71  val 2.80  41k tok/s  left 0:12`, less what is not known.

    width: columns that there are; what is worth least is left out, then the middle of the name.
    """
    parts = _parts(progress)
    while width is not None and len(_joined(parts)) > width and (optional := [part for part in parts if part[0]]):
        parts.remove(min(optional))
    text = _joined(parts)
    if width is not None and len(text) > width:
        name = progress.run
        text = text.replace(name, shortened(name, max(NAME_LEAST, len(name) - (len(text) - width))), 1)
    return text if width is None or len(text) <= width else text[: max(0, width - 1)] + ELLIPSIS


def _joined(parts: Sequence[tuple[int, str]]) -> str:
    return "  ".join(text for _, text in parts)


def _parts(progress: Progress) -> list[tuple[int, str]]:
    """Return what is to be said of a run that goes on, each with its worth; 0 must be said."""
    if progress.step is None:
        begun = "starting" if progress.status is Status.RUNNING else progress.status.value
    else:
        begun = f"step {progress.step}" + (f"/{progress.max_iters}" if progress.max_iters is not None else "")
    parts = [(0, _name(progress)), (0, begun)]
    if progress.loss is not None:
        parts.append((4, f"loss {progress.loss:.2f}"))
    if progress.val_loss is not None:
        parts.append((1, f"val {progress.val_loss:.2f}"))
    if progress.tokens_per_second is not None:
        parts.append((2, f"{short(progress.tokens_per_second)} tok/s"))
    if progress.left_s is not None:
        parts.append((5, f"left {clock(progress.left_s)}"))
    if progress.alerts:
        parts.append((3, f"{len(progress.alerts)} alert{'s' if len(progress.alerts) > 1 else ''}"))
    return [*parts, (0, progress.note)] if progress.note else parts


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


def colourless() -> bool:
    """Whether the user wants no colours (no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def _live_lines(runs: Sequence[Progress], most: int, width: int) -> Table:
    """For each run a bar and the line beside it, never wrapped; below them how the matrix stands.

    most: runs that there is room for.  width: columns.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    longest = max(len(running_line(run)) for run in runs)
    bar = min(BAR, width - longest - 1)
    line = Table.grid(padding=(0, 1), expand=False)
    if bar >= BAR_LEAST:
        line.add_column(width=bar)
    line.add_column(no_wrap=True, overflow="ellipsis")
    for run in runs[:most]:
        share = run.step / run.max_iters if run.step is not None and run.max_iters else 0.0
        drawn = [ProgressBar(total=1.0, completed=min(1.0, share), width=bar)] if bar >= BAR_LEAST else []
        text = running_line(run, None if drawn else width)
        line.add_row(*drawn, Text(text))
    last = _standing(runs[-1], len(runs) - most)
    if last:
        line.add_row(*([""] if bar >= BAR_LEAST else []), Text(last))
    return line


def _standing(progress: Progress, hidden: int) -> str:
    """`3 finished, 1 failed, 2 of 6 to come`, "" for a matrix of one run."""
    done = {name: count for name, count in progress.counts.items() if name not in ("planned", "running")}
    parts = [f"{count} {name}" for name, count in done.items()]
    to_come = progress.counts.get("planned", 0)
    parts += [f"{to_come} to come"] if to_come else []
    parts += [f"{hidden} more that run"] if hidden > 0 else []
    return ", ".join(parts)
