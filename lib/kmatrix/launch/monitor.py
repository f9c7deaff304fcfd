"""The recorder beside a run: started with it, ended after it, and never able to hurt it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.launch.engine import RunPlan

WAIT_S = 5.0  # for the recorder's last summary; then it is killed, and the minute before counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """How runs are recorded. hz: samples a second.  prometheus: the port for its metrics, 0 for none.

    simulated: the recording is of simulated GPUs, whatever trains.  environment: what only the recorder's process gets.
    """

    python: Path
    root: Path
    hz: int
    prometheus: int = 0
    simulated: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, run: RunPlan, pid: int) -> list[str]:
        """Return the recorder's command line for a run whose processes stand below `pid`."""
        command = [str(self.python), "-m", "kmatrix.gpu.recorder", str(run.dir.path), "--hz", str(self.hz)]
        command += ["--ranks-of", str(pid), "--parent", str(pid)]
        command += ["--prometheus", str(self.prometheus)] if self.prometheus else []
        if self.simulated:
            return [*command, "--device", "nvidia"]
        return [*command, "--gpus", ",".join(run.gpus)] if run.gpus else [*command, "--device", "cpu"]

    def start(self, run: RunPlan, pid: int) -> subprocess.Popen[bytes] | None:
        """Start the recorder; None where it cannot be started, which the run's log says."""
        environment = {**os.environ, **self.environment}
        if self.simulated:  # each run sees the scenario from its second 0
            environment["KMATRIX_SIMULATE_EPOCH"] = repr(time.time())
        environment["PYTHONPATH"] = os.pathsep.join([str(self.root / "lib"), environment.get("PYTHONPATH", "")])
        try:
            with run.dir.output_log.open("ab") as log:
                return subprocess.Popen(
                    self.command(run, pid),
                    cwd=self.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            with contextlib.suppress(OSError), run.dir.output_log.open("a", encoding="utf-8") as log:
                log.write(f"recorder: it cannot be started: {error.strerror}\n")
            return None


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
