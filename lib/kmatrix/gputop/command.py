"""The command line of gputop."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.gpu.formats.samples import Snapshot
from kmatrix.gputop.csv_file import MOST_HZ, record_csv
from kmatrix.gputop.feeds import AttachedFeed, LiveFeed, ReplayFeed, SampleFeed
from kmatrix.gputop.loop import Session, follow, watch
from kmatrix.gputop.make import end_with_make
from kmatrix.gputop.snapshot import snapshot_entry
from kmatrix.gputop.stats_files import StatsFiles
from kmatrix.gputop.terminal.glyphs import glyphs_for
from kmatrix.gputop.terminal.screen import plain, render
from kmatrix.gputop.view import ScreenSample
from kmatrix.output import run_program

PLAIN_WIDTH = 120  # columns of --once, if the width of the terminal is unknown
MOST_WIDTH = 1000  # columns of --once: more than the widest table
LEAST_INTERVAL_S = 0.05  # 20 Hz, the recorder's default: the hardware updates its values at half of this rate
MOST_INTERVAL_S = 3600.0  # the system cannot wait for any number of seconds
LEAST_HZ = 0.001


def main(argv: Sequence[str]) -> int:
    """Run gputop and return the exit status. Raises KmatrixError for user errors."""
    options = _parser().parse_args(argv)
    if options.csv is not None:
        if options.run is not None or options.replay is not None:
            raise LaunchError(
                "--csv samples the driver",
                why="--run and --replay read a recording",
                hint="export it instead: python -m kmatrix.gpu.recorder RUN_DIR --format csv",
            )
        return record_csv(options.csv, hz=options.hz, asked=options.gpus, seconds=options.seconds)
    try:
        feed = _feed(options)
        try:
            return _show(feed, options)
        finally:
            feed.close()
    except ModuleNotFoundError as error:
        raise KmatrixError(
            str(error),
            why="a required package is not installed",
            hint="run `make setup`, then use .venv/bin/python",
        ) from None


def run(argv: Sequence[str]) -> int:
    """Run gputop as a program: print errors, and return the exit status."""
    return run_program(lambda: main(argv))


def _show(feed: SampleFeed, options: argparse.Namespace) -> int:
    session = Session(feed=feed, asked=options.gpus)
    # The first poll checks --gpus before statistics files are created or the screen is cleared.
    session.poll()
    is_single = options.json or options.once or (not _has_screen() and options.stats_file is None)
    if isinstance(feed, LiveFeed | AttachedFeed) and not session.is_empty and is_single:
        feed.poll_again()  # means over some time need a second reading
        session.poll()
    if options.stats_file is not None:
        session.stats = StatsFiles(options.stats_file)
    try:
        if options.json:
            _print_json(session)
            session.write()
        elif session.is_empty and not feed.grows:
            print(_nothing(session))
        elif _has_screen() and not options.once:
            _watch(session, options)
        elif options.stats_file is not None and not options.once:
            follow(session, interval=_interval(options), seconds=options.seconds)
        else:
            _print_once(session, options)
            session.write()
    finally:
        if session.stats is not None:
            session.stats.close()
    return _print_problem(session)


def _watch(session: Session, options: argparse.Namespace) -> None:
    console = Console(highlight=False)
    glyphs = glyphs_for("ascii" if options.ascii else sys.stdout.encoding)
    end_with_make()
    watch(session, console, glyphs, interval=_interval(options), seconds=options.seconds)


def _print_once(session: Session, options: argparse.Namespace) -> None:
    """Print the table as plain text, in the width of the terminal or of COLUMNS."""
    if session.is_empty:
        print(_nothing(session))
        return
    glyphs = glyphs_for("ascii" if options.ascii else sys.stdout.encoding)
    print(plain(render(session.view(), width=_width(), glyphs=glyphs)), end="")


def _print_json(session: Session) -> None:
    """Print one snapshot in the layout for several GPUs. Without GPUs, it is empty and a message goes to stderr."""
    if session.is_empty:
        print(_nothing(session), file=sys.stderr)
    sample = session.sample or ScreenSample(snapshot=Snapshot(time=session.feed.now(), samples=()))
    facts = session.feed.facts() if isinstance(session.feed, LiveFeed) else {}
    print(json.dumps(snapshot_entry(sample, facts), indent=2))


def _print_problem(session: Session) -> int:
    problem = session.stats.problem if session.stats is not None else ""
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _nothing(session: Session) -> str:
    return "; ".join(session.feed.notices()) or "no GPU: the NVIDIA driver reports none"


def _feed(options: argparse.Namespace) -> SampleFeed:
    if options.run is not None:
        return AttachedFeed(options.run)
    if options.replay is not None:
        return ReplayFeed(options.replay, at=options.at, from_end=options.once or options.json)
    return LiveFeed(interval=_interval(options))


def _interval(options: argparse.Namespace) -> float:
    """Return the refresh interval in s. Files can be read more often than the driver should be queried."""
    asked = options.interval
    if asked is None:
        return 1.0 if options.run is None and options.replay is None else 0.5
    return float(asked)


def _has_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _width() -> int:
    """Return COLUMNS, at most MOST_WIDTH, else the width of the terminal, else PLAIN_WIDTH."""
    # COLUMNS first: `watch` and scripts set it for a program whose output is a pipe.
    digits = os.environ.get("COLUMNS", "").lstrip("0")
    if digits.isdecimal():
        return MOST_WIDTH if len(digits) > len(str(MOST_WIDTH)) else min(MOST_WIDTH, int(digits))
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or PLAIN_WIDTH
    except (OSError, ValueError):
        return PLAIN_WIDTH


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gputop",
        description="Show all GPUs on one screen.",
        epilog="scripts/gputop.py also draws recordings: --gen-graph FILE, and --compare FILE FILE.",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--run", type=Path, metavar="RUN_DIR", help="attach to the recorder of a run instead of the driver"
    )
    source.add_argument("--replay", type=Path, metavar="RUN_DIR", help="replay the recording of a run")
    parser.add_argument(
        "--at", type=number_of("seconds"), metavar="S", help="start of the replay; negative: from its end"
    )
    parser.add_argument("--gpus", metavar="LIST", help="show only these GPUs, by index or UUID: 0,2")
    parser.add_argument("--once", action="store_true", help="print the table once, as text, and exit")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON and exit")
    parser.add_argument(
        "--stats-file", "--stats", type=Path, metavar="X.json", help="also write X.json and X_multi_gpu.json"
    )
    parser.add_argument("--seconds", type=number_of("seconds", 0.001), metavar="N", help="exit after N seconds")
    parser.add_argument("--interval", type=INTERVAL, metavar="S", help="refresh interval in seconds (default 1)")
    parser.add_argument("--csv", metavar="FILE", help="write samples as a table, without a screen; -: standard output")
    rate = number_of("samples per second", LEAST_HZ, MOST_HZ)
    parser.add_argument("--hz", type=rate, default=100.0, help=f"rate of --csv, up to {MOST_HZ:g} (default 100)")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    return parser


def number_of(unit: str, least: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Return what reads a number in an argument, for argparse. least, most: the permitted range."""
    if math.isfinite(most):
        permitted = f" from {least:g} to {most:g}"
    else:
        permitted = f", at least {least:g}" if math.isfinite(least) else ""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a number of {unit}{permitted}, not {text!r}")
        return value

    return read


INTERVAL = number_of("seconds", LEAST_INTERVAL_S, MOST_INTERVAL_S)  # between two samples
