"""The processes next to the ranks of an attempt: the GPU recorder, the trackers, and the preparation of streamed data.

They are children of `kmatrix run` in sessions of their own, so that Ctrl+C reaches the run first. None of them ends a
training, but a preparation that fails: without its data the run cannot go on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kmatrix.clock import clock
from kmatrix.engines.ports import Ranks
from kmatrix.engines.ranks import end_with
from kmatrix.records.attempts import DATA, Attempt, Exit
from kmatrix.records.files import last_lines
from kmatrix.records.paths import ROOT, program_environment
from kmatrix.simulate.library import simulation

MOST_RESTARTS = 5  # of a companion that was killed
ERROR = '{"what": '  # begins the line in which gpt2.prepare says why it failed


@dataclass(kw_only=True)
class Companion:
    """One of these processes: started, restarted if a signal has ended it, and asked to end."""

    words: Sequence[str]
    log: Path
    root: Path = ROOT  # folder with the code that it runs
    variables: dict[str, str] = field(default_factory=dict)
    outlives: bool = False  # it ends by itself, after this process: it sends what is pending
    limit_s: float = 5.0  # from SIGTERM on; then it is killed
    _process: subprocess.Popen[bytes] | None = None
    _deaths: int = 0
    _until: float = float("inf")  # monotonic seconds

    def start(self) -> None:
        """Start it; one that cannot start leaves a line in the log."""
        ends: Callable[[], object] = partial(end_with, os.getpid(), signal.SIGTERM)
        if self.outlives:  # the signal that the attempt has ended may come before its program listens
            ends = partial(signal.pthread_sigmask, signal.SIG_BLOCK, (signal.SIGTERM,))
        with suppress(OSError), self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", *self.words],
                    cwd=self.root,
                    env=program_environment(self.root, **self.variables),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=ends,  # noqa: PLW1509 (this process has one thread)
                )
            except OSError as error:
                log.write(f"{self.words[0]} cannot be started: {error.strerror}\n".encode())

    def poll(self) -> int | None:
        """Return its exit status, None while it lives; restart one that a signal has ended."""
        if self._process is None:
            return 0
        code = self._process.poll()
        if code is None and clock.monotonic() > self._until:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what the trackers' packages have started
        if code is not None and code < 0 and self._deaths < MOST_RESTARTS and self._until == float("inf"):
            self._deaths += 1
            self.start()
            return None
        return code

    def end(self) -> None:
        """Ask it to end."""
        if self._process is not None and self._until == float("inf"):
            self._until = clock.monotonic() + self.limit_s
            with suppress(ProcessLookupError):
                self._process.terminate()


class WithCompanions:
    """The ranks of an attempt and their companions, which end after them."""

    def __init__(self, ranks: Ranks, companions: Sequence[Companion], *, data: Companion | None = None) -> None:
        """Start the companions. data: the one that prepares the data of the run."""
        self._ranks, self._data = ranks, data
        self._companions = [*companions, *([data] if data else [])]
        self._log_start = data.log.stat().st_size if data and data.log.exists() else 0
        self._trouble: tuple[str, str] | None = None
        self.stop, self.kill, self.limit = ranks.stop, ranks.kill, ranks.limit
        for companion in self._companions:
            companion.start()

    @property
    def exits(self) -> Sequence[Exit]:
        return self._ranks.exits

    @property
    def trouble(self) -> tuple[str, str] | None:
        """Return kind and reason of what ended the attempt besides its ranks."""
        return self._trouble or self._ranks.trouble

    def poll(self) -> bool:
        """Return whether the ranks have exited, and the companions that end with them."""
        is_over = self._ranks.poll()
        if is_over:
            for companion in self._companions:
                companion.end()
        codes = {id(companion): companion.poll() for companion in self._companions}
        if self._data and not is_over and self._trouble is None and codes[id(self._data)]:
            self._trouble = DATA, why_it_failed(self._data.log, self._log_start, codes[id(self._data)] or 0)
            self._ranks.kill()
        return is_over and all(codes[id(one)] is not None for one in self._companions if not one.outlives)


def why_it_failed(log_file: Path, start: int, code: int) -> str:
    """Return why a preparation failed: its last error in the log. start: bytes before it.  code: its exit status."""
    errors = list[str]()
    with suppress(OSError), log_file.open("rb") as log:
        errors = [line for line in last_lines(log, start=start) if line.startswith(ERROR)]
    error = json.loads(errors[-1]) if errors else {"what": f"exit status {code}", "why": ""}
    return f"its data could not be prepared: {': '.join(filter(None, (error['what'], error['why'])))}"


def recorder(
    run: Path,
    attempt: Attempt,
    *,
    hz: int,
    gpus: Sequence[str],
    node: int = 0,
    first_rank: int = 0,
    simulate: str = "",
) -> Companion:
    """Return the recorder of the GPUs of this node, or of its cores if there are none.

    hz: samples/s.  simulate: SIMULATE=, whose GPUs are recorded instead, from second 0 in each attempt.
    """
    folder = run if node == 0 else run / "nodes" / str(node)
    pid = str(os.getpid())
    words = ["kmatrix.gpu.recorder", str(folder), "--hz", str(hz), "--attempt", str(attempt.number), "--ranks-of", pid]
    words += ["--parent", pid, "--run", str(run), "--first-rank", str(first_rank)] if node else ["--parent", pid]
    if simulate:
        variables = {**simulation(simulate), "KMATRIX_SIMULATE_EPOCH": repr(attempt.started)}
        return Companion(words=[*words, "--device", "nvidia"], log=run / "output.log", variables=variables)
    words += ["--gpus", ",".join(gpus)] if gpus else ["--device", "cpu"]
    return Companion(words=words, log=run / "output.log")


def trackers(run: Path, names: Sequence[str], *, project: str, limit_s: float) -> Companion:
    """Return the process that sends metrics to trackers. limit_s: for pending steps, after the end of the attempt."""
    words = ["kmatrix.track", str(run), "--trackers", ",".join(names), "--project", project]
    words += ["--parent", str(os.getpid()), "--limit", str(limit_s)]
    # Cores and GPU memory belong to the training: no thread pools, no CUDA context.
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Companion(words=words, log=run / "track.log", variables=variables, outlives=True, limit_s=limit_s + 15)


def preparation(run: Path, code: Path) -> Companion:
    """Return the process that prepares the data of a run while it reads them (DATA_STREAMING)."""
    return Companion(words=["gpt2.prepare", f"--run={run}"], log=run / "output.log", root=code)
