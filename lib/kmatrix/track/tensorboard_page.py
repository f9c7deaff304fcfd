"""TensorBoard's page of a folder of event files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kmatrix.track.page import Page, free_port

RELOAD_S = 5.0


def recorded(folder: Path) -> bool:
    """Whether there is an event file below the folder."""
    return any(folder.glob("**/events.out.tfevents.*"))


def serve(folder: Path, host: str, port: int) -> Page:
    """Serve the page from the first free port from `port` upward, until this process ends."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from tensorboard import default, program

    found = free_port(host, port)
    board = program.TensorBoard(default.get_plugins())
    # "fast" is a further process, which would outlive a killed one, and says that it is an experiment
    board.configure(logdir=str(folder), host=host, port=found, reload_interval=RELOAD_S, load_fast="false")
    return Page(url=board.launch(), port=found, pid=os.getpid())
