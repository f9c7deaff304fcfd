"""Run a matrix on this machine: wire the engine, start a detached runner, run the user's ON_FINISH command."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import kmatrix.simulate.library as simulate
from kmatrix.engines.base import Engine
from kmatrix.engines.local.engine import LocalEngine
from kmatrix.engines.local.pool import Pool
from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.gpu.nvml.detect import UNKNOWN_DISTANCE, Gpu, distances, occupied
from kmatrix.own_file import open_to_read
from kmatrix.packing import Limits, usable_cores
from kmatrix.records.files import last_lines
from kmatrix.records.lock import holder
from kmatrix.records.paths import ROOT, MatrixDir
from kmatrix.records.runs import RunFile, Status, read_run_file_or_empty
from kmatrix.records.states import read_matrix_status
from kmatrix.redaction.log import RedactedLog
from kmatrix.runner.loop import Outcome, drive
from kmatrix.runner.resume import ResumePlan
from kmatrix.simulate.library import simulation
from kmatrix.status.alerts import Thresholds
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.state import RunPlan
from kmatrix.status.watch import RunProgress
from kmatrix.track.available import own_project
from kmatrix.track.processes import TrackerProcesses

FINISH_LIMIT_S = 60.0  # the ON_FINISH command is killed after this time
START_S = 60.0  # a detached runner holds its matrix within this time, or it has failed
TAIL_LINES = 20
PAIR = 2  # with two GPUs there is no placement to choose


def execute(
    matrix: MatrixDir,
    plan: ResumePlan,
    *,
    gpus: Sequence[Gpu] = (),
    recorders: RecorderLauncher | None = None,
    trackers: TrackerProcesses | None = None,
    on_progress: Callable[[RunProgress], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    budget: MatrixBudget | None = None,
) -> Outcome:
    """Run the pending attempts of a matrix on these GPUs, or on the CPU, and return the outcome.

    recorders: starts the GPU recorders, None for no recording.  trackers: starts the tracker processes, None for none.
    on_progress: called with the progress of each run.  on_note: called with each note about a GPU.
    budget: replaces the budget of the matrix, None to keep it.
    Raises LaunchError if the runs cannot start here or another runner holds the matrix.
    """
    values = symbols(matrix)
    every = (*plan.plans, *plan.reserve)
    pool = gpu_pool(gpus, values) if any(run.cuda for run in every) else None
    engine = LocalEngine(
        Path(sys.executable),
        ROOT,
        gpus=pool or (),
        cores=usable_cores(),
        limits=Limits.of(values),
        recorders=recorders,
        trackers=trackers,
    )
    check_plans(matrix, every, engine)
    return drive(
        matrix,
        plan.plans,
        engine,
        reserve=plan.reserve,
        rounds=plan.rounds,
        skipped=plan.skipped,
        on_progress=on_progress,
        on_note=on_note,
        limits=Thresholds.of(values),
        pool=pool,
        budget=MatrixBudget.of(values) if budget is None else budget,
    )


def check_plans(matrix: MatrixDir, plans: Sequence[RunPlan], engine: Engine) -> None:
    """Raise LaunchError if the engine cannot run these plans."""
    if problems := engine.check(plans):
        raise LaunchError(
            f"cannot run {matrix.name}: {problems[0]}",
            why="; ".join(problems[1:]),
            hint="change the configuration or the number of GPUs, and check it with make test-matrix-dry-run",
        )


def need_torch() -> None:
    """Raise LaunchError if torch is missing, before anything is created."""
    if find_spec("torch") is None:  # found, not imported: that takes seconds
        raise LaunchError(
            "torch is not installed", hint="run `make setup`, or pass PYTHON=<interpreter with all packages>"
        )


def recorder_launcher(simulated: str, hz: int) -> RecorderLauncher | None:
    """Return the settings of the recorders, None for no recording.

    simulated: SIMULATE=, records simulated GPUs.  hz: samples/s, 0: no recording.
    """
    if not hz:
        if simulated:
            raise ConfigError("SIMULATE= needs GPU_MONITOR=y", why="only the recording is simulated")
        return None
    environment = simulation(simulated) if simulated else {}
    return RecorderLauncher(
        python=Path(sys.executable),
        root=ROOT,
        hz=hz,
        simulated=bool(simulated),
        environment=environment,
        gpus=simulate.uuids(environment) if simulated else (),
    )


def check_simulation(simulated: str, nodes: Iterable[int]) -> None:
    """Raise ConfigError for simulated GPUs of a run over several nodes. simulated: SIMULATE=.  nodes: of each run."""
    if simulated and any(number > 1 for number in nodes):
        raise ConfigError(
            f"SIMULATE={simulated} needs runs on one node",
            why="the simulated driver has the GPUs of one machine",
            hint="omit SIMULATE, or pass NUM_NODES=1",
        )


def nodes_of_runs(matrix: MatrixDir) -> Iterator[int]:
    """Yield the number of nodes of each run."""
    for run in matrix.runs():
        yield read_run_file_or_empty(run).train.num_nodes or 1


def symbols(matrix: MatrixDir) -> Mapping[str, str]:
    """Return the Kconfig values of the first run: for symbols with the same value in all runs."""
    return first_record(matrix).symbols


def first_record(matrix: MatrixDir) -> RunFile:
    """Return run.json of the first run that has a readable one, empty without such a run."""
    found = (read_run_file_or_empty(run) for run in matrix.runs())
    return next((record for record in found if record != RunFile()), RunFile())


def matrix_trackers(matrix: MatrixDir, chosen: Sequence[str] | None = None) -> TrackerProcesses | None:
    """Return the starter of tracker processes, None if the matrix has no tracker.

    chosen: replaces the trackers of run.json, None to keep them.
    """
    if chosen is None and not first_record(matrix).tracking.trackers:
        return None
    return TrackerProcesses(Path(sys.executable), ROOT, chosen=chosen, project=own_project())


def recording_hz(values: Mapping[str, str]) -> int:
    """Return the sampling rate (samples/s, 0: no recording) of a configuration."""
    return int(values.get("GPU_MONITOR_HZ") or 0) if values.get("GPU_MONITOR") == "y" else 0


def gpu_pool(gpus: Sequence[Gpu], values: Mapping[str, str]) -> Pool:
    """Return the pool of GPUs, which queries the driver for other processes and for the topology.

    values: the symbols.
    """
    most_mib = int(values.get("GPU_BUSY_MEMORY") or 0)
    # The driver needs a query per pair, so it is asked only if a run could be placed in several ways.
    known = distances([gpu.uuid for gpu in gpus]) if len(gpus) > PAIR else {}
    return Pool(
        gpus,
        query=(lambda uuids: occupied(uuids, most_mib)) if most_mib else None,
        distance=(lambda one, other: known.get(frozenset((one, other)), UNKNOWN_DISTANCE)) if known else None,
    )


def detach(matrix: MatrixDir, words: Sequence[str]) -> int:
    """Run `continue` on the matrix in a background process; return its pid once it holds the matrix.

    words: further NAME=value arguments of that command.
    Raises LaunchError with the end of its log if it fails to start.
    """
    command = [sys.executable, "-m", "kmatrix", "continue", f"TARGET={matrix.path}", *words]
    log_file = RedactedLog(matrix.runner_log, Path(sys.executable))
    try:
        # A session of its own: the signals of the terminal do not reach it.
        runner = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file.fileno(),
            stderr=log_file.fileno(),
            start_new_session=True,
            pass_fds=(log_file.reader,),  # a runner must not end because somebody kills the writer of its log
        )
    finally:
        log_file.started()
    deadline = time.monotonic() + START_S
    while runner.poll() is None and (holder(matrix) is None or not matrix.status.exists()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if not runner.poll():  # None, or 0: a short matrix may have ended already
        log_file.close()
    else:
        log_file.wait()
        with open_to_read(matrix.runner_log) as log:
            end = "".join(last_lines(log)[-TAIL_LINES:]).rstrip()
        raise LaunchError(f"the runner of {matrix.name} failed to start", why=end)
    return runner.pid


def command_of(text: str) -> list[str]:
    """Return the arguments of ON_FINISH, [] for none. Raises ConfigError if it cannot be run."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"invalid ON_FINISH={text}", why=str(error), hint="close the quotes") from None
    if words and shutil.which(words[0]) is None:
        raise ConfigError(
            f"ON_FINISH={text}: program {words[0]} not found",
            why="checked now, because the command runs after the last run",
            hint='use an installed program, or pass ON_FINISH=""',
        )
    return words


