"""The screen of all GPUs, and simulated GPUs for a demonstration."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import ROOT
from kmatrix.errors import ConfigError

MOST = 64
DEMONSTRATION = "varied"  # the scenario of SIMULATE=<number>


def gputop(arguments: Arguments) -> int:
    """Show every GPU; RUN=<run directory> follows a run, SIMULATE=<number or scenario> shows simulated GPUs."""
    words = ["--run", arguments.get("RUN")] if arguments.get("RUN") else []
    words += ["--gpus", arguments.get("GPUS")] if arguments.get("GPUS") else []
    if arguments.get("SIMULATE"):  # the loader reads where libraries lie when a program starts: it starts anew
        environment = {**os.environ, **simulation(arguments.get("SIMULATE"))}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "lib"), environment.get("PYTHONPATH", "")])
        os.execve(sys.executable, [sys.executable, "-m", "kmatrix.gpu.top", *words], environment)
    from kmatrix.gpu.top import main

    return main(words)


def simulation(text: str) -> dict[str, str]:
    """Return what the environment of a process needs so that it sees simulated GPUs; builds them on first use.

    text: how many, the name of a scenario of ours, or a file that holds one.
    """
    from kmatrix.gpu import simulate

    ours = {path.stem: path for path in simulate.SCENARIOS.glob("*.scn")}
    if text.isdecimal():
        if not 1 <= int(text) <= MOST:
            raise ConfigError(f"SIMULATE={text} is no number of GPUs", why=f"it is a whole number from 1 to {MOST}")
        scenario, gpus = ours[DEMONSTRATION], int(text)
    elif text in ours or Path(text).is_file():
        scenario, gpus = ours.get(text) or Path(text), None
    else:
        raise ConfigError(
            f"SIMULATE={text} is neither a number nor a scenario",
            why=f"the scenarios are {', '.join(sorted(ours))}",
            fix="pass SIMULATE=4, one of these, or a file: docs/simulated-gpus.md says how to write one",
        )
    return simulate.environment(simulate.build(ROOT / ".venv" / "simulate"), scenario, gpus, time.time())
