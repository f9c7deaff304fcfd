"""Build the simulated NVML library, and prepare the environment of processes that use it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from kmatrix.errors import ConfigError, LaunchError, reason_of
from kmatrix.records.files import write_text
from kmatrix.records.paths import ROOT
from kmatrix.simulate.scenario import MAX_GPUS, Scenario, parse

HERE = Path(__file__).parent
SCENARIOS = HERE / "scenarios"  # included scenarios: calm, lost, straggler, varied
LIBRARY = "libnvidia-ml.so.1"
SOURCES = ("nvml.c", "lists.c", "play.c", "table.c")
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("-lm", "-lpthread")
DEMONSTRATION = "varied"  # the scenario of SIMULATE=<number>
NOT_SUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED
_ASKED_FOR = re.compile(r'_nvmlGetFunctionPointer\("(\w+)"\)')


def build(folder: Path) -> Path:
    """Build the library with gcc below `folder`, unless it exists, and return its path.

    The name of its directory is a hash of all sources and flags, so an outdated library is never used.
    Raises LaunchError if there is no compiler, or if it fails.
    """
    rest = source(symbols())
    texts = [*((HERE / name).read_text(encoding="utf-8") for name in (*SOURCES, "play.h")), rest]
    content = "\0".join([*texts, *FLAGS, platform.machine()])
    library = folder / hashlib.sha256(content.encode()).hexdigest()[:16] / LIBRARY
    if library.exists():
        return library
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise LaunchError("simulated GPUs need a C compiler", why="neither gcc nor cc was found", hint="install gcc")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            _compile(compiler, Path(scratch), rest)
            # Atomic: two processes may build it at the same time, and a third may be loading it.
            (Path(scratch) / LIBRARY).replace(library)
    except OSError as error:
        raise LaunchError(f"cannot write the library of simulated GPUs to {folder}", why=reason_of(error)) from error
    return library


def environment(
    library: Path, scenario: Path | None = None, gpus: int | None = None, epoch: float | None = None
) -> dict[str, str]:
    """Return the environment variables with which a process sees simulated GPUs.

    They must be set before the process starts, because the loader reads LD_LIBRARY_PATH only once.
    `scenario`: None: calm. `gpus`: None: the number of the scenario. `epoch`: Unix time of second 0 of the scenario
    (None: now); processes with the same epoch see the same values at the same time.
    Raises ConfigError for an error in the scenario.
    """
    checked = parse(scenario or SCENARIOS / "calm.scn", gpus)
    # Before the user's directories, so that the simulation hides a real driver. Absolute: processes change directory.
    path = [str(library.parent.resolve()), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, path)),
        "KMATRIX_SIMULATE": str(_write_table(checked, library.parent.resolve())),
        "KMATRIX_SIMULATE_EPOCH": repr(time.time() if epoch is None else epoch),
    }


def uuids(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in this environment, in the format of nvml.c."""
    first, *_ = Path(environment["KMATRIX_SIMULATE"]).read_text(encoding="utf-8").splitlines()
    return tuple(f"GPU-00000000-0000-4000-8000-{index:012x}" for index in range(int(first.removeprefix("gpus "))))


def _compile(compiler: str, scratch: Path, rest: str) -> None:
    (scratch / "stubs.c").write_text(rest, encoding="utf-8")
    sources = [*(str(HERE / name) for name in SOURCES), str(scratch / "stubs.c")]
    command = [compiler, *FLAGS, "-o", str(scratch / LIBRARY), *sources, *LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(
            f"{compiler} failed to build the library of simulated GPUs",
            why=(done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0],
            hint="install gcc and the C headers (Debian: apt install gcc libc6-dev)",
        )


def _write_table(scenario: Scenario, folder: Path) -> Path:
    """Write the table next to the library, with a hash as its name, and return its path."""
    text = scenario.table()
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.table"
    if path.exists():
        return path
    try:
        write_text(path, text)
    except OSError as error:
        raise LaunchError(f"cannot write the table of {scenario.path} to {folder}", why=reason_of(error)) from error
    return path


def simulation(text: str) -> dict[str, str]:
    """Return the environment variables for SIMULATE=, building the library on first use.

    `text`: a number of GPUs, the name of an included scenario, or the path of a scenario.
    """
    included = {path.stem: path for path in SCENARIOS.glob("*.scn")}
    if text.isdecimal():
        if not 1 <= int(text) <= MAX_GPUS:
            raise ConfigError(f"invalid SIMULATE={text}", why=f"expected a number of GPUs from 1 to {MAX_GPUS}")
        scenario, gpus = included[DEMONSTRATION], int(text)
    elif text in included or Path(text).is_file():
        scenario, gpus = included.get(text) or Path(text), None
    else:
        raise ConfigError(
            f"SIMULATE={text} is neither a number nor a scenario",
            why=f"the scenarios are {', '.join(sorted(included))}",
            hint="pass SIMULATE=4, a scenario, or a file (format: docs/gputop.md)",
        )
    return environment(build(ROOT / ".venv" / "simulate"), scenario, gpus, time.time())


def symbols() -> tuple[str, ...]:
    """Return the sorted names of the NVML functions that nvidia-ml-py uses, from its source text."""
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        raise LaunchError(
            "simulated GPUs need the package nvidia-ml-py", why="it is not installed", hint="run `make setup`"
        )
    return tuple(sorted(set(_ASKED_FOR.findall(Path(found.origin).read_text(encoding="utf-8")))))


def source(names: tuple[str, ...]) -> str:
    """Return C code with a stub for each function that answers `not supported`.

    The stubs are weak symbols: the functions in SOURCES replace them. Without a stub, a call would fail with another
    error, `function not found`.
    """
    head = (
        f'#define STUB(name) __attribute__((weak, visibility("default"))) int name(void) {{ return {NOT_SUPPORTED}; }}'
    )
    return "\n".join([head, *(f"STUB({name})" for name in names), ""])
