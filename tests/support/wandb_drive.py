"""Send one run to W&B with WandbMirror in another process: `drive(folder, actions)` returns what the process printed.

Actions: ["open"], ["points", first, end], ["devices", time, value], ["alert", title], ["kill"], ["kill core"],
["pause core"] (and be killed), ["wait for", step] (until that step's row is on the disk), ["close", status].
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.track.tracker import DeviceValues, MetricPoint, StoredRun, TrackerAlert, TrackerIdentity
from kmatrix.track.wandb import WandbFiles, WandbMirror
from waiting import wait_until

EPOCH = 1_700_000_000.0  # the time of step 0; a step takes a second
RUN = "gpt2_adamw_1cpu"
PROJECT = "gpt2-abcde"
CONFIG = {"GPT2_OPTIMIZER": "adamw", "GPT2_LEARNING_RATE": "6e-4", "GPT2_MAX_ITERS": "40", "run_id": "cafe"}


def point(step: int) -> MetricPoint:
    """Return the metrics of a step; every tenth step has a validation loss."""
    values = {"train/loss": 11 - step / 10, "tokens": step * 1024.0, "elapsed_s": step * 60.0}
    return MetricPoint(
        step=step, time=EPOCH + step, values=values | ({"val/loss": 11.5 - step / 10} if step % 10 == 0 else {})
    )


def identity(folder: Path, project: str = PROJECT) -> TrackerIdentity:
    """Return the identity of the run in this folder."""
    run = RunDir(folder / RUN)
    tags = ("optimizer=adamw",)
    return TrackerIdentity(
        dir=run,
        project=project,
        name=run.name,
        id="cafe-1",
        group=folder.name,
        tags=tags,
        config=CONFIG,
        tracking=folder,
    )


def drive(
    folder: Path,
    *actions: Sequence[Any],
    environ: Mapping[str, str] | None = None,
    below: Sequence[str] = (),
    project: str = PROJECT,
) -> dict[str, Any]:
    """Do these actions in another process with an empty home; return the last JSON line that it printed.

    below: a command that wraps the process.
    """
    process = start_driver(folder, *actions, environ=environ, below=below, project=project)
    stdout, stderr = process.communicate(timeout=600)
    output: dict[str, Any] = json.loads(stdout.splitlines()[-1]) if stdout.strip() else {}
    return {**output, "code": process.returncode, "stderr": stderr}


def start_driver(
    folder: Path,
    *actions: Sequence[Any],
    environ: Mapping[str, str] | None = None,
    below: Sequence[str] = (),
    project: str = PROJECT,
) -> subprocess.Popen[str]:
    """Start the process of `drive`."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    # The tester's own login and mode must not affect the run.
    kept = {name: text for name, text in os.environ.items() if not name.startswith("WANDB")}
    return subprocess.Popen(
        [*below, sys.executable, __file__, str(folder), json.dumps(actions), project],
        env={**kept, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


CALLS: dict[str, Callable[[WandbMirror, Any], None]] = {  # of actions with one argument
    "configure": lambda mirror, values: mirror.configure(values),
    "alert": lambda mirror, title: mirror.alert(TrackerAlert(time=EPOCH, title=title, text="look")),
    "close": lambda mirror, status: mirror.close(Status(status)),
}


def main(folder: Path, actions: Sequence[Sequence[Any]], project: str) -> None:
    """Execute the actions."""
    run = identity(folder, project)
    run.dir.path.mkdir(parents=True, exist_ok=True)
    mirror, stored = WandbMirror(), StoredRun(steps={})
    for name, *arguments in actions:
        if name == "open":
            start = time.monotonic()
            stored = mirror.open(run)
            output = {"steps": list(stored.steps), "devices_time": stored.devices_time, "alerts": stored.alerts}
            output |= {"link": stored.link, "how": stored.how, "seconds": time.monotonic() - start}
            print(json.dumps(output), flush=True)
        elif name == "points":
            mirror.points([point(step) for step in range(*arguments) if step not in stored.steps])
        elif name == "devices":
            mirror.devices([DeviceValues(time=arguments[0], values={"gpu_total_memory": arguments[1]})])
        elif name == "wait for":
            wait_until(lambda step=arguments[0]: step in WandbFiles(run.dir.path, run.id).read().steps)
        elif name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name in ("kill core", "pause core"):
            core = next(child for child in psutil.Process().children(recursive=True) if "wandb-core" in child.name())
            if name == "pause core":  # and die, before W&B's package notices
                core.suspend()
                os.kill(os.getpid(), signal.SIGKILL)
            core.kill()
            core.wait()
        elif name == "new mirror":
            mirror = WandbMirror()
        else:
            CALLS[name](mirror, arguments[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
