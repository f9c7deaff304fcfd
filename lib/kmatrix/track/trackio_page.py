"""Trackio's page of every project in a folder: the server, started so that it reaches nobody and nobody reaches it."""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kmatrix.errors import LaunchError
from kmatrix.track.page import Page, free_port
from kmatrix.track.trackio import prepare


def known_projects(folder: Path) -> list[str]:
    """Return the projects that have a database; that of the newest point is the last."""
    return [path.stem for path in sorted(folder.glob("*.db"), key=_newest)]


def take_in(folder: Path) -> None:
    """Put what runs left on a network's disk into the databases; a server goes on with that while it lives."""
    if any(folder.glob("inbox/*/*.jsonl")):
        prepare(folder)
        from trackio.fragments import import_inbox_dir

        import_inbox_dir()


@contextlib.contextmanager
def served(folder: Path, host: str, port: int) -> Iterator[Page]:
    """Serve the page from the first free port from `port` upward, until the end of the `with`."""
    prepare(folder)
    os.environ["GRADIO_SERVER_PORT"] = str(free_port(host, port))  # it looks for the next one by itself
    import trackio

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # its own words hold the token
            server, url, _, _ = trackio.show(
                open_browser=False, block_thread=False, host=host, share=False, mcp_server=False
            )
    except (OSError, RuntimeError, sqlite3.Error) as error:
        raise LaunchError(
            f"a page of {folder} cannot be served",
            why=f"Trackio says: {error}",
            fix="move a damaged database away; make track-replay TRACKER=trackio TARGET=<matrix> sends its runs again",
        ) from None
    try:
        yield Page(url=url, port=urlsplit(url).port or port, pid=os.getpid(), token=server.write_token)
    finally:
        server.close()


def _newest(database: Path) -> tuple[str, str]:
    """Return when a project was written to last, and its name: a server touches every file as it starts."""
    try:
        with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as opened:
            row = opened.execute("SELECT timestamp FROM metrics ORDER BY id DESC LIMIT 1").fetchone()
    except sqlite3.Error:
        row = None
    return (row[0] if row else "", database.stem)
