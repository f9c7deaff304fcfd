"""The screen of all GPUs, and simulated GPUs for a demonstration."""

from __future__ import annotations

import os
import sys
import time

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import ROOT
from kmatrix.errors import ConfigError

MOST = 64


def gputop(arguments: Arguments) -> int:
    """Show every GPU; RUN=<run directory> follows a run's recorder, SIMULATE=n shows n simulated GPUs."""
    words = ["--run", arguments.get("RUN")] if arguments.get("RUN") else []
    words += ["--gpus", arguments.get("GPUS")] if arguments.get("GPUS") else []
    if arguments.get("SIMULATE"):  # the loader reads where libraries lie when a program starts: it starts anew
        environment = {**os.environ, **simulation(arguments.get("SIMULATE"))}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "lib"), environment.get("PYTHONPATH", "")])
        os.execve(sys.executable, [sys.executable, "-m", "kmatrix.gpu.top", *words], environment)
    from kmatrix.gpu.top import main

    return main(words)


def simulation(text: str) -> dict[str, str]:
    """Return what the environment of a process needs so that it sees n simulated GPUs; builds them on first use."""
    from kmatrix.gpu import simulate

    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ConfigError(f"SIMULATE={text} is no number of GPUs", why=f"it is a whole number from 1 to {MOST}")
    library = simulate.build(ROOT / ".venv" / "simulate")
    return simulate.environment(library, simulate.SCENARIOS / "calm.scn", int(text), time.time())
