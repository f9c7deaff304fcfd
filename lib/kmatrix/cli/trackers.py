"""The commands about trackers: upload pending steps and test W&B and Trackio."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import chosen_runs, find_target, live_jobs
from kmatrix.clock import clock
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.forms import PROJECT_NAME, PROJECT_RULE
from kmatrix.kconfig.assignments import load_config, parse_trackers
from kmatrix.kconfig.tree import Tree
from kmatrix.locks import is_held
from kmatrix.records.checkpoint_dir import original_of
from kmatrix.records.decode import decode_line
from kmatrix.records.files import last_lines
from kmatrix.records.paths import ROOT, RunDir, program_environment
from kmatrix.records.runs import MetricValues, Tracking, metric_line_of, read_run_file
from kmatrix.records.tracking import (
    SyncState,
    SyncStatus,
    read_track,
    sync_status,
)
from kmatrix.text import duration, first_names, plural, shown
from kmatrix.track.available import TITLES, WANDB_SYMBOLS, login, need_trackers, own_project
from kmatrix.track.selftest import PROJECT, STEPS, is_online, lost_steps, send_run, synthetic_run, tracker_failure
from kmatrix.track.tracker import identity

LEAST_LIMIT_S = 60.0  # of `make track-sync`, because the user can press Ctrl+C


def configured(arguments: Arguments, name: str) -> str:
    """Return the value of a symbol as text: that of .config, or its default without a .config."""
    tree = Tree.parse()
    path = arguments.config
    if path.exists():
        load_config(tree, path)
    return tree.value(name) or ""


def asked_project(arguments: Arguments, default: str = "") -> str:
    """Return PROJECT=. Raises ConfigError if a tracker would not accept it: it is part of file names and URLs."""
    project = arguments.get("PROJECT", default)
    if project and not PROJECT_NAME.fullmatch(project):
        raise ConfigError(f"invalid PROJECT={project}", why=PROJECT_RULE)
    return project


def sync(arguments: Arguments) -> int:
    """Upload the pending steps of a matrix to its trackers. Return 0 if nothing is pending afterwards, else 1.

    Without TRACKER=, track.json decides which trackers have pending steps. With TRACKER=, each tracker is asked.
    With PROJECT=, too: in that project the steps may be pending.
    """
    project, matrix = asked_project(arguments), find_target(arguments)
    asked = parse_trackers(arguments.get("TRACKER")) if arguments.get("TRACKER") else ()
    if project and asked == ("tensorboard",):
        raise ConfigError("TRACKER=tensorboard does not take PROJECT", why="TensorBoard has no projects")
    runs = [run for run in chosen_runs(matrix, arguments) if run.metrics.exists()]
    # On one machine, the lock of a tracker process decides. Between two nodes, a lock may not.
    jobs = live_jobs(matrix)
    live = [run for run in runs if run.name in jobs]
    if live:
        print(f"note: left to their jobs, which upload them now: {first_names(run.name for run in live)}")
    runs = [run for run in runs if run not in live]
    wanted = {run: asked or (_used(run) if project else _pending(run)) for run in runs}
    # An error rather than "nothing pending": the user expects an upload that was never configured.
    if not asked and runs and not any(_tracking(run).trackers or read_track(run) for run in runs):
        raise ConfigError(
            f"{shown(matrix.path)} ran without trackers", hint="pass TRACKER=wandb, trackio or tensorboard"
        )
    need_trackers(sorted({name for names in wanted.values() for name in names}))
    if not any(wanted.values()):
        print(f"{shown(matrix.path)}: no pending steps in {plural(len(runs), 'run')}")
    elif made := original_of(matrix):
        print(f"note: this matrix is a copy: it tracks into new runs, not into those of {made}")
    codes = [_sync_run(run, names, project) for run, names in wanted.items() if names]
    return max(codes, default=0)


def _sync_run(run: RunDir, names: Sequence[str], project: str) -> int:
    """Upload the pending steps of one run to these trackers and print the outcome; return the exit status.

    project: replaces that of the run, "" to keep it.
    """
    if is_held(run.track_lock):
        print(f"{run.name}: a tracker process is already uploading it")
        return 1
    before = {status.tracker: status.points for status in read_track(run)}  # to report how many steps are new
    project = project or _tracking(run).project or own_project()
    identity(run, project=project)  # an invalid name in run.json is an error here, not in track.log
    limit = str(max(LEAST_LIMIT_S, _tracking(run).limit_s or 0.0))
    words = ["--trackers", ",".join(names), "--project", project, "--limit", limit]
    # The upload runs in a process of its own, as during a run: a tracker that hangs can be killed.
    process = _start(run, *words)
    try:
        process.wait()
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):  # it has its own session, so Ctrl+C did not reach it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    now = {status.tracker: status for status in read_track(run)}
    symbols = read_run_file(run).symbols
    for name in names:
        print(f"{run.name}: {_outcome(now.get(name), name, before.get(name, 0), process, symbols)}")
    return 0 if all(name in now and now[name].state is SyncState.DONE for name in names) else 1


def _start(run: RunDir, *options: str) -> subprocess.Popen[bytes]:
    """Start the tracker process of a run in a session of its own: no GPU, one thread. Raises OSError."""
    with run.track_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "kmatrix.track", str(run.path), *options],
            cwd=ROOT,
            env=program_environment(ROOT, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _outcome(
    status: SyncStatus | None, name: str, before: int, process: subprocess.Popen[bytes], symbols: Mapping[str, str]
) -> str:
    """Return the result of one tracker as a message. `before`: the steps that it had before the upload."""
    if status is None:
        return f"{name}: nothing uploaded, its process exited with status {process.returncode} (see track.log)"
    if status.state is SyncState.DONE:
        where = f", {status.link}" if status.link else ""
        # In files: the user may have expected an upload.
        if name == "wandb" and status.how:
            where += f" (not uploaded: W&B is {login(symbols, os.environ).describe()})"
        return f"{name} has all {status.points} steps ({max(0, status.points - before)} new){where}"
    total = status.points + status.waiting
    return f"{name}: {status.waiting} of {total} steps pending: {status.error or 'see track.log'}"


def _pending(run: RunDir) -> tuple[str, ...]:
    """Return the trackers with pending steps: by track.json, or because a later attempt ran without them."""
    last = _last_step(run)
    done = [status for status in sync_status(run) if status.state is SyncState.DONE]
    complete = {status.tracker for status in done if (status.sent_step or 0) >= last}
    return tuple(name for name in _used(run) if name not in complete)


def _last_step(run: RunDir) -> int:
    """Return the step of the last line of metrics, 0 without one."""
    with run.metrics.open("rb") as file:
        lines = [metric_line_of(decode_line(line, MetricValues) or {}) for line in last_lines(file)]
    return next((line.step for line in reversed(lines) if line is not None), 0)


def _used(run: RunDir) -> tuple[str, ...]:
    """Return the trackers that the run uses or has used."""
    return tuple(dict.fromkeys([*_tracking(run).trackers, *(status.tracker for status in read_track(run))]))


def _tracking(run: RunDir) -> Tracking:
    return read_run_file(run).tracking


def wandb_test(arguments: Arguments) -> int:
    """Upload a synthetic run to W&B, or write it to files in offline mode, and read it back."""
    return _test("wandb", arguments)


def trackio_test(arguments: Arguments) -> int:
    """Write a synthetic run to a Trackio database and read it back."""
    return _test("trackio", arguments)


def _test(tracker: str, arguments: Arguments) -> int:
    need_trackers([tracker])
    project = asked_project(arguments, PROJECT)
    symbols = {name: configured(arguments, name) for name in WANDB_SYMBOLS}
    with tempfile.TemporaryDirectory(prefix="kmatrix_") as folder:
        print(f"{TITLES[tracker]}: uploading a synthetic run of {STEPS} steps ...", flush=True)
        run = synthetic_run(Path(folder), tracker, project, symbols)
        began = clock.monotonic()
        sent = send_run(run, tracker)
        if sent.state is not SyncState.DONE:
            raise tracker_failure(tracker, run, sent)
        seconds = clock.monotonic() - began
        how = f" ({login(symbols, os.environ).describe()})" if tracker == "wandb" else ""
        if is_online(run, tracker):  # the data are only on its server
            print(f"{TITLES[tracker]} works{how}: uploaded {STEPS} steps in {duration(seconds)}")
            print(f"  open {sent.link} to check the run, then delete it there")
            return 0
        if lost := lost_steps(run, tracker, project):
            raise LaunchError(
                f"{TITLES[tracker]} lost {len(lost)} of {STEPS} steps", why=f"the first lost step is {min(lost)}"
            )
        print(f"{TITLES[tracker]} works{how}: uploaded {STEPS} steps in {duration(seconds)} and read them back")
    return 0
