"""The commands that show runs in the trackers' own pages: Trackio, TensorBoard, W&B, and a console table."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from kmatrix.cli.commands import Arguments, yes
from kmatrix.cli.targets import chosen_runs, find_target, look, results_dir, running_target
from kmatrix.cli.trackers import asked_project, configured, port
from kmatrix.errors import ConfigError, RecordError
from kmatrix.hosts import ServerAddress
from kmatrix.paste import make_command
from kmatrix.records.decode import replaced
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import MetricLine, RunRecord, read_run
from kmatrix.status.status_file import recover_status
from kmatrix.text import UNKNOWN, columns, count, duration, shown, table
from kmatrix.track.available import need_trackers, own_project
from kmatrix.track.page import Page, StateFile, page_address, wait_for_signal
from kmatrix.track.tensorboard import opening, recorded, serve
from kmatrix.track.trackio import data_dir, import_inbox, known_projects, prepare, served
from kmatrix.track.wandb import QUIET, WandbFiles

LAST_STEPS = 20  # rows per run: a page of a terminal
FORMS = {
    "train/loss": ("loss", "{:.4f}"),
    "val/loss": ("val", "{:.4f}"),
    "train/lr": ("lr", "{:.2e}"),
    "grad/norm": ("norm", "{:.2f}"),
}
TITLES = ("step", "tokens", "time", *(title for title, _ in FORMS.values()), "tok/s", "MFU")


def announce(title: str, page: Page, links: list[str], *, server: ServerAddress, wanted: int) -> None:
    """Print the URLs of a page. wanted: the port in the configuration."""
    taken = f" (port {wanted} is in use)" if page.port != wanted else ""
    print(f"{title}{taken}")
    for line in [*links, reach(server, page.port)]:
        print(f"  {line}")
    print("press Ctrl+C to stop", flush=True)


def reach(server: ServerAddress, port: int) -> str:
    """Return how to open the page from another machine, or a warning that everyone can."""
    if not server.is_open:
        name = socket.gethostname()
        return f"from another machine: ssh -L {port}:{server.url_host}:{port} {_user()}@{name}, then the same URL there"
    return f"warning: anyone who can connect to {server.address}, port {port}, can read these runs, under any host name"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in some containers
        return "<user>"


def trackio_view(arguments: Arguments) -> int:
    """Serve Trackio's page until Ctrl+C, or print its URL if it is already running."""
    need_trackers(["trackio"])
    folder = data_dir(results_dir(arguments))
    prepare(folder)
    import_inbox(folder)  # before the projects are listed: runs on a network file system only leave files
    project, wanted = _project(arguments, folder), port(arguments, "trackio")
    state = StateFile(folder)
    with state.held() as held:
        if held is None:  # another process serves this folder already
            return _print_where(state.living(), project, arguments, ignored=("HOST", "PORT"))
        server = page_address(arguments.get("HOST"))
        with served(folder, server, wanted) as page:
            held.write(page)
            announce(f"serving Trackio for {shown(folder)}", page, _links(page, project), server=server, wanted=wanted)
            # Without a display, webbrowser would start a text browser in this terminal.
            if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
                # Without the token: other users can see the command line of a browser.
                webbrowser.open(_link(page, project))
            wait_for_signal()
    print("\nstopped Trackio")
    return 0


def web(arguments: Arguments) -> int:
    """Print the URL of Trackio's page, running or not. SHOW_TOKEN=1 adds the link with write access."""
    folder = data_dir(results_dir(arguments))
    project = _project(arguments, folder) if known_projects(folder) else _project_name(arguments)
    return _print_where(StateFile(folder).living(), project, arguments)


def _print_where(page: Page | None, project: str, arguments: Arguments, *, ignored: Sequence[str] = ()) -> int:
    """Print the address of a page, running or not. ignored: arguments of a server that this command does not start."""
    if page is None:
        print(f"URL: http://localhost:{configured(arguments, 'TRACKIO_PORT')}/?project={project}")
        asked = {name: arguments.get(name) for name in ("PROJECT",) if arguments.get(name)}
        print(f"not running: start it with {make_command('trackio-view', **asked)}")
        return 0
    print("\n".join(_links(page, project)[: 2 if yes(arguments, "SHOW_TOKEN") else 1]))
    print(f"running (pid {page.pid})")
    asked = {name: arguments.get(name) for name in ignored}
    if given := [f"{name}={text}" for name, text in asked.items() if text and text != str(page.port)]:
        print(f"note: {' and '.join(given)} ignored: the page is served already; stop that process first")
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
    wanted, server = port(arguments, "tensorboard"), page_address(arguments.get("HOST"))
    page = serve(folder, server, wanted)
    announce(f"serving TensorBoard for {shown(folder)}", page, [f"URL: {opening(page)}"], server=server, wanted=wanted)
    wait_for_signal()
    print("\nstopped TensorBoard")
    return 0


