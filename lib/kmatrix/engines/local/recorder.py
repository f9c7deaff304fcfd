"""Start and stop the GPU recorder of a run, a separate process that cannot affect training."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.engines.local.process import ProcessTree
from kmatrix.own_file import opener
from kmatrix.packing import place
from kmatrix.records.paths import RunDir, program_environment
from kmatrix.status.state import RunPlan

WAIT_S = 5.0  # for the recorder's final summary; then it is killed, and the last periodic summary counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderLauncher:
    """Starts the recorders of a matrix, all with the same settings."""

    python: Path
    root: Path
    hz: int  # samples/s
    simulated: bool = False  # record simulated GPUs, on any device
    environment: Mapping[str, str] = field(default_factory=dict)  # additional variables of the recorder
    gpus: tuple[str, ...] = ()  # UUIDs of the simulated GPUs, which are divided between concurrent runs

    def seen(self, run: RunPlan, taken: Collection[str], *, shared: bool) -> tuple[str, ...] | None:
        """Return the GPUs that the recorder of a run samples; () for all, None if none is left.

        taken: by recorders of other runs.  shared: runs may run at the same time; else the run gets all simulated GPUs.
        """
        if not self.simulated or not shared:
            return () if self.simulated else run.gpus
        free = [gpu for gpu in self.gpus if gpu not in taken]
        return place(min(run.ranks, len(free)), free, self.gpus) or None

    def command(
        self,
        run: RunPlan,
        pid: int,
        *,
        gpus: Sequence[str],
        folder: RunDir | None = None,
        first_rank: int = 0,
    ) -> list[str]:
        """Return the recorder's command line for a run whose processes are descendants of `pid`.

        gpus: returned by `seen`.  folder: where it records, None for the folder of the run.
        first_rank: of the ranks on this node.
        """
        command = [str(self.python), "-m", "kmatrix.gpu.recorder", str((folder or run.dir).path), "--hz", str(self.hz)]
        command += ["--run", str(run.dir.path)] if folder not in (None, run.dir) else []
        command += ["--attempt", str(run.attempt)]
        command += ["--first-rank", str(first_rank)] if first_rank else []
        command += ["--ranks-of", str(pid), "--parent", str(pid)]
        command += ["--gpus", ",".join(gpus)] if gpus else []
        return (
            [*command, "--device", "nvidia"] if self.simulated else command if gpus else [*command, "--device", "cpu"]
        )

    def start(
        self,
        run: RunPlan,
        tree: ProcessTree,
        *,
        gpus: Sequence[str] | None = (),
        folder: RunDir | None = None,
        first_rank: int = 0,
        since: float | None = None,
    ) -> subprocess.Popen[bytes] | None:
        """Start the recorder of a running command; None if it cannot be started, which is written to the run's log.

        Its messages go to the log of the run, without keys like everything else there.
        folder: where it records, None for the folder of the run.  first_rank: of the ranks on this node.
        since: start of the attempt, Unix seconds; None: now.
        """
        if gpus is None:
            _log(run, "no simulated GPU is left: nothing is recorded")
            return None
        environment = program_environment(self.root, **self.environment)
        if self.simulated:  # a scenario starts at second 0 of each attempt, also for a recorder that is restarted in it
            environment["KMATRIX_SIMULATE_EPOCH"] = repr(time.time() if since is None else since)
        try:
            return tree.start_companion(
                self.command(run, tree.pid, gpus=gpus, folder=folder, first_rank=first_rank),
                cwd=self.root,
                env=environment,
                start_new_session=True,  # Ctrl+C must not end a recording before its run
            )
        except OSError as error:
            _log(run, f"cannot be started: {error.strerror}")
            return None


def _log(run: RunPlan, text: str) -> None:
    # Suppressed: on a full disk the run itself reports the error, and a recorder must never end a matrix.
    with contextlib.suppress(OSError), open(run.dir.output_log, "a", encoding="utf-8", opener=opener) as log:
        log.write(f"recorder: {text}\n")


def end(process: subprocess.Popen[bytes] | None) -> None:
    """Ask the recorder to write its final summary and exit, and kill it if it does not."""
    if process is None:
        return
    process.terminate()  # SIGTERM: it writes its last summary
    try:
        process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
