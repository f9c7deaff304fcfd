"""The processes that feed trackers: beside each run that has some, told when it ends, never in its way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.launch.engine import RunPlan
from kmatrix.records import RunDir, read_json
from kmatrix.records.tracking import Sending, read_track, write_track

MOST = 5  # times that a killed one is started anew
LIMIT_S = 60.0  # after the run's end, where run.json has no limit
MARGIN_S = 15.0  # beyond the limit: it then hangs itself, and is killed


@dataclass(slots=True)
class _Feeder:
    """One process. words: of its command line.  told: monotonic seconds at which it was told to end."""

    run: RunDir
    words: tuple[str, ...]
    limit_s: float
    trackers: tuple[str, ...]
    process: subprocess.Popen[bytes]
    deaths: int = 0
    told: float | None = None


class Trackers:
    """All processes that feed trackers, of the runs that go on and of those that have ended.

    python: the interpreter that has the trackers' packages.  root: the project's.
    chosen: trackers in the place of those that a run.json names; None for those.  project: where it names none.
    They stand outside of the run's guard: what ends a run leaves them to send the rest.
    """

    def __init__(self, python: Path, root: Path, *, chosen: Sequence[str] | None = None, project: str = "") -> None:
        self._python, self._root = python, root
        self._chosen, self._project = chosen, project
        self._feeders: list[_Feeder] = []

    def begin(self, run: RunPlan, parent: int) -> None:
        """Start the process of an attempt, where its run has trackers. parent: with whose end the attempt has ended."""
        asked = _tracking(run.dir)
        names = tuple(str(name) for name in (asked.get("trackers") or () if self._chosen is None else self._chosen))
        if self._chosen is not None:
            _leave_out(run.dir, names)
        if not names:
            return
        limit_s, project = float(asked.get("limit_s") or LIMIT_S), str(asked.get("project") or self._project)
        words = ("--trackers", ",".join(names), "--project", project, "--parent", str(parent), "--limit", str(limit_s))
        if (process := self._start(run.dir, words)) is not None:
            self._feeders.append(_Feeder(run.dir, words, limit_s, names, process))

    def look(self) -> None:
        """Start anew what was killed: it goes on behind what its trackers hold. Kill what does not end by itself."""
        for feeder in list(self._feeders):
            code = feeder.process.poll()
            if code is None:
                if feeder.told is not None and time.monotonic() - feeder.told > feeder.limit_s + MARGIN_S:
                    kill(feeder.process)
                    self._feeders.remove(feeder)
                continue
            feeder.deaths += code < 0
            again = self._start(feeder.run, feeder.words) if code < 0 and feeder.deaths <= MOST else None
            if again is None:
                self._feeders.remove(feeder)
            else:
                feeder.process = again

    def end(self, run: RunDir) -> None:
        """Tell the process of a run that the attempt has ended; it sends the rest by itself."""
        for feeder in self._of(run):
            if feeder.told is None:
                feeder.told = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    feeder.process.terminate()

    def kill(self, run: RunDir | None = None) -> None:
        """End the process of a run, or all of them, at once: what was not sent is left."""
        for feeder in self._of(run):
            kill(feeder.process)
            self._feeders.remove(feeder)

    def sending(self) -> dict[str, tuple[str, ...]]:
        """Return the runs whose processes have not ended, with their trackers."""
        self.look()
        return {feeder.run.name: feeder.trackers for feeder in self._feeders}

    def _of(self, run: RunDir | None) -> list[_Feeder]:
        return [feeder for feeder in self._feeders if run is None or feeder.run == run]

    def _start(self, run: RunDir, words: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Start one; None where it cannot be started, which the run's log says as far as that can be written."""
        try:
            return start(self._python, self._root, run, *words)
        except OSError as error:
            with contextlib.suppress(OSError), run.output_log.open("a", encoding="utf-8") as log:
                log.write(f"trackers: their process cannot be started: {error.strerror}\n")
            return None


def start(python: Path, root: Path, run: RunDir, *options: str) -> subprocess.Popen[bytes]:
    """Start what feeds the trackers of a run, in a session of its own: no GPU, one thread, the user's environment.

    options: of `python -m kmatrix.track`.  Raises OSError where that cannot be done.
    """
    path = os.pathsep.join(filter(None, [str(root / "lib"), os.environ.get("PYTHONPATH", "")]))
    with run.track_log.open("ab") as log:
        return subprocess.Popen(
            [str(python), "-m", "kmatrix.track", str(run.path), *options],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill such a process and what its trackers' packages started: they are one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _leave_out(run: RunDir, names: Sequence[str]) -> None:
    """Let track.json say that the run's other trackers do not have all of it any more: it goes on without them."""
    left = [
        replace(sent, state=Sending.OPEN, error=sent.error or "it was left out when the run went on")
        for sent in read_track(run)
        if sent.tracker not in names
    ]
    if left:
        with contextlib.suppress(OSError):
            write_track(run, left)


def _tracking(run: RunDir) -> Mapping[str, Any]:
    try:
        value = read_json(run.run_json).get("tracking")
    except RecordError:
        return {}
    return value if isinstance(value, dict) else {}
