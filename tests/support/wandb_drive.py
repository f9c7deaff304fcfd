"""A process that hands one run to W&B by our mirror: `drive(folder, actions)` does the actions, and says what it met.

Actions: ["open"], ["points", first, end], ["devices", time, value], ["alert", title], ["kill"], ["kill core"],
["wait for", step] (until that step's row is on the disk), ["close", status].
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.track.tracker import DeviceValues, MetricPoint, StoredRun, TrackerAlert, TrackerIdentity
from kmatrix.track.wandb import WandbFiles, WandbMirror
from waiting import until

EPOCH = 1_700_000_000.0  # the time of step 0; a step takes a second
RUN = "gpt2_adamw_1cpu"
CONFIG = {"GPT2_OPTIMIZER": "adamw", "GPT2_LEARNING_RATE": "6e-4", "GPT2_MAX_ITERS": "40", "run_id": "cafe"}


def point(step: int) -> MetricPoint:
    """Return the metrics of a step; each tenth step is evaluated."""
    values = {"train/loss": 11 - step / 10, "tokens": step * 1024.0}
    return MetricPoint(
        step=step, time=EPOCH + step, values=values | ({"val/loss": 11.5 - step / 10} if step % 10 == 0 else {})
    )


def identity(folder: Path) -> TrackerIdentity:
    """Return the run in this folder."""
    run = RunDir(folder / RUN)
    tags = ("optimizer=adamw",)
    return TrackerIdentity(
        dir=run,
        project="gpt2-abcde",
        name=run.name,
        id="cafe-1",
        group=folder.name,
        tags=tags,
        config=CONFIG,
        tracking=folder,
    )


def drive(
    folder: Path, *actions: Sequence[Any], environ: Mapping[str, str] | None = None, below: Sequence[str] = ()
) -> dict[str, Any]:
    """Do these actions in a process of its own, at home in an empty folder; return the last thing that was stored.

    below: a command that runs the process.
    """
    process = begin(folder, *actions, environ=environ, below=below)
    stdout, stderr = process.communicate(timeout=200)
    said: dict[str, Any] = json.loads(stdout.splitlines()[-1]) if stdout.strip() else {}
    return {**said, "code": process.returncode, "stderr": stderr}


def begin(
    folder: Path, *actions: Sequence[Any], environ: Mapping[str, str] | None = None, below: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start that process."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("WANDB")}
    return subprocess.Popen(
        [*below, sys.executable, __file__, str(folder), json.dumps(actions)],
        env={**kept, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def main(folder: Path, actions: Sequence[Sequence[Any]]) -> None:
    """Do the actions."""
    run = identity(folder)
    run.dir.path.mkdir(parents=True, exist_ok=True)
    mirror, stored = WandbMirror(), StoredRun(steps={})
    for name, *words in actions:
        if name == "open":
            begun = time.monotonic()
            stored = mirror.open(run)
            said = {"steps": list(stored.steps), "devices_time": stored.devices_time, "alerts": stored.alerts}
            said |= {"link": stored.link, "how": stored.how, "seconds": time.monotonic() - begun}
            print(json.dumps(said), flush=True)
        elif name == "points":
            mirror.points([point(step) for step in range(*words) if step not in stored.steps])
        elif name == "devices":
            mirror.devices([DeviceValues(time=words[0], values={"gpu_total_memory": words[1]})])
        elif name == "alert":
            mirror.alert(TrackerAlert(time=EPOCH, title=words[0], text="look"))
        elif name == "wait for":
            until(lambda step=words[0]: step in WandbFiles(run.dir.path, run.id).read().steps)
        elif name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "kill core":
            core = next(child for child in psutil.Process().children(recursive=True) if "wandb-core" in child.name())
            core.kill()
            core.wait()
        elif name == "new mirror":
            mirror = WandbMirror()
        elif name == "close":
            mirror.close(Status(words[0]))
        else:
            raise ValueError(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
