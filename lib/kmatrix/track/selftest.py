"""wandb-test and trackio-test: send a synthetic run through the real upload path, in seconds."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.gpu.formats.json_array import JsonArrayFile
from kmatrix.records import attempts
from kmatrix.records.attempts import Attempt, End
from kmatrix.records.decode import as_json
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import MATRIX_PREFIX, RunDir, program_environment
from kmatrix.records.runs import Status, Tracking
from kmatrix.records.tracking import SyncState, SyncStatus, read_track
from kmatrix.redaction.log import RedactedLog
from kmatrix.redaction.redactor import redact
from kmatrix.status.fold import FINISHED
from kmatrix.track.available import TITLES
from kmatrix.track.wandb import WandbFiles

STEPS = 20
GPUS = 2
PROJECT = "kmatrix-test"
NAME = "gpt2_made_up_2gpu"
LIMIT_S = 35  # s without progress; W&B gives up on a server after 20 s
READ_S = 60.0
LOG_LINES = 5  # of track.log, in an error message
LOSS = "train/loss"

CAUSES = (  # pattern of an error of a tracker's package, likely cause
    (r"WANDB_MODE", "W&B is disabled: unset WANDB_MODE"),
    (r"401|403|api.?key|authenti|unauthori|permission|entity", "invalid API key, or no permission for this project"),
    (r"timed? ?out|connect|resolve|unreachable|network|CommError|refused|proxy", "cannot reach the server"),
    (r"No module|ImportError|cannot import", "damaged package: make setup-trackers"),
    (r"No space|disk|Read-only|Permission denied", "cannot write to the temporary directory"),
)


def synthetic_run(results: Path, tracker: str, project: str, symbols: Mapping[str, str]) -> RunDir:
    """Write the directory of a finished run as its program, trainer and recorder do, with losses from a formula."""
    now = time.time()
    stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now))
    run = RunDir(results / f"{MATRIX_PREFIX}{stamp}" / NAME)
    run.path.mkdir(parents=True)
    tracking = Tracking(trackers=(tracker,), project=project, limit_s=LIMIT_S)
    about = {"run_id": f"madeup{os.getpid():x}", "name": run.name, "matrix": run.path.parent.name, "train": {}}
    axes = {"optimizer": "made-up", "gpus": str(GPUS)}
    write_json(run.run_json, {**about, "axes": axes, "symbols": dict(symbols), "tracking": as_json(tracking)})
    for step in range(STEPS):
        line = {"step": step, "time": now - STEPS + step, "attempt": 1, "tokens": 4096 * step}
        append_jsonl(run.metrics, {**line, LOSS: 2 + 9 * math.exp(-step / 5), "train/lr": 6e-4})
    array = JsonArrayFile(run.gpu_stats_multi)
    for step in range(STEPS):
        array.append(_snapshot(now - STEPS + step))
    array.close()
    write_json(run.result, {"status": Status.FINISHED, "attempt": 1})
    write_json(attempts.path_of(run.path, 1), as_json(Attempt(number=1, started=now, end=End(kind=FINISHED, at=now))))
    return run


def _snapshot(time: float) -> dict[str, object]:
    """Return one entry of gpu_stats_<run>_multi_gpu.json. `time`: Unix s."""
    gpus = [
        {"gpu_index": i, "utilization": 95.0, "memory_used": 9000.0 + 100 * i, "memory_total": 23028.0, "power": 200.0}
        for i in range(GPUS)
    ]
    total = {"total_memory_used": sum(float(gpu["memory_used"]) for gpu in gpus), "average_utilization": 95.0}
    stamp = datetime.fromtimestamp(time, UTC).isoformat()
    return {"timestamp": stamp, "multi_gpu_data": gpus, "aggregate_stats": total}


def send_run(run: RunDir, tracker: str) -> SyncStatus:
    """Run the tracker process on the run, as a matrix does, and return its entry of track.json."""
    command = [sys.executable, "-m", "kmatrix.track", str(run.path), "--trackers", tracker, "--limit", str(LIMIT_S)]
    log = RedactedLog(run.track_log, Path(sys.executable))
    process = subprocess.Popen(
        command,
        cwd=run.path,
        env=program_environment(),
        stdin=subprocess.DEVNULL,
        stdout=log.fileno(),
        stderr=log.fileno(),
        start_new_session=True,
    )
    log.started()
    try:
        process.wait()
    finally:
        process.terminate()  # after Ctrl+C: the process has its own session and got no SIGINT
        process.wait()
        log.wait()
    found = {status.tracker: status for status in read_track(run)}
    return found.get(
        tracker, SyncStatus(tracker=tracker, state=SyncState.FAILED, error="the tracker process exited immediately")
    )


def is_online(run: RunDir, tracker: str) -> bool:
    """Return whether the run was sent to a server, and can only be checked there."""
    return tracker == "wandb" and not list((run.path / "wandb").glob("offline-run-*"))


def lost_steps(run: RunDir, tracker: str, project: str) -> dict[int, float]:
    """Return the steps, with their loss, that the tracker's own reader does not return unchanged."""
    stored = READERS[tracker](run, project)
    return {step: loss for step, loss in _losses(run).items() if not math.isclose(stored.get(step, math.nan), loss)}


def _losses(run: RunDir) -> dict[int, float]:
    lines = map(json.loads, run.metrics.read_text(encoding="utf-8").splitlines())
    return {int(line["step"]): float(line[LOSS]) for line in lines}


def _of_wandb(run: RunDir, _: str) -> dict[int, float]:
    return {step: row[LOSS] for step, row in WandbFiles(run.path).read().steps.items() if LOSS in row}


def _of_trackio(run: RunDir, project: str) -> dict[int, float]:
    program = [sys.executable, "-c", "from trackio.cli import main; main()"]
    asked = ["get", "metric", "--project", project, "--run", run.name, "--metric", LOSS, "--json"]
    place = {"TRACKIO_DIR": str(run.path.parent.parent / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*program, *asked], env={**os.environ, **place}, capture_output=True, text=True, timeout=READ_S, check=False
    )
    try:
        return {int(row["step"]): float(row["value"]) for row in json.loads(done.stdout)["values"]}
    except (ValueError, KeyError, TypeError) as error:
        why = redact((done.stderr or done.stdout).strip())[-500:] or str(error)  # before it is cut: half a key
        raise LaunchError("Trackio cannot read its own database", why=why, hint="make setup-trackers") from None


READERS = {"wandb": _of_wandb, "trackio": _of_trackio}


def tracker_failure(tracker: str, run: RunDir, status: SyncStatus) -> LaunchError:
    """Return an error with the likely cause and the end of track.log."""
    error = redact(status.error)
    cause = next((text for pattern, text in CAUSES if re.search(pattern, error, re.IGNORECASE)), "")
    log = redact(run.track_log.read_text(encoding="utf-8", errors="replace")).splitlines()[-LOG_LINES:]
    more = [line for line in log if status.error not in line]
    why = "\n  ".join([f"{cause}: {error}" if cause else error, *more])
    return LaunchError(
        f"{TITLES[tracker]} test failed: {status.points} of {STEPS} steps sent", why=why, hint="see docs/trackers.md"
    )