def wandb_view(arguments: Arguments) -> int:
    """Show the runs of TARGET= that match RUN= in W&B's terminal screen, which works offline and without a key.

    Return the exit status of the screen. Raises ConfigError without W&B data, or without a terminal.
    """
    need_trackers(("wandb",))
    matrix = find_target(arguments)
    runs = chosen_runs(matrix, arguments)
    with_data = [run for run in runs if WandbFiles(run.path).sessions]
    if not with_data:
        raise ConfigError(
            f"no W&B data in {shown(matrix.path)} for {', '.join(run.name for run in runs)}",
            why="these runs used no TRACKER=wandb, or have not started",
            hint="pass TARGET=<another matrix>, or run with TRACKER=wandb",
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "wandb-view needs a terminal",
            hint=f"run it in one, or: wandb leet inspect --json {shown(WandbFiles(with_data[0].path).sessions[-1])}",
        )
    if missing := [run.name for run in runs if run not in with_data]:
        print(f"no W&B data: {', '.join(missing)}")
    # The screen shows one folder with W&B's own layout, so a temporary one collects the runs.
    with tempfile.TemporaryDirectory() as folder:
        gather(with_data, Path(folder))
        command = [sys.executable, "-m", "wandb", "leet", folder]
        return subprocess.run(command, env={**os.environ, **QUIET}, check=False).returncode


def gather(runs: Sequence[RunDir], folder: Path) -> None:
    """Link the files of all runs into one folder with W&B's own layout, named after the runs.

    A run with several sessions has one entry per session: <name>, <name>.2, ... W&B's screen reads the time from the
    name of an entry, and lists the newest first.
    """
    for run in runs:
        for number, session in enumerate(WandbFiles(run.path).sessions, start=1):
            name = run.name if number == 1 else f"{run.name}.{number}"
            time = re.search(r"\d{8}_\d{6}", session.name)
            entry = folder / f"run-{time[0] if time else '00000000_000000'}-{name}"
            entry.mkdir()
            # Linked, not copied: the screen follows a file that is still being written.
            (entry / f"run-{name}.wandb").symlink_to(next(session.glob("run-*.wandb")).resolve())


def console(arguments: Arguments) -> int:
    """Print the newest values of each run; with RUN=<pattern>, the last steps of each matching run."""
    matrix = running_target(arguments) or find_target(arguments)
    records = [read_run(run) for run in chosen_runs(matrix, arguments)]
    activity = look(matrix)
    statuses = {
        one.dir.name: str(recover_status(one.dir, has_runner=activity.has_runner(one.dir.name)).status)
        for one in records
    }
    print(matrix.name)
    if not arguments.get("RUN"):
        rows = [(one.dir.name, statuses[one.dir.name], *cells(newest(one))) for one in records]
        print("\n".join(table(columns(("run", "status", *TITLES), (0, 1)), rows)))
        return 0
    for one in records:
        rows = [cells(line) for line in one.metrics[-LAST_STEPS:]]
        print(f"\n{one.dir.name}: {statuses[one.dir.name]}")
        print("\n".join(table(columns(TITLES, ()), rows)) if rows else "no step logged yet")
    return 0


def newest(run: RunRecord) -> MetricLine | None:
    """Return the newest value of each metric, as a line of the last step; None before the first step."""
    found: dict[str, float | None] = {}
    for line in run.metrics:
        found |= {name: value for name, value in line.values.items() if value is not None}
    return replaced(run.metrics[-1], values=found) if run.metrics else None


def cells(line: MetricLine | None) -> tuple[str, ...]:
    """Return the metrics of a step as the cells of a table row."""
    values = line.values if line else {}
    used = values.get("throughput/mfu")
    return (
        str(line.step) if line else UNKNOWN,
        count(values.get("tokens")),
        duration(values.get("elapsed_s")),
        *(UNKNOWN if values.get(name) is None else form.format(values[name]) for name, (_, form) in FORMS.items()),
        count(values.get("throughput/tokens_per_s")),
        UNKNOWN if used is None else f"{used:.1%}",
    )
