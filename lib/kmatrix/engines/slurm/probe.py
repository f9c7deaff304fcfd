"""Measure the storage that two nodes of a cluster share: locks, caches and clocks. `srun` runs it, one task per node.

    srun --nodes=2 --ntasks=2 --ntasks-per-node=1 python -m kmatrix.engines.slurm.probe FOLDER

Each task prints one line of JSON. The two tasks wait for each other by files, whose names they list: a list is fresh
also if a look for one name is not.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

WAIT_S = 90.0  # for the other task
MOST_LAG_S = 70.0  # caches of NFS keep attributes for 60 s at most by default (nfs(5), acregmax)
POLL_S = 0.2


def main(arguments: list[str]) -> int:
    """Print what this node has found, as one line of JSON. Return 1 if the other node was not seen."""
    folder, task = Path(arguments[0]), int(os.environ.get("SLURM_PROCID", "0"))
    found: dict[str, object] = {"task": task, "host": socket.gethostname(), "clock": clock_offset(folder, task)}
    try:
        found |= _hold(folder) if task == 0 else _look(folder)
    except TimeoutError as error:
        found["error"] = str(error)
    print(json.dumps(found), flush=True)
    return 1 if "error" in found else 0


def clock_offset(folder: Path, task: int) -> float:
    """Return the clock of this host minus that of the storage, in seconds."""
    path = folder / f"clock.{task}"
    before = time.time()
    path.write_text("now", encoding="utf-8")
    return round((before + time.time()) / 2 - path.stat().st_mtime, 3)


def _hold(folder: Path) -> dict[str, object]:
    """Keep a lock, and create a file that the other task has looked for before."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "locked").touch()
        _wait(folder, "asked")
        (folder / "late").touch()
        _wait(folder, "seen")
    return {}


def _look(folder: Path) -> dict[str, object]:
    """Try the lock that the other task holds, and measure how long a new file stays invisible."""
    _wait(folder, "locked")
    with (folder / "lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            excluded = False
        except OSError:
            excluded = True
    late = folder / "late"
    late.exists()  # from now on, the storage may believe for a while that it is missing
    (folder / "asked").touch()
    # A list of the folder would refresh the caches here, too, so the other task's file alone is looked for.
    began = time.monotonic()
    while not late.exists() and time.monotonic() - began < MOST_LAG_S:
        time.sleep(POLL_S)
    lag = round(time.monotonic() - began, 1)
    (folder / "seen").touch()
    return {"excluded": excluded, "lag_s": lag}


def _wait(folder: Path, name: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while name not in os.listdir(folder):  # noqa: PTH208  (names alone)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} of the other node is not visible after {WAIT_S:g} s")
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
