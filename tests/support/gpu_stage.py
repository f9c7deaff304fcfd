"""Run the commands of a clone on simulated GPUs, for stories."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LIBRARY = ".venv/simulate"  # where the clone builds its simulated GPUs


def on_gpus(clone: Any, scenario: Path, *command: str, gpus: int | None = None) -> list[str]:
    """Return the command line that runs `command` of the clone on simulated GPUs."""
    number = ["--gpus", str(gpus)] if gpus is not None else []
    simulate = [clone.python, "-m", "kmatrix.simulate", "--library", LIBRARY, "--scenario", str(scenario)]
    return [*simulate, *number, "--", *command]


def scenario(folder: Path, *lines: str, name: str = "test") -> Path:
    """Write a scenario file and return its path."""
    path = folder / f"{name}.scn"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


@contextlib.contextmanager
def background_process(clone: Any, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command in the clone, and kill it with all its children at the end of the block."""
    process = subprocess.Popen(
        command,
        cwd=clone.root,
        env=clone.environment,
        stdout=subprocess.DEVNULL,  # a pipe that nothing reads would fill up and block the command
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_independently(single: Path, multi: Path) -> dict[str, Any]:
    """Read a pair of recordings with the script that does not use kmatrix."""
    script = Path(__file__).with_name("independent_reader.py")
    command: Sequence[str] = [sys.executable, "-I", str(script), str(single), str(multi)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def load_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
