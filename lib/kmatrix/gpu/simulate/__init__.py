"""GPUs that are not there: a library in the place of NVIDIA's, which plays a scenario to whoever asks it.

The real client library (nvidia-ml-py) and every program on top of it run on it unchanged, so the monitor is
tested and shown on machines without a GPU. The names of these GPUs end in "(simulated)".
`python -m kmatrix.gpu.simulate --gpus 4 -- COMMAND` runs a command with them. See docs/simulated-gpus.md.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from kmatrix.errors import LaunchError
from kmatrix.gpu.simulate import stubs
from kmatrix.gpu.simulate.scenario import Scenario, parse

HERE = Path(__file__).parent
SCENARIOS = HERE / "scenarios"  # for demonstrations: calm, lost, straggler, varied
LIBRARY = "libnvidia-ml.so.1"
SOURCES = ("nvml.c", "lists.c", "play.c", "table.c")
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("-lm", "-lpthread")


def build(folder: Path) -> Path:
    """Return the library, built with gcc below `folder` unless it is there already.

    Its folder is named by the content of everything that it is made of, so an old one is never taken for a new one.
    Raises LaunchError where there is no compiler, or where it fails.
    """
    rest = stubs.source(stubs.symbols())
    texts = [*((HERE / name).read_text(encoding="utf-8") for name in (*SOURCES, "play.h")), rest]
    content = "\0".join([*texts, *FLAGS, platform.machine()])
    library = folder / hashlib.sha256(content.encode()).hexdigest()[:16] / LIBRARY
    if library.exists():
        return library
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise LaunchError("simulated GPUs need a C compiler and there is none: install gcc")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            _compile(compiler, Path(scratch), rest)
            (Path(scratch) / LIBRARY).replace(library)  # whole or absent, also where two build at once
    except OSError as error:
        raise LaunchError(f"the library of the simulated GPUs cannot be written to {folder}", why=str(error)) from error
    return library


def environment(
    library: Path, scenario: Path | None = None, gpus: int | None = None, epoch: float | None = None
) -> dict[str, str]:
    """Return what a process needs in its environment, beside what it has, to see simulated GPUs.

    It must be there when the process starts: the loader reads LD_LIBRARY_PATH once.
    scenario: None: the calm one.  gpus: None: as many as the scenario says.
    epoch: Unix time of its second 0 (None: now); processes that are given the same one see the same at the same time.
    Raises ConfigError for a mistake in the scenario.
    """
    checked = parse(scenario or SCENARIOS / "calm.scn", gpus)
    path = [str(library.parent.resolve()), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, path)),
        "KMATRIX_SIMULATE": str(_write_table(checked, library.parent.resolve())),
        "KMATRIX_SIMULATE_EPOCH": repr(time.time() if epoch is None else epoch),
    }


def uuids(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that a process with this environment sees, as nvml.c gives them."""
    first, *_ = Path(environment["KMATRIX_SIMULATE"]).read_text(encoding="utf-8").splitlines()
    return tuple(f"GPU-00000000-0000-4000-8000-{index:012x}" for index in range(int(first.removeprefix("gpus "))))


def _compile(compiler: str, scratch: Path, rest: str) -> None:
    (scratch / "stubs.c").write_text(rest, encoding="utf-8")
    sources = [*(str(HERE / name) for name in SOURCES), str(scratch / "stubs.c")]
    command = [compiler, *FLAGS, "-o", str(scratch / LIBRARY), *sources, *LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(
            f"{compiler} cannot build the library of the simulated GPUs",
            why=(done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[0],
            fix="install gcc and the C library's headers (Debian: apt install gcc libc6-dev)",
        )


def _write_table(scenario: Scenario, folder: Path) -> Path:
    """Write the table beside the library, named by its content, and return where."""
    text = scenario.table()
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.table"
    if path.exists():
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise LaunchError(f"the table of {scenario.path} cannot be written to {folder}", why=str(error)) from error
    return path


__all__ = ["SCENARIOS", "Scenario", "build", "environment", "parse", "uuids"]
