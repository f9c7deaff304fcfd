"""What is sent to trackers after the runs: the rest at a matrix's end, and what they lack at any later time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.project import own_project
from kmatrix.cli.session import ROOT, shown
from kmatrix.cli.targets import chosen_runs, find_target
from kmatrix.cli.trackers import need_trackers
from kmatrix.errors import ConfigError
from kmatrix.kconfig.sets import parse_trackers
from kmatrix.launch.track import Trackers, kill, start
from kmatrix.records import RunDir, read_json
from kmatrix.records.tracking import Sending, Sent, is_fed, read_track, sent_of

SHOW_S = 1.0  # a wait that is shorter is not told
LOOK_S = 0.2
PATIENCE_S = 60.0  # at least, of a replay: who asks for it can end it


def replay(arguments: Arguments) -> int:
    """Send what trackers lack of the runs of a matrix; return 0 when they lack nothing any more, else 1.

    Without TRACKER= those that the matrix ran with, as track.json has them; with it each is asked what it holds.
    """
    matrix = find_target(arguments)
    asked = parse_trackers(arguments.get("TRACKER")) if arguments.get("TRACKER") else ()
    runs = [run for run in chosen_runs(matrix, arguments) if run.metrics.exists()]
    wanted = {run: asked or _lacking(run) for run in runs}
    if not asked and runs and not any(_chosen(run) or read_track(run) for run in runs):
        raise ConfigError(
            f"{shown(matrix.path)} ran without trackers", fix="pass TRACKER=wandb, trackio or tensorboard"
        )
    need_trackers(sorted({name for names in wanted.values() for name in names}))
    if not any(wanted.values()):
        print(f"{shown(matrix.path)}: trackers lack nothing of {len(runs)} runs")
    return max([_send(run, names, arguments.get("PROJECT")) for run, names in wanted.items() if names], default=0)


def send_rest(trackers: Trackers) -> None:
    """Wait until everything is sent, or the limits are over, or Ctrl+C: then the rest is left."""
    since = time.monotonic()
    line = _Line()
    try:
        while sending := trackers.sending():
            seconds = time.monotonic() - since
            if seconds >= SHOW_S:
                names = ", ".join(sorted({name for run in sending.values() for name in run}))
                line.show(f"sending the rest to {names}: {seconds:.0f} s, Ctrl+C leaves it for make track-replay")
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        trackers.kill()
    finally:
        line.end()


def _send(run: RunDir, names: Sequence[str], project: str) -> int:
    """Send what these trackers lack of one run, and say how that went."""
    if is_fed(run):
        print(f"{run.name}: a process sends it now")
        return 1
    before = {sent.tracker: sent.points for sent in read_track(run)}
    project = project or str(_tracking(run).get("project") or own_project())
    limit = str(max(PATIENCE_S, float(_tracking(run).get("limit_s") or 0)))
    words = ["--trackers", ",".join(names), "--project", project, "--limit", limit]
    process, line = start(Path(sys.executable), ROOT, run, *words), _Line(only_terminal=True)
    try:
        while process.poll() is None:
            line.show(f"{run.name}: {', '.join(_progress(sent) for sent in read_track(run) if sent.tracker in names)}")
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        kill(process)
        raise
    finally:
        line.end()
    now = {sent.tracker: sent for sent in read_track(run)}
    for name in names:
        print(f"{run.name}: {_outcome(now.get(name), name, before.get(name, 0), process)}")
    return 0 if all(name in now and now[name].state is Sending.DONE for name in names) else 1


def _progress(sent: Sent) -> str:
    return f"{sent.tracker} {sent.points}/{sent.points + sent.waiting}"


def _outcome(sent: Sent | None, name: str, before: int, process: subprocess.Popen[bytes]) -> str:
    """Return one sentence about one tracker of a run."""
    if sent is None:
        return f"nothing was sent to {name}: its process ended with status {process.returncode}, see track.log"
    if sent.state is Sending.DONE:
        where = f", {sent.link}" if sent.link else ""
        return f"{name} has all {sent.points} steps, {max(0, sent.points - before)} of them new{where}"
    return f"{name} lacks {sent.waiting} of {sent.points + sent.waiting} steps: {sent.error or 'see track.log'}"


def _chosen(run: RunDir) -> tuple[str, ...]:
    return tuple(str(name) for name in _tracking(run).get("trackers") or ())


def _lacking(run: RunDir) -> tuple[str, ...]:
    """Return the trackers that do not hold all of a run, by what track.json says."""
    whole = {sent.tracker for sent in sent_of(run) if sent.state is Sending.DONE}
    known = [*_chosen(run), *(sent.tracker for sent in read_track(run))]
    return tuple(name for name in dict.fromkeys(known) if name not in whole)


def _tracking(run: RunDir) -> dict[str, Any]:
    value = read_json(run.run_json).get("tracking")
    return value if isinstance(value, dict) else {}


class _Line:
    """One line that is written over: on a terminal with each call, elsewhere the first one only."""

    def __init__(self, *, only_terminal: bool = False) -> None:
        self._terminal = sys.stdout.isatty()
        self._silent = only_terminal and not self._terminal
        self._width = 0

    def show(self, text: str) -> None:
        if self._silent:
            return
        if self._terminal:
            sys.stdout.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            print(text)
            self._silent = True
        sys.stdout.flush()

    def end(self) -> None:
        if self._width:
            sys.stdout.write("\r" + " " * self._width + "\r")
            sys.stdout.flush()
