"""What W&B keeps of a run on this machine: a folder for each time that the run was opened, read by W&B's own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READ_S = 120.0  # for one folder; 20,000 rows of 26 values take 11 s on a busy machine
QUIET = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}  # the reader has nothing to say to anybody


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the files hold.

    steps: each row's numbers.  time: of the newest row, Unix seconds.  alerts: how many.
    status: how the run ended the last time that it was opened; empty where it was cut short.
    """

    steps: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    time: float = 0.0
    alerts: int = 0
    status: str = ""


@dataclass(frozen=True, slots=True)
class WandbFiles:
    """The folders of one W&B run below a run's folder.

    run: the run's folder.  id: of the W&B run; None for any.
    """

    run: Path
    id: str | None = None

    @property
    def folder(self) -> Path:
        return self.run / "wandb"

    @property
    def pieces(self) -> list[Path]:
        """Each time that the run was opened, the oldest first: offline-run-<date>-<id> and run-<date>-<id>."""
        found = self.folder.glob(f"*run-*-*/run-{self.id or '*'}.wandb")
        return sorted((path.parent for path in found), key=lambda piece: piece.name.removeprefix("offline-"))

    def read(self) -> Written:
        """Read every piece, up to where a kill cut it short; a later piece's values count over an earlier one's."""
        steps: dict[int, Mapping[str, float]] = {}
        alerts, status = 0, ""
        for piece in self.pieces:
            status = ""
            for record in records(piece):
                if record.get("type") == "history":
                    row = numbers(record["history"].get("item", {}))
                    step = int(row.pop("_step"))
                    steps[step] = {**steps.get(step, {}), **row}
                alerts += record.get("type") == "alert"
                status = str(record.get("summary", {}).get("update", {}).get("status") or status)
        newest = max((row.get("_timestamp", 0.0) for row in steps.values()), default=0.0)
        return Written(steps=dict(sorted(steps.items())), time=newest, alerts=alerts, status=status)

    def lacks(self, step: int) -> bool:
        """Whether the newest piece has no row of a step, or there is none: W&B goes elsewhere where it cannot write."""
        newest = records(self.pieces[-1]) if self.pieces else ()
        return all(record["history"]["item"].get("_step") != step for record in newest if "history" in record)

    def mark_synced(self) -> None:
        """Let `wandb sync` pass these pieces by: the server has what they hold."""
        for piece in self.pieces:
            for path in piece.glob("run-*.wandb"):
                path.with_name(f"{path.name}.synced").touch()


def records(piece: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of one folder as `wandb leet inspect --json` prints them.

    Raises TimeoutError where that takes longer than any file should.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(piece)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env={**os.environ, **QUIET}, **pipes) as reader:
        limit = threading.Timer(READ_S, reader.kill)
        limit.start()
        try:
            for line in reader.stdout or ():
                yield json.loads(line)
        finally:
            limit.cancel()
            reader.kill()
    if time.monotonic() - began >= READ_S:
        raise TimeoutError(f"{piece} was not read within {READ_S:.0f} s")


def fatal_error(log: Path) -> str:
    """Return why W&B's service gave up sending, by its own log; "" where it did not."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = [line for line in lines if '"msg":"' in line and "fatal error: " in line]
    return str(json.loads(found[0])["msg"]).partition("fatal error: ")[2] if found else ""


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's numbers; W&B writes those that are none of JSON's as the words NaN, Infinity and -Infinity."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = value
        elif value in ("NaN", "Infinity", "-Infinity"):
            found[key] = float(value)
    return found
