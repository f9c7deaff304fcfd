"""Start, restart and stop the tracker process of each run. It runs next to the training and never blocks it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kmatrix.own_file import opener
from kmatrix.records.paths import RunDir, program_environment
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.records.tracking import SyncState, read_track, write_track
from kmatrix.redaction.log import RedactedLog
from kmatrix.status.state import RunPlan

MOST_RESTARTS = 5  # of a tracker process that was killed
LIMIT_S = 60.0  # time for pending steps after the end of a run, if run.json has no limit
MARGIN_S = 15.0  # after the limit; a process that is still alive then hangs, and is killed


@dataclass(slots=True)
class _TrackerProcess:
    """One tracker process of one run."""

    run: RunDir
    options: tuple[str, ...]  # of its command line
    limit_s: float  # s, from SIGTERM
    trackers: tuple[str, ...]
    popen: subprocess.Popen[bytes]
    deaths: int = 0  # times that it was killed
    ended_at: float | None = None  # s, monotonic: when it received SIGTERM


class TrackerProcesses:
    """The tracker processes of a matrix: of runs in progress, and of runs that ended with pending steps.

    `python`: the interpreter with the trackers' packages. `root`: the checkout. `chosen`: replaces the trackers of
    run.json, None to keep them. `project`: the project if run.json has none.
    They are not children of the run's guard: they survive the end of the run, and upload its pending steps.
    """

    def __init__(self, python: Path, root: Path, *, chosen: Sequence[str] | None = None, project: str = "") -> None:
        self._python, self._root = python, root
        self._chosen, self._project = chosen, project
        self._processes: list[_TrackerProcess] = []

    def begin(self, run: RunPlan, parent: int) -> None:
        """Start the tracker process of an attempt, if the run has trackers.

        `parent`: the pid of a process; the attempt ends when it exits.
        """
        asked = read_run_file_or_empty(run.dir).tracking
        names = asked.trackers if self._chosen is None else tuple(self._chosen)
        if self._chosen is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the matrix
                _mark_incomplete(run.dir, except_for=names)
        if not names:
            return
        limit_s, project = asked.limit_s or LIMIT_S, asked.project or self._project
        options = (
            "--trackers",
            ",".join(names),
            "--project",
            project,
            "--parent",
            str(parent),
            "--limit",
            str(limit_s),
        )
        if (popen := self._start(run.dir, options)) is not None:
            self._processes.append(_TrackerProcess(run.dir, options, limit_s, names, popen))

    def poll(self) -> None:
        """Restart processes that were killed, and kill processes that hang after their limit.

        A restarted process asks its trackers what they have, and continues from there.
        """
        for process in list(self._processes):
            code = process.popen.poll()
            if code is None:
                if process.ended_at is not None and time.monotonic() - process.ended_at > process.limit_s + MARGIN_S:
                    kill(process.popen)
                    self._processes.remove(process)
                continue
            # Only signals count: an exit code is the process's own decision.
            process.deaths += code < 0
            restarted = (
                self._start(process.run, process.options) if code < 0 and process.deaths <= MOST_RESTARTS else None
            )
            if restarted is None:
                self._processes.remove(process)
            else:
                process.popen = restarted

    def end(self, run: RunDir) -> None:
        """Send SIGTERM to the process of a run: the attempt has ended. It uploads the pending steps and exits."""
        for process in self._of(run):
            if process.ended_at is None:
                process.ended_at = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    process.popen.terminate()

    def kill(self, run: RunDir | None = None) -> None:
        """Kill the process of a run, or all processes. Steps that were not sent stay pending."""
        for process in self._of(run):
            kill(process.popen)
            self._processes.remove(process)

    def syncing(self) -> dict[str, tuple[str, ...]]:
        """Return the runs with a tracker process, with their trackers."""
        self.poll()
        return {process.run.name: process.trackers for process in self._processes}

    def _of(self, run: RunDir | None) -> list[_TrackerProcess]:
        return [process for process in self._processes if run is None or process.run == run]

    def _start(self, run: RunDir, options: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Start a process. Return None if that fails, and log the reason to the output log of the run."""
        try:
            return start(self._python, self._root, run, *options)
        except OSError as error:
            with contextlib.suppress(OSError), open(run.output_log, "a", encoding="utf-8", opener=opener) as log:
                log.write(f"trackers: cannot start the tracker process: {error.strerror}\n")
            return None


def start(python: Path, root: Path, run: RunDir, *options: str) -> subprocess.Popen[bytes]:
    """Start the tracker process of a run in a new session: no GPU, one thread, the user's environment.

    `options`: of `python -m kmatrix.track`. Raises OSError if the process cannot be started.
    """
    # The trackers' packages and services write what servers answer, which may be an echo of the key.
    log = RedactedLog(run.track_log, python)
    try:
        return subprocess.Popen(
            [str(python), "-m", "kmatrix.track", str(run.path), *options],
            cwd=root,
            # Cores and GPU memory belong to the training: no thread pools, no CUDA context.
            env=program_environment(root, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
            stdin=subprocess.DEVNULL,
            stdout=log.fileno(),
            stderr=log.fileno(),
            start_new_session=True,
        )
    finally:
        log.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a tracker process and the processes that the trackers' packages started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _mark_incomplete(run: RunDir, *, except_for: Sequence[str]) -> None:
    """Mark the other trackers of a run as incomplete in track.json, because the run continues without them."""
    incomplete = [
        replace(status, state=SyncState.OPEN, error=status.error or "not selected when the run was continued")
        for status in read_track(run)
        if status.tracker not in except_for
    ]
    if incomplete:
        with contextlib.suppress(OSError):
            write_track(run, incomplete)
