"""wandb-test and trackio-test: a made-up run through the real path in seconds, for who sets up a machine."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import ROOT
from kmatrix.cli.trackers import TITLES, WANDB_SYMBOLS, configured, need_trackers, wandb_words
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.kconfig.strict import SLUG
from kmatrix.records import MATRIX_PREFIX, RunDir, Status, append_jsonl, write_json, write_json_array
from kmatrix.records.tracking import Sending, Sent, read_track
from kmatrix.redaction import redact

STEPS = 20
GPUS = 2
PROJECT = "kmatrix-test"
NAME = "gpt2_made_up_2gpu"
LIMIT_S = 35  # that a tracker may take nothing for; W&B gives up on a server after 20
READ_S = 60.0
LINES = 5  # of the tracker process's log
LOSS = "train/loss"
CAUSES = (  # what an error of a tracker's package says -> what is wrong
    (r"WANDB_MODE", "it is switched off here: unset WANDB_MODE"),
    (r"401|403|api.?key|authenti|unauthori|permission|entity", "the key is wrong, or is not one of this project"),
    (r"timed? ?out|connect|resolve|unreachable|network|CommError|refused|proxy", "the server cannot be reached"),
    (r"No module|ImportError|cannot import", "its package is damaged: make setup-trackers"),
    (r"No space|disk|Read-only|Permission denied", "the folder for temporary files cannot be written to"),
)


def wandb_test(arguments: Arguments) -> int:
    """Send a made-up run to W&B, or into files where it is offline here, and read it back."""
    return _test("wandb", arguments)


def trackio_test(arguments: Arguments) -> int:
    """Put a made-up run into a Trackio database and read it back."""
    return _test("trackio", arguments)


def _test(tracker: str, arguments: Arguments) -> int:
    need_trackers([tracker])
    project = arguments.get("PROJECT", PROJECT)
    if not SLUG.fullmatch(project):
        raise ConfigError(f"PROJECT={project}", why="it is a name of small letters, digits and hyphens")
    symbols = {name: configured(arguments, name) for name in WANDB_SYMBOLS}
    with tempfile.TemporaryDirectory(prefix="kmatrix_") as folder:
        print(f"{TITLES[tracker]}: sending a made-up run of {STEPS} steps ...", flush=True)
        run = made_up_run(Path(folder), tracker, project, symbols)
        began = time.monotonic()
        sent = _send(run, tracker)
        if sent.state is not Sending.DONE:
            raise _failure(tracker, run, sent)
        seconds = time.monotonic() - began
        how = f" ({wandb_words(symbols)})" if tracker == "wandb" else ""
        if _is_online(run, tracker):  # only its server could be asked
            print(f"{TITLES[tracker]} works{how}: it took {STEPS} steps in {seconds:.1f} s")
            print(f"  look at {sent.link}, and delete the run there when you have seen it")
            return 0
        if lost := _lost(run, tracker, project):
            raise LaunchError(
                f"{TITLES[tracker]} took {STEPS} steps and lost {len(lost)}", why=f"step {min(lost)} first"
            )
        print(f"{TITLES[tracker]} works{how}: {STEPS} steps were sent in {seconds:.1f} s, and read back")
    return 0


def made_up_run(results: Path, tracker: str, project: str, symbols: Mapping[str, str]) -> RunDir:
    """Write the folder of a finished run as runner, trainer and recorder write it, with losses of a formula."""
    now = time.time()
    stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now))
    run = RunDir(results / f"{MATRIX_PREFIX}{stamp}" / NAME)
    run.path.mkdir(parents=True)
    tracking = {"trackers": [tracker], "project": project, "limit_s": LIMIT_S}
    about = {"run_id": f"madeup{os.getpid():x}", "name": run.name, "matrix": run.path.parent.name, "train": {}}
    axes = {"optimizer": "made-up", "gpus": str(GPUS)}
    write_json(run.run_json, {**about, "axes": axes, "symbols": dict(symbols), "tracking": tracking})
    for step in range(STEPS):
        moment = {"step": step, "time": now - STEPS + step, "attempt": 1, "tokens": 4096 * step}
        append_jsonl(run.metrics, {**moment, LOSS: 2 + 9 * math.exp(-step / 5), "train/lr": 6e-4})
    write_json_array(run.gpu_stats_multi, [_snapshot(now - STEPS + step) for step in range(STEPS)])
    write_json(run.status, {"status": Status.FINISHED, "attempt": 1, "attempts": []})
    return run


def _snapshot(moment: float) -> dict[str, object]:
    """One entry of a recording of several GPUs."""
    gpus = [
        {"gpu_index": i, "utilization": 95.0, "memory_used": 9000.0 + 100 * i, "memory_total": 23028.0, "power": 200.0}
        for i in range(GPUS)
    ]
    total = {"total_memory_used": sum(float(gpu["memory_used"]) for gpu in gpus), "average_utilization": 95.0}
    stamp = datetime.fromtimestamp(moment, UTC).isoformat()
    return {"timestamp": stamp, "multi_gpu_data": gpus, "aggregate_stats": total}


def _send(run: RunDir, tracker: str) -> Sent:
    """Let the tracker process feed the run as after a matrix, and return what it says of it."""
    command = [sys.executable, "-m", "kmatrix.track", str(run.path), "--trackers", tracker, "--limit", str(LIMIT_S)]
    path = os.pathsep.join(filter(None, [str(ROOT / "lib"), os.environ.get("PYTHONPATH", "")]))
    with run.track_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=run.path,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait()
        finally:
            process.terminate()  # Ctrl+C: its own session has not heard it
            process.wait()
    found = {sent.tracker: sent for sent in read_track(run)}
    return found.get(tracker, Sent(tracker=tracker, state=Sending.FAILED, error="the tracker process ended at once"))


def _is_online(run: RunDir, tracker: str) -> bool:
    """Whether the run went to a server, which alone can be asked for it."""
    return tracker == "wandb" and not list((run.path / "wandb").glob("offline-run-*"))


def _lost(run: RunDir, tracker: str, project: str) -> dict[int, float]:
    """Return the steps whose loss the tracker's own reader does not give back as it was written."""
    held = READERS[tracker](run, project)
    return {step: loss for step, loss in _losses(run).items() if not math.isclose(held.get(step, math.nan), loss)}


def _losses(run: RunDir) -> dict[int, float]:
    lines = map(json.loads, run.metrics.read_text(encoding="utf-8").splitlines())
    return {int(line["step"]): float(line[LOSS]) for line in lines}


def _of_wandb(run: RunDir, _: str) -> dict[int, float]:
    from kmatrix.track.wandb_files import WandbFiles

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
        why = redact((done.stderr or done.stdout).strip()[-500:]) or str(error)
        raise LaunchError("Trackio's own reader cannot read its database", why=why, fix="make setup-trackers") from None


READERS = {"wandb": _of_wandb, "trackio": _of_trackio}


def _failure(tracker: str, run: RunDir, sent: Sent) -> LaunchError:
    """Return what is wrong, as far as the tracker's package says it."""
    error = redact(sent.error)
    cause = next((words for pattern, words in CAUSES if re.search(pattern, error, re.IGNORECASE)), "")
    log = redact(run.track_log.read_text(encoding="utf-8", errors="replace")).splitlines()[-LINES:]
    more = [line for line in log if sent.error not in line]
    why = "\n  ".join([f"{cause}: {error}" if cause else error, *more])
    return LaunchError(
        f"{TITLES[tracker]} does not take a run: {sent.points} of {STEPS} steps", why=why, fix="see docs/trackers.md"
    )
