"""The programs of Slurm that the runner in a job starts, with the behaviour that matters to it, on this machine alone.

    install(folder, monkeypatch)   # srun, scontrol and scancel come first in PATH

srun starts one task per node, each with its own SLURM_PROCID, waits for all, and answers SIGTERM as the real one does:
it kills every task. A host that is named in the file `dead` of the folder cannot be reached.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

OPTIONS = ("--nodes", "--ntasks", "--nodelist", "--ntasks-per-node", "--kill-on-bad-exit", "--wait", "--mpi", "--input")


def install(folder: Path, monkeypatch) -> Path:
    """Write the programs into a folder and put it first in PATH; return the log of their command lines."""
    folder.mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} {name} "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "log"


def srun(folder: Path, words: list[str]) -> int:
    """Start the tasks, and wait for them."""
    options = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    dead = (folder / "dead").read_text().split() if (folder / "dead").exists() else []
    if options.get("--nodelist") in dead:
        return 1  # as srun does once it has given up
    number = int(options["--nodes"])
    environment = [{**os.environ, "SLURM_PROCID": str(task), "SLURM_STEP_ID": "0"} for task in range(number)]
    tasks = [subprocess.Popen(words, env=variables, start_new_session=True) for variables in environment]
    if words != ["true"]:  # the probe of a host, whose step is another one
        (folder / "tasks").write_text(" ".join(str(task.pid) for task in tasks))

    def kill(*_: object) -> None:
        for task in tasks:
            os.killpg(task.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill)
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def main(folder: Path, name: str, words: list[str]) -> int:
    """Behave as one of the programs."""
    with (folder / "log").open("a") as log:
        log.write(f"{name} {' '.join(words)}\n")
    if name == "srun":
        return srun(folder, words)
    if name == "scancel":  # of a step: its tasks, wherever they are
        for pid in (folder / "tasks").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(int(pid), signal.SIGKILL)
    if name == "scontrol":
        answer = folder / f"scontrol.{words[0]}"
        print(answer.read_text() if answer.exists() else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
