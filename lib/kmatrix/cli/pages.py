"""The commands that show runs on the trackers' own pages: Trackio and TensorBoard."""

from __future__ import annotations

import os
import socket
import webbrowser
from pathlib import Path
from urllib.parse import quote

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import find_target, results_dir
from kmatrix.cli.trackers import asked_project, configured
from kmatrix.errors import ConfigError, RecordError
from kmatrix.hosts import LOOPBACK
from kmatrix.text import shown
from kmatrix.track.available import need_trackers, own_project
from kmatrix.track.page import Page, StateFile, wait_for_signal
from kmatrix.track.tensorboard import opening, recorded, serve
from kmatrix.track.trackio import data_dir, import_inbox, known_projects, prepare, served

TRACKIO_PORT, TENSORBOARD_PORT = 7860, 6006  # the usual ones of these programs; the next free one if it is taken


def announce(title: str, page: Page, links: list[str], *, wanted: int) -> None:
    """Print the URLs of a page. wanted: the port in the configuration."""
    taken = f" (port {wanted} is in use)" if page.port != wanted else ""
    print(f"{title}{taken}")
    forward = f"from another machine: ssh -L {page.port}:{LOOPBACK[0]}:{page.port} {socket.gethostname()}"
    for line in [*links, f"{forward}, then the same URL there"]:
        print(f"  {line}")
    print("press Ctrl+C to stop", flush=True)


def trackio_view(arguments: Arguments) -> int:
    """Serve Trackio's page until Ctrl+C, or print its URL if it is already running."""
    need_trackers(["trackio"])
    folder = data_dir(results_dir(arguments))
    prepare(folder)
    import_inbox(folder)  # before the projects are listed: runs on a network file system only leave files
    project, wanted = _project(arguments, folder), arguments.number("PORT") or TRACKIO_PORT
    state = StateFile(folder)
    with state.held() as held:
        if held is None:  # another process serves this folder already
            return _print_served(state.living(), project, arguments)
        with served(folder, wanted) as page:
            held.write(page)
            announce(f"serving Trackio for {shown(folder)}", page, _links(page, project), wanted=wanted)
            # Without a display, webbrowser would start a text browser in this terminal.
            if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
                # Without the token: other users can see the command line of a browser.
                webbrowser.open(_link(page, project))
            wait_for_signal()
    print("\nstopped Trackio")
    return 0


def web(arguments: Arguments) -> int:
    """Print the URL of Trackio's page, running or not."""
    folder = data_dir(results_dir(arguments))
    if page := StateFile(folder).living():
        return _print_served(page, _project(arguments, folder), arguments)
    project = _project(arguments, folder) if known_projects(folder) else _project_name(arguments)
    print(f"URL: http://localhost:{TRACKIO_PORT}/?project={project}")
    print("not running: start it with make trackio-view")
    return 0


def _print_served(page: Page | None, project: str, arguments: Arguments) -> int:
    """Print the address of a page that another process serves, and the arguments that it cannot follow."""
    if page is None:
        raise RecordError("another process is starting or ending the page", hint="run it again in a few seconds")
    print(f"URL: {_link(page, project)}")
    print(f"running (pid {page.pid})")
    if arguments.get("PORT", str(page.port)) != str(page.port):
        print(f"note: PORT={arguments.get('PORT')} ignored: the page is served already; stop that process first")
    return 0


def _links(page: Page, project: str) -> list[str]:
    """Return the read-only link and the link with write access."""
    writing = f"{_link(page, project)}&write_token={quote(page.token)}"
    return [f"URL: {_link(page, project)}", f"with write access (rename and delete runs): {writing}"]


def _link(page: Page, project: str) -> str:
    return f"{page.url}?project={project}&smoothing=0"  # the page smooths curves by default


def _project(arguments: Arguments, folder: Path) -> str:
    """Return the project of PROJECT=, which must exist; else that of .config if it exists; else the newest."""
    known, asked = known_projects(folder), arguments.get("PROJECT")
    if not known:
        raise ConfigError(
            f"no Trackio project in {shown(folder)}",
            why="no run has uploaded anything to Trackio yet",
            hint="run `make test-matrix TRACKER=trackio`, or pass RESULTS_DIR=<results folder>",
        )
    if asked and asked not in known:
        raise ConfigError(
            f"unknown PROJECT={asked} in {shown(folder)}", why=f"known projects, newest last: {', '.join(known)}"
        )
    configured_name = _project_name(arguments)
    return asked or (configured_name if configured_name in known else known[-1])


def _project_name(arguments: Arguments) -> str:
    """Return PROJECT=, else the project of .config, else the default of this user."""
    return asked_project(arguments) or configured(arguments, "TRACKER_PROJECT") or own_project()


def show(arguments: Arguments) -> int:
    """Serve TensorBoard for TARGET=, the newest matrix by default, until Ctrl+C."""
    matrix = find_target(arguments)
    folder = matrix.tensorboard
    if not recorded(folder):
        raise RecordError(
            f"no TensorBoard data in {shown(matrix.path)}",
            hint="run a matrix with TRACKER=tensorboard, or pass TARGET=<matrix>",
        )
    need_trackers(["tensorboard"])
    wanted = arguments.number("PORT") or TENSORBOARD_PORT
    page = serve(folder, wanted)
    announce(f"serving TensorBoard for {shown(folder)}", page, [f"URL: {opening(page)}"], wanted=wanted)
    wait_for_signal()
    print("\nstopped TensorBoard")
    return 0
