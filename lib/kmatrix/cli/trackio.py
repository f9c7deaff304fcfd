"""The commands that show what Trackio holds: its page in a browser, and where that page is."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from urllib.parse import quote

from kmatrix.cli.again import yes
from kmatrix.cli.arguments import Arguments
from kmatrix.cli.pages import announce
from kmatrix.cli.project import own_project
from kmatrix.cli.session import shown
from kmatrix.cli.targets import results_dir
from kmatrix.cli.trackers import configured, need_trackers, port
from kmatrix.errors import ConfigError
from kmatrix.track.page import LOOPBACK, Page, StateFile, wait_for_the_end
from kmatrix.track.trackio import data_dir
from kmatrix.track.trackio_page import known_projects, served, take_in


def view(arguments: Arguments) -> int:
    """Serve Trackio's page until Ctrl+C; where it is served already, say where."""
    need_trackers(["trackio"])
    folder = data_dir(results_dir(arguments))
    take_in(folder)
    project, host, wanted = _project(arguments, folder), arguments.get("HOST", LOOPBACK), port(arguments, "trackio")
    state = StateFile(folder)
    with state.held() as held:
        if held is None:
            return _print_where(state.living(), project, arguments)
        with served(folder, host, wanted) as page:
            held.write(page)
            announce(f"Trackio's page of {shown(folder)}", page, _links(page, project), host=host, wanted=wanted)
            if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
                webbrowser.open(_link(page, project))  # without the token: others see a browser's arguments
            wait_for_the_end()
    print("\nTrackio's page has ended")
    return 0


def web(arguments: Arguments) -> int:
    """Print where Trackio's page is, or would be. Starts nothing. SHOW_TOKEN=1 shows the link that may delete."""
    folder = data_dir(results_dir(arguments))
    project = _project(arguments, folder) if known_projects(folder) else _wished(arguments)
    return _print_where(StateFile(folder).living(), project, arguments)


def _print_where(page: Page | None, project: str, arguments: Arguments) -> int:
    if page is None:
        print(f"URL: http://localhost:{configured(arguments, 'TRACKIO_PORT')}/?project={project}")
        print("not running; start with make trackio-view")
        return 0
    print("\n".join(_links(page, project)[: 2 if yes(arguments, "SHOW_TOKEN") else 1]))
    print(f"running, process {page.pid}")
    return 0


def _links(page: Page, project: str) -> list[str]:
    """Return the link for reading, and the one that may do more."""
    writing = f"{_link(page, project)}&write_token={quote(page.token)}"
    return [f"URL: {_link(page, project)}", f"to rename and delete runs as well: {writing}"]


def _link(page: Page, project: str) -> str:
    return f"{page.url}?project={project}&smoothing=0"  # the page smooths curves unless it is told not to


def _project(arguments: Arguments, folder: Path) -> str:
    """Return the project of PROJECT=, which must be there; else that of .config, where it is; else the newest."""
    known, asked = known_projects(folder), arguments.get("PROJECT")
    if not known:
        raise ConfigError(
            f"{shown(folder)} holds no project",
            why="no run has sent anything to Trackio yet",
            fix="run `make test-matrix TRACKER=trackio`, or pass RESULTS_DIR=<where the results are>",
        )
    if asked and asked not in known:
        raise ConfigError(
            f"PROJECT={asked} is not in {shown(folder)}", why=f"its projects, the newest last: {', '.join(known)}"
        )
    wished = _wished(arguments)
    return asked or (wished if wished in known else known[-1])


def _wished(arguments: Arguments) -> str:
    return arguments.get("PROJECT") or configured(arguments, "TRACKER_PROJECT") or own_project()
