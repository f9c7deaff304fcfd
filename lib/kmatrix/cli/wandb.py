"""make wandb-view: the runs of a matrix in W&B's own screen for the terminal, from what they keep on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import shown
from kmatrix.cli.targets import chosen_runs, find_target
from kmatrix.cli.trackers import need_trackers
from kmatrix.errors import ConfigError
from kmatrix.records import RunDir
from kmatrix.track.wandb_files import QUIET, WandbFiles


def view(arguments: Arguments) -> int:
    """Show the runs of TARGET= that fit RUN=, side by side: it needs no key, no server and no connection.

    Returns the screen's exit status.
    Raises ConfigError where no run has W&B data, and where there is no terminal.
    """
    need_trackers(("wandb",))
    matrix = find_target(arguments)
    runs = chosen_runs(matrix, arguments)
    with_data = [run for run in runs if WandbFiles(run.path).pieces]
    if not with_data:
        raise ConfigError(
            f"{shown(matrix.path)} has no W&B data of {', '.join(run.name for run in runs)}",
            why="they ran without TRACKER=wandb, or have not begun",
            fix="name another matrix with TARGET=, or run with TRACKER=wandb",
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "wandb-view needs a terminal",
            fix=f"read the files with: wandb leet inspect --json {shown(WandbFiles(with_data[0].path).pieces[-1])}",
        )
    if without := [run.name for run in runs if run not in with_data]:
        print(f"without W&B data: {', '.join(without)}")
    with tempfile.TemporaryDirectory() as folder:
        gather(with_data, Path(folder))
        command = [sys.executable, "-m", "wandb", "leet", folder]
        return subprocess.run(command, env={**os.environ, **QUIET}, check=False).returncode


def gather(runs: Sequence[RunDir], folder: Path) -> None:
    """Link the files of all runs into one folder as W&B lays out its own, under the runs' names.

    A run that was opened more than once has an entry for each time: <name>, <name>.2, ... The screen reads the time
    from an entry's name, and shows the newest first.
    """
    for run in runs:
        for opened, piece in enumerate(WandbFiles(run.path).pieces, start=1):
            name = run.name if opened == 1 else f"{run.name}.{opened}"
            time = re.search(r"\d{8}_\d{6}", piece.name)
            entry = folder / f"run-{time[0] if time else '00000000_000000'}-{name}"
            entry.mkdir()
            (entry / f"run-{name}.wandb").symlink_to(next(piece.glob("run-*.wandb")).resolve())
