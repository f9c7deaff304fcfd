"""The recorder beside a run: started with it, ended after it, and never able to hurt it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.launch.engine import RunPlan
from kmatrix.packing import place

WAIT_S = 5.0  # for the recorder's last summary; then it is killed, and the minute before counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """How runs are recorded. hz: samples a second.  prometheus: the port for its metrics, 0 for none.

    simulated: the recording is of simulated GPUs, whatever trains.  environment: what only the recorder's process gets.
    gpus: UUIDs of the simulated ones, which runs that go at the same time share.
    """

    python: Path
    root: Path
    hz: int
    prometheus: int = 0
    simulated: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()

    def seen(self, run: RunPlan, taken: Collection[str], *, shared: bool) -> tuple[str, ...] | None:
        """Return the GPUs that the recorder of a run is to see; () for all, None where there is none left for it.

        taken: those that recorders of other runs see.  shared: other runs may go at the same time; one that is alone
        sees every simulated GPU.
        """
        if not self.simulated or not shared:
            return () if self.simulated else run.gpus
        free = [gpu for gpu in self.gpus if gpu not in taken]
        return place(min(run.ranks, len(free)), free, self.gpus) or None

    def command(self, run: RunPlan, pid: int, *, gpus: Sequence[str], slot: int = 0) -> list[str]:
        """Return the recorder's command line for a run whose processes stand below `pid`.

        gpus: what `seen` returned.  slot: 0, 1, ... for the runs that go at the same time: each has a port of its own.
        """
        command = [str(self.python), "-m", "kmatrix.gpu.recorder", str(run.dir.path), "--hz", str(self.hz)]
        command += ["--ranks-of", str(pid), "--parent", str(pid)]
        command += ["--prometheus", str(self.prometheus + slot)] if self.prometheus else []
        command += ["--gpus", ",".join(gpus)] if gpus else []
        return (
            [*command, "--device", "nvidia"] if self.simulated else command if gpus else [*command, "--device", "cpu"]
        )

    def start(
        self, run: RunPlan, pid: int, *, gpus: Sequence[str] | None = (), slot: int = 0
    ) -> subprocess.Popen[bytes] | None:
        """Start the recorder; None where it cannot be started, which the run's log says."""
        if gpus is None:
            _say(run, "no simulated GPU is left for it: nothing is recorded")
            return None
        environment = {**os.environ, **self.environment}
        if self.simulated:  # each run sees the scenario from its second 0
            environment["KMATRIX_SIMULATE_EPOCH"] = repr(time.time())
        environment["PYTHONPATH"] = os.pathsep.join([str(self.root / "lib"), environment.get("PYTHONPATH", "")])
        try:
            with run.dir.output_log.open("ab") as log:
                return subprocess.Popen(
                    self.command(run, pid, gpus=gpus, slot=slot),
                    cwd=self.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            _say(run, f"it cannot be started: {error.strerror}")
            return None


def _say(run: RunPlan, text: str) -> None:
    with contextlib.suppress(OSError), run.dir.output_log.open("a", encoding="utf-8") as log:
        log.write(f"recorder: {text}\n")


def end(process: subprocess.Popen[bytes] | None) -> None:
    """Ask the recorder to write its last summary, wait for it, and leave nothing behind."""
    if process is None:
        return
    process.terminate()
    try:
        process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
