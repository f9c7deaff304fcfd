"""gputop: all GPUs on one screen, live, from a recorder's files, or as the replay of a run; `main` is its command."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kmatrix.errors import KmatrixError
from kmatrix.gpu.formats import Snapshot, multi
from kmatrix.gpu.top.feeds import AttachedFeed, Feed, ReplayFeed
from kmatrix.gpu.top.live import GPUMonitor, LiveFeed

if TYPE_CHECKING:
    from kmatrix.gpu.top.loop import Session

PLAIN_WIDTH = 120  # columns of --once where nothing says how wide the terminal is
LEAST_INTERVAL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Run gputop with these arguments and return the exit status; raises KmatrixError for what the user can mend."""
    options = _parser().parse_args(argv)
    try:
        feed = _feed(options)
        try:
            return _run(feed, options)
        finally:
            feed.close()
    except ModuleNotFoundError as error:
        raise KmatrixError(
            str(error), why="this Python lacks what kmatrix needs", fix="run `make setup`, then use .venv/bin/python"
        ) from None


def _run(feed: Feed, options: argparse.Namespace) -> int:
    from kmatrix.gpu.top.loop import Session, follow
    from kmatrix.gpu.top.stats_file import StatsFiles

    session = Session(feed=feed, asked=options.gpus)
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
        return _say_problem(session)
    finally:
        if session.stats is not None:
            session.stats.close()


def _watch(session: Session, options: argparse.Namespace) -> None:
    from rich.console import Console

    from kmatrix.gpu.top.ink import glyphs
    from kmatrix.gpu.top.loop import watch

    console = Console(highlight=False)
    signs = glyphs("ascii" if options.ascii else sys.stdout.encoding)
    watch(session, console, signs, interval=_interval(options), seconds=options.seconds)


def _print_once(session: Session, options: argparse.Namespace) -> None:
    """Print the table as plain text, as wide as the terminal or COLUMNS say."""
    from kmatrix.gpu.top.ink import glyphs
    from kmatrix.gpu.top.screen import plain, render

    if session.is_empty:
        print(_nothing(session))
        return
    signs = glyphs("ascii" if options.ascii else sys.stdout.encoding)
    print(plain(render(session.view(), width=_width(), signs=signs)), end="")


def _print_json(session: Session) -> None:
    """Print one snapshot in the layout for several GPUs; without GPUs an empty one, and a sentence beside it."""
    if session.is_empty:
        print(_nothing(session), file=sys.stderr)
    snapshot = session.moment.snapshot if session.moment else Snapshot(time=session.feed.now(), samples=())
    print(json.dumps(multi(snapshot), indent=2))


def _say_problem(session: Session) -> int:
    problem = session.stats.problem if session.stats is not None else ""
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _nothing(session: Session) -> str:
    return "; ".join(session.feed.notices()) or "no GPU: neither NVIDIA's driver nor AMD's knows of one"


def _feed(options: argparse.Namespace) -> Feed:
    if options.run is not None:
        return AttachedFeed(options.run)
    if options.replay is not None:
        return ReplayFeed(options.replay, at=options.at, from_end=options.once or options.json)
    return LiveFeed()


def _interval(options: argparse.Namespace) -> float:
    """Return the seconds between two moments: files can be read oftener than a driver should be asked."""
    asked = options.interval
    if asked is None:
        return 1.0 if options.run is None and options.replay is None else 0.5
    return max(LEAST_INTERVAL_S, float(asked))


def _has_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _width() -> int:
    """Return COLUMNS, else the width of the terminal; PLAIN_WIDTH where neither says one."""
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]):
        return int(os.environ["COLUMNS"])
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or PLAIN_WIDTH
    except (OSError, ValueError):
        return PLAIN_WIDTH


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gputop", description="All GPUs on one screen.", allow_abbrev=False)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--run", type=Path, metavar="RUN_DIR", help="follow the recorder of a run instead of the driver"
    )
    source.add_argument("--replay", type=Path, metavar="RUN_DIR", help="play the recording of a run")
    parser.add_argument("--at", type=_number, metavar="S", help="where a replay begins; negative: before its end")
    parser.add_argument("--gpus", metavar="LIST", help="only these, by index or UUID: 0,2")
    parser.add_argument("--once", action="store_true", help="print the table once, as text")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    parser.add_argument("--stats-file", type=Path, metavar="X.json", help="write X.json and X_multi_gpu.json meanwhile")
    parser.add_argument("--seconds", type=_positive, metavar="N", help="end after N seconds")
    parser.add_argument("--interval", type=_positive, metavar="S", help="seconds between two moments (default 1)")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII signs only")
    return parser


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


__all__ = ["GPUMonitor", "main"]
