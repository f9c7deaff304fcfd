"""Show running runs: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from kmatrix.records.runs import Status
from kmatrix.redaction.log import RedactedLog
from kmatrix.status.alerts import Alert, AlertKind, Severity, one_line
from kmatrix.status.watch import RunProgress
from kmatrix.text import ELLIPSIS, NAME_LEAST, count, duration, plural, printable, shortened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table


MOST_LINES = 8  # runs that are drawn at a time
EVERY_S = 30.0  # between two plain lines of a run
REFRESH_S = 0.25  # between two drawings of the live line
BAR, BAR_LEAST = 24, 8  # columns; a bar that would be shorter is left out
GONE = frozenset({errno.EIO, errno.EPIPE, errno.EBADF, errno.ENOSPC, errno.ENXIO})  # ENOSPC: /dev/full
LIVE = (Status.PLANNED, Status.RUNNING)  # a planned run is shown only while it waits for something


COLOURS = {
    Status.RUNNING: "cyan",
    Status.FINISHED: "green",
    Status.FAILED: "red",
    Status.STOPPED: "yellow",
    Status.SKIPPED: "yellow",
}


class ProgressDisplay:
    """Show the progress of all runs, one line per running run. Leaving the context restores the terminal.

    A closed stream stops the display, never the runs; a closed terminal switches to plain lines.
    """

    def __init__(
        self, stream: TextIO | None = None, *, every_s: float = EVERY_S, terminal: Terminal | None = None
    ) -> None:
        self._terminal = terminal
        self._stream = stream or sys.stdout
        self._own = stream is None  # the output of the command
        self._every_s = every_s
        self._dead = False
        self._shown: dict[str, float] = {}  # run -> monotonic seconds of its last plain line
        self._printed: set[tuple[str, AlertKind, str, float]] = set()  # alerts that were printed
        self._now: dict[str, RunProgress] = {}  # the runs in progress
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

    def __call__(self, progress: RunProgress) -> None:
        """Show the progress of a run."""
        # The terminal was closed: leave it now, not in the signal handler, which may interrupt a write.
        if self._terminal is not None and self._terminal.lost:
            self.__exit__(None, None, None)
            self._console = self._live = None
            self._terminal.leave()
            self._dead = False
        if self._dead:
            return
        try:
            for alert in self._new_alerts(progress):
                self._print_alert(progress, alert)
            if self._console is not None:
                self._draw(self._console, progress)
            else:
                self._print(progress)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._lose()

    def _lose(self) -> None:
        """Stop drawing; the rest goes to the log of the runner, if it has one."""
        self._dead = True
        if self._terminal is not None and self._own:
            self._terminal.lost = True

    def note(self, text: str) -> None:
        """Print a note as a permanent line."""
        if self._dead:
            return
        try:
            self._print_permanent(f"note: {text}", "yellow")
        except (OSError, ValueError):
            self._lose()

    def _new_alerts(self, progress: RunProgress) -> list[Alert]:
        """Return the alerts that were not printed yet; each is printed once."""
        new = []
        for alert in progress.alerts:
            key = (progress.run, alert.kind, alert.about, alert.since)
            if key not in self._printed:
                self._printed.add(key)
                new.append(alert)
        return new

    def _print_alert(self, progress: RunProgress, alert: Alert) -> None:
        style = "red" if alert.severity is Severity.CRITICAL else "yellow"
        self._print_permanent(f"! {progress.run}  {one_line(alert)}", style)

    def _print_permanent(self, text: str, style: str) -> None:
        """Print a permanent line, above the live lines on a terminal."""
        text = printable(text)
        if self._console is None:
            self._stream.write(text + "\n")
            self._stream.flush()
            return
        from rich.text import Text

        # soft_wrap: the terminal wraps, so that a copied line has no line breaks.
        self._console.print(Text(text, style="" if colourless() else style), soft_wrap=True)

    def _print(self, progress: RunProgress) -> None:
        """Print a line at the start, every 30 s and at the end."""
        now, before = time.monotonic(), self._shown.get(progress.run)
        if progress.status in LIVE:
            if before is not None and now - before < self._every_s:
                return
            self._shown[progress.run] = now
        text = running_line(progress) if progress.status in LIVE else ended_line(progress)
        self._stream.write(printable(text) + "\n")
        self._stream.flush()

    def _draw(self, console: Console, progress: RunProgress) -> None:
        """Draw the live line of a running run, or print the final line of one that ended."""
        from rich.live import Live
        from rich.text import Text

        self._now[progress.run] = progress
        if progress.status not in LIVE:
            del self._now[progress.run]
            self._end_live()  # the live lines disappear, so that the final line is not drawn over
            style = "" if colourless() else COLOURS.get(progress.status, "")
            console.print(Text(printable(ended_line(progress)), style=style), soft_wrap=True)
            return
        now = time.monotonic()
        if self._live is None:
            # auto_refresh would start a thread, although progress is reported several times per second.
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        elif now - self._drawn < REFRESH_S:
            return
        self._drawn = now
        most = max(1, min(MOST_LINES, console.height - 3))  # a display as high as the terminal would scroll
        self._live.update(_live_lines(list(self._now.values()), most, console.width), refresh=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def running_line(progress: RunProgress, width: int | None = None) -> str:
    """Return `run 2/4 gpt2_muon_2cpu  step 120/300  loss 2.71  val 2.80  41k tok/s  left 12s`, without unknown values.

    width: if the line is longer, drop optional parts, then shorten the name.
    """
    parts = _parts(progress)
    while width is not None and len(_joined(parts)) > width and (optional := [part for part in parts if part[0]]):
        parts.remove(min(optional))  # the lowest number is the least important part
    text = _joined(parts)
    if width is not None and len(text) > width:
        name = progress.run
        text = text.replace(name, shortened(name, max(NAME_LEAST, len(name) - (len(text) - width))), 1)
    return text if width is None or len(text) <= width else text[: max(0, width - 1)] + ELLIPSIS


def _joined(parts: Sequence[tuple[int, str]]) -> str:
    return "  ".join(text for _, text in parts)


def _parts(progress: RunProgress) -> list[tuple[int, str]]:
    """Return the parts of the line of a running run, each with its priority; 0 is always shown."""
    if progress.step is None:
        begun = "starting" if progress.status is Status.RUNNING else progress.status.value
        if progress.status is Status.RUNNING and progress.start:
            begun = f"resuming at {_step(progress.start, progress.max_iters)}"
    else:
        begun = _step(progress.step, progress.max_iters)
    parts = [(0, _name(progress)), (0, begun)]
    if progress.loss is not None:
        parts.append((4, f"loss {progress.loss:.2f}"))
    if progress.val_loss is not None:
        parts.append((1, f"val {progress.val_loss:.2f}"))
    if progress.tokens_per_second is not None:
        parts.append((2, f"{count(progress.tokens_per_second)} tok/s"))
    if progress.left_s is not None:
        parts.append((5, f"left {duration(progress.left_s)}"))
    if progress.alerts:
        parts.append((3, f"{plural(len(progress.alerts), 'alert')}"))
    return [*parts, (0, progress.note)] if progress.note else parts


def _step(step: int, until: int | None) -> str:
    return f"step {step}" + (f"/{until}" if until is not None else "")


def ended_line(progress: RunProgress) -> str:
    """Return `run 2/4 gpt2_muon_2cpu  finished  val 2.8012  1m23s`, with the reason of a failure."""
    parts = [_name(progress), progress.status.value]
    if progress.val_loss is not None:
        parts.append(f"val {progress.val_loss:.4f}")
    if progress.elapsed_s is not None:
        parts.append(duration(progress.elapsed_s))
    if progress.reason:
        parts.append(progress.reason)
    return "  ".join(parts)


def _name(progress: RunProgress) -> str:
    place = f" {progress.index}/{progress.total}" if progress.index else ""
    return f"run{place} {progress.run}"


def colourless() -> bool:
    """Return whether NO_COLOR disables colors (no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def _live_lines(runs: Sequence[RunProgress], most: int, width: int) -> Table:
    """Return a progress bar and a line per run, never wrapped, and the totals of the matrix.

    most: number of runs that fit.  width: columns.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    # The bars of all runs have the same width: what the longest line leaves, or none at all.
    longest = max(len(running_line(run)) for run in runs)
    bar = min(BAR, width - longest - 1)
    line = Table.grid(padding=(0, 1), expand=False)
    if bar >= BAR_LEAST:
        line.add_column(width=bar)
    line.add_column(no_wrap=True, overflow="ellipsis")
    for run in runs[:most]:
        step = run.start if run.step is None else run.step
        share = step / run.max_iters if step is not None and run.max_iters else 0.0
        drawn = [ProgressBar(total=1.0, completed=min(1.0, share), width=bar)] if bar >= BAR_LEAST else []
        text = running_line(run, None if drawn else width)
        line.add_row(*drawn, Text(printable(text)))
    last = _matrix_counts(runs[-1], len(runs) - most)
    if last:
        line.add_row(*([""] if bar >= BAR_LEAST else []), Text(last))
    return line


def _matrix_counts(progress: RunProgress, hidden: int) -> str:
    """Return `3 finished, 1 failed, 2 pending`, "" for a matrix of one run."""
    done = {name: count for name, count in progress.counts.items() if name not in ("planned", "running")}
    parts = [f"{count} {name}" for name, count in done.items()]
    to_come = progress.counts.get("planned", 0) - progress.reserve
    parts += [f"{to_come} pending"] if to_come > 0 else []
    parts += [f"{progress.reserve} in reserve"] if progress.reserve else []
    parts += [f"{hidden} more running"] if hidden > 0 else []
    return ", ".join(parts)


class Terminal:
    """The output of a runner. lost: SIGHUP was received, and `leave` was not called yet."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._written: RedactedLog | None = None  # kept: closing its pipe would end this process at the next print
        self.lost = False

    def outlive(self, action: Callable[[], object]) -> None:
        """Call an action that prints; if the terminal is gone, with or without SIGHUP, let it print to the log.

        The action is called again if the terminal is found to be gone while it prints.
        """
        if self.lost:
            self.leave()
        try:
            action()
            if sys.stdout is not None:
                sys.stdout.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if isinstance(error, OSError) and error.errno not in GONE:
                raise
            self.leave()
            action()

    def leave(self) -> None:
        """Write all output to the log from now on."""
        self.lost = False
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError):
            # The descriptors, not sys.stdout: libraries and child processes write to 1 and 2 as well.
            self._written = log = RedactedLog(self._log, Path(sys.executable))
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            log.started()


@contextmanager
def outlived(log: Path) -> Iterator[Terminal]:
    """Keep running after the terminal is closed: record SIGHUP. An ignored SIGHUP (nohup) stays ignored."""
    terminal = Terminal(log)

    def lose(*_: object) -> None:
        terminal.lost = True  # nothing else: a handler that writes can interrupt another write

    former = signal.getsignal(signal.SIGHUP)
    if former is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lose)
    try:
        yield terminal
    finally:
        signal.signal(signal.SIGHUP, former)