def finish(matrix: MatrixDir, text: str) -> str:
    """Run the ON_FINISH command after the end of a matrix; return why it did not run or failed, "" on success."""
    # Errors are returned, not raised: the matrix has ended, and its exit code is that of its runs.
    try:
        words = command_of(text) if matrix.is_mine() else []
        if not words:
            return f"ON_FINISH={text} was not run: {matrix.name} belongs to another user" if text else ""
        subprocess.run(
            words, env={**os.environ, **_about(matrix)}, stdin=subprocess.DEVNULL, timeout=FINISH_LIMIT_S, check=True
        )
    except ConfigError as error:
        return error.what
    except subprocess.TimeoutExpired:
        return f"ON_FINISH={text} took longer than {FINISH_LIMIT_S:g} s and was killed"
    except subprocess.CalledProcessError as error:
        return f"ON_FINISH={text} ended with status {error.returncode}"
    except OSError as error:
        return f"ON_FINISH={text} could not be run: {error.strerror}"
    return ""


def _about(matrix: MatrixDir) -> Mapping[str, str]:
    """Return the environment variables of the ON_FINISH command."""
    status = read_matrix_status(matrix)
    return {
        "KMATRIX_MATRIX": str(matrix.path.resolve()),
        "KMATRIX_STATUS": str(status.status or ""),
        "KMATRIX_FINISHED": str(status.counts.get(Status.FINISHED, 0)),
        "KMATRIX_FAILED": str(status.counts.get(Status.FAILED, 0)),
    }
