"""Fill a folder with a run in Trackio. As a program: FOLDER PROJECT TIME ..."""

from __future__ import annotations

import sys
from pathlib import Path

from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.track.tracker import MetricPoint, TrackerIdentity
from kmatrix.track.trackio import TrackioMirror

LOOPBACK = "127.0.0.1"


def identity(home: Path, project: str, matrix: str) -> TrackerIdentity:
    return TrackerIdentity(
        dir=RunDir(home / matrix / "gpt2_adamw_1cpu"),
        project=project,
        name="gpt2_adamw_1cpu",
        id="a1-1",
        group=matrix,
        tags=(),
        config={},
        tracking=home,
    )


def fill(folder: str, project: str, time: str) -> None:
    """Store a run in Trackio. Needs its own process, because Trackio reads its data directory once per process."""
    mirror = TrackioMirror()
    mirror.open(identity(Path(folder), project, "m"))
    mirror.points([MetricPoint(step=0, time=float(time), values={"train/loss": 4.0})])
    mirror.close(Status.FINISHED)


if __name__ == "__main__":
    for place in range(2, len(sys.argv), 2):
        fill(sys.argv[1], *sys.argv[place : place + 2])
