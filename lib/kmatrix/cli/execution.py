"""The runs of a matrix that is there, brought to their end: in this terminal, or in a session of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.finish import finish
from kmatrix.cli.monitor import simulation
from kmatrix.cli.project import own_project
from kmatrix.cli.session import ROOT, shown
from kmatrix.cli.trackers import announced
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.gpu import simulate
from kmatrix.gpu.nvml import UNKNOWN, Gpu, distances, occupied
from kmatrix.launch.lock import holder
from kmatrix.launch.monitor import Monitor
from kmatrix.launch.pool import Pool
from kmatrix.launch.provenance import cores
from kmatrix.launch.reopen import Going
from kmatrix.launch.room import how_full, what_to_do
from kmatrix.packing import Limits
from kmatrix.records import MatrixDir, Status, read_json
from kmatrix.records.tracking import not_sent, sent_of

START_S = 60.0  # a detached runner has its matrix within this time, or it has ended
TAIL_LINES = 20
PAIR = 2  # GPUs among which there is nothing to choose


def need_torch() -> None:
    """Refuse before anything is made where no run could be started."""
    if find_spec("torch") is None:
        raise LaunchError("torch is not installed", fix="make setup, or pass PYTHON=<interpreter that has everything>")


def monitor(simulated: str, hz: int, port: int = 0) -> Monitor | None:
    """Return how runs are recorded. simulated: SIMULATE=, which puts simulated GPUs into the recording.

    port: for Prometheus, 0 for none.
    """
    if not hz:
        if simulated:
            raise ConfigError("SIMULATE= needs GPU_MONITOR=y", why="only the recording is simulated")
        return None
    environment = simulation(simulated) if simulated else {}
    return Monitor(
        python=Path(sys.executable),
        root=ROOT,
        hz=hz,
        prometheus=port,
        simulated=bool(simulated),
        environment=environment,
        gpus=simulate.uuids(environment) if simulated else (),
    )


def symbols(matrix: MatrixDir) -> Mapping[str, Any]:
    """Return the Kconfig values of a matrix's first run: for what is the same in all of them."""
    runs = matrix.runs()
    value = read_json(runs[0].run_json).get("symbols") if runs else None
    return value if isinstance(value, dict) else {}


def recording(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the samples a second that the matrix asks for, 0 for no recording, and the port for Prometheus."""
    hz = int(values.get("GPU_MONITOR_HZ") or 0) if values.get("GPU_MONITOR") == "y" else 0
    return hz, int(values.get("GPU_PROMETHEUS_PORT") or 0)


def gpu_pool(gpus: Sequence[Gpu], values: Mapping[str, Any]) -> Pool:
    """Return the GPUs that runs may get: the driver is asked what others hold, and how near they are to each other.

    values: the symbols.
    """
    most_mib = int(values.get("GPU_BUSY_MEMORY") or 0)
    known = distances([gpu.uuid for gpu in gpus]) if len(gpus) > PAIR else {}
    return Pool(
        gpus,
        look=(lambda uuids: occupied(uuids, most_mib)) if most_mib else None,
        distance=(lambda one, other: known.get(frozenset((one, other)), UNKNOWN)) if known else None,
    )


def execute(
    matrix: MatrixDir,
    going: Going,
    recorder: Monitor | None,
    gpus: Sequence[Gpu] = (),
    chosen: Sequence[str] | None = None,
) -> int:
    """Run what is to be run on these GPUs, write and print the report, and return the exit status.

    chosen: trackers in the place of those that the matrix began with; None for those.
    """
    from kmatrix.alerts import Thresholds
    from kmatrix.cli.progress import ProgressDisplay
    from kmatrix.cli.results import report
    from kmatrix.cli.terminal import outlived
    from kmatrix.cli.track import send_rest
    from kmatrix.launch.drive import EXIT_STOPPED, drive
    from kmatrix.launch.local import LocalEngine
    from kmatrix.launch.track import Trackers

    values = symbols(matrix)
    trackers = Trackers(Path(sys.executable), ROOT, chosen=chosen, project=own_project())
    pool = gpu_pool(gpus, values)
    engine = LocalEngine(
        Path(sys.executable),
        ROOT,
        gpus=pool,
        cores=cores(),
        limits=Limits.of(values),
        monitor=recorder,
        trackers=trackers,
    )
    if going.plans and (line := announced(read_json(matrix.runs()[0].run_json), chosen)):
        print(line)
    with outlived(matrix.runner_log) as terminal:
        with ProgressDisplay(terminal=terminal) as show:
            outcome = drive(
                matrix,
                going.plans,
                engine,
                skipped=going.skipped,
                show=show,
                tell=show.tell,
                limits=Thresholds.of(values),
                pool=pool,
            )
        send_rest(trackers)
        if terminal.lost:
            terminal.leave()
        report(matrix, draw=values.get("AUTO_GENERATE_GRAPHS") == "y")
        if why := finish(matrix, str(values.get("ON_FINISH") or "")):
            print(f"note: {why}")
        if not_sent(((run.name, sent) for run in matrix.runs() for sent in sent_of(run)), matrix.name):
            print(f"\nSend what trackers lack: make track-replay TARGET={shown(matrix.path)}")
        if outcome.exit_code == EXIT_STOPPED:
            print(f"\nGo on: make continue TARGET={shown(matrix.path)}")
        elif outcome.no_room:
            print(f"\nThe disk is full: {how_full(matrix.path)}\nGo on: {what_to_do(matrix.path)}")
        elif outcome.counts.get(Status.FAILED):
            print(
                f"\nGo on with what was killed: make continue TARGET={shown(matrix.path)}\n"
                "With what failed by itself, too: add RETRY_FAILED=1"
            )
    return outcome.exit_code


def detach(matrix: MatrixDir, arguments: Arguments, *names: str) -> int:
    """Let another process in a session of its own run the matrix; return when it has begun.

    names: the arguments of this command that it is given, too.
    """
    words = [f"{name}={arguments.get(name)}" for name in names if arguments.get(name)]
    command = [sys.executable, "-m", "kmatrix", "continue", f"TARGET={matrix.path}", *words]
    with matrix.runner_log.open("ab") as log:
        runner = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while runner.poll() is None and (holder(matrix) is None or not matrix.status.exists()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if runner.poll():
        end = "\n".join(matrix.runner_log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise LaunchError(f"the runner of {matrix.name} ended at once", why=end)
    place = shown(matrix.path)
    print(f"running in the background: process {runner.pid}, its words go to {shown(matrix.runner_log)}")
    print(f"  watch: make status TARGET={place}   or: make logs TARGET={place}")
    print(f"  stop:  make stop TARGET={place}")
    return 0
