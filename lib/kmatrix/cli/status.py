"""The command that shows how a matrix stands: live on a terminal, plain elsewhere, as JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from kmatrix.cli.again import yes
from kmatrix.cli.arguments import Arguments
from kmatrix.cli.progress import COLOURS, colourless
from kmatrix.cli.screen import Line, screen
from kmatrix.cli.targets import find_target, running_target
from kmatrix.launch.overview import Overview
from kmatrix.launch.views import MatrixView
from kmatrix.records import SCHEMA

if TYPE_CHECKING:
    from rich.text import Text

EVERY_S = 1.0


def status(arguments: Arguments) -> int:
    """Show the matrix that is running, else the newest, or TARGET=."""
    overview = Overview(running_target(arguments) or find_target(arguments))
    if yes(arguments, "JSON"):
        print(json.dumps(as_json(overview.look()), indent=2))
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        watch(overview)
    else:
        print("\n".join(plain(overview.look(), columns())))
    return 0


def as_json(view: MatrixView) -> dict[str, object]:
    """Return the whole view for programs; unknown is None."""
    return {"schema": SCHEMA, **asdict(view), "counts": view.counts}


def plain(view: MatrixView, width: int | None = None) -> list[str]:
    """Return the view as lines without colours: a sentence, tables, and what is to be said of single runs."""
    return [line.text for line in screen(view, width=width)]


def columns() -> int | None:
    """Return the width that COLUMNS asks for, as `watch` does for what it runs; None for as wide as is needed."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) else None


def watch(overview: Overview) -> None:
    """Draw the view until the runner has ended, or Ctrl+C; the last one stays."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    view = overview.look()
    if view.running:
        with Live(console=console, auto_refresh=False, transient=True) as live, suppress(KeyboardInterrupt):
            while view.running:
                live.update(drawn(screen(view, width=console.width, height=console.height - 1)), refresh=True)
                time.sleep(EVERY_S)
                view = overview.look()
    console.print(drawn(screen(view, width=console.width)))


def drawn(lines: list[Line]) -> Text:
    """Return the lines for a terminal, in colours unless NO_COLOR says otherwise."""
    from rich.text import Text

    text = Text("\n".join(line.text for line in lines), no_wrap=True, overflow="ellipsis")
    start = 0
    for line in lines if not colourless() else ():
        begin, end = line.part or (0, len(line.text))
        style = "bold" if line.head else COLOURS.get(line.about, "") if line.about else ""
        if style:
            text.stylize(style, start + begin, start + end)
        start += len(line.text) + 1
    return text
