"""Check that all nodes of a run see its folders, before the first one is needed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from gpt2.dist import World, gather
from kmatrix.errors import LaunchError
from kmatrix.own_file import opener

# Caches of network storage hide a new file from other nodes for up to a minute (acdirmax of nfs(5)); a list of the
# folder shows it at once on most of them.
WAIT_S = 90.0
POLL_S = 0.5


def check_shared(folders: Sequence[tuple[str, Path]], world: World, *, wait_s: float = WAIT_S) -> None:
    """Raise LaunchError, on every rank, if a node does not see a folder as node 0 does. Every rank calls it.

    folders: each with the symbol that sets it.  wait_s: seconds that a node may take to see a new file.
    """
    if world.nodes == 1:
        return
    name = f".shared.{os.urandom(8).hex()}" if world.main else ""
    try:
        if world.main:
            for _, folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / name, "xb", opener=opener):
                    pass
        name = gather(world, name)[0]
        missing = [] if world.local_rank else _wait_for(name, folders, wait_s)
        reports = [report for report in gather(world, (socket.gethostname(), missing)) if report[1]]
    finally:
        if world.main:
            for _, folder in folders:
                (folder / name).unlink(missing_ok=True)
    if reports:
        host, (symbol, path) = reports[0][0], reports[0][1][0]
        raise LaunchError(
            f"{host} does not see the files that the other nodes write to {path}",
            why="a run over several nodes needs storage that all of them share",
            hint=f"set {symbol} to a folder on shared storage",
        )


def _wait_for(name: str, folders: Sequence[tuple[str, Path]], wait_s: float) -> list[tuple[str, str]]:
    """Return the folders, each with its symbol, in which a file does not appear in time."""
    deadline = time.monotonic() + wait_s
    while missing := [(symbol, str(folder)) for symbol, folder in folders if not _has(folder, name)]:
        if time.monotonic() > deadline:
            return missing
        time.sleep(POLL_S)
    return []


def _has(folder: Path, name: str) -> bool:
    """Return whether a folder lists a file. Asking for the name itself could be answered by a cache for longer."""
    try:
        return name in os.listdir(folder)  # noqa: PTH208  (names alone)
    except OSError:
        return False
