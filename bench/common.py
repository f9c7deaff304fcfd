"""What the benchmarks share: options, the machine, sensors of a GPU, the cost of a process, rounds, tables, goals."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
# A benchmark runs without installation. bench/ is last: its profile.py must not replace that of the standard library.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT / "bench"] + [str(ROOT / "bench")]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT), str(ROOT / "tests" / "support")]
SAMPLE_S = 0.02  # between two readings of the sensors
POWER_CAP = 4  # NVML's bit of the clock's reasons: the power limit
POWER = {"W": ".0f", "MHz": ".0f", "capped": ".0%"}  # what the sensors measure: mean power, mean clock, at the limit
Figures = dict[str, Any]  # column of a table -> number; None: unknown


def options(description: str | None, words: str = "", **defaults: Any) -> argparse.Namespace:
    """Return the arguments of a program, which its description explains.

    words: the name of its positional arguments.  defaults: option -> default, whose type it has; an option whose
    default is False is a flag, [] can be given several times, Path is a path or None.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if words:
        parser.add_argument(words, nargs="*")
    for name, default in defaults.items():
        kind: dict[str, Any] = {"type": type(default), "default": default, "help": "default: %(default)s"}
        if default is Path:
            kind = {"type": Path}
        elif default is False or default == []:
            kind = {"action": "append" if default == [] else "store_true", "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    return parser.parse_args()


def environment(checkout: Path = ROOT, **more: str) -> dict[str, str]:
    """Return the environment of a program that runs the code of a checkout, without make's variables."""
    known = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    path = os.pathsep.join([str(checkout / "lib"), str(checkout)])
    return {**known, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a process with its children."""

    wall: float  # s
    cpu: float  # s
    memory: float  # MiB, peak of the largest process
    output: str


def run(command: Sequence[str | Path], folder: Path = ROOT, variables: Mapping[str, str] | None = None) -> Cost:
    """Run a command to its end, and return its cost. The benchmark ends if it fails."""
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        begin = time.perf_counter()
        process = subprocess.Popen(words, cwd=folder, env=variables or environment(), stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)  # the only call that returns the usage of a single child
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        output = file.read()
    if process.returncode:
        sys.exit(f"{' '.join(words)} ended with {process.returncode}:\n{output[-4000:]}")
    return Cost(wall=wall, cpu=used.ru_utime + used.ru_stime, memory=used.ru_maxrss / 1024, output=output)


class Sensors(threading.Thread):
    """Reads clock and power of the first NVIDIA GPU in the background; without one it reads nothing."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples: list[tuple[float, float, float, bool]] = []  # time, W, MHz, at the power limit
        self._ended = threading.Event()
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # any failure of a driver means: no sensors
            import pynvml

            pynvml.nvmlInit()
            self._gpu, self._nvml = pynvml.nvmlDeviceGetHandleByIndex(0), pynvml

    @property
    def gpu(self) -> str:
        """Name, driver and temperature of the GPU; empty without one."""
        if self._nvml is None:
            return ""
        name, driver = self._nvml.nvmlDeviceGetName(self._gpu), self._nvml.nvmlSystemGetDriverVersion()
        limit = self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._gpu) // 1000
        heat = self._nvml.nvmlDeviceGetTemperature(self._gpu, self._nvml.NVML_TEMPERATURE_GPU)
        return f"{name}, driver {driver}, power limit {limit} W, {heat} C"

    def run(self) -> None:
        n = self._nvml
        while n is not None and not self._ended.wait(SAMPLE_S):
            watts, clock = n.nvmlDeviceGetPowerUsage(self._gpu) / 1e3, n.nvmlDeviceGetClockInfo(self._gpu, 1)
            capped = bool(n.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu) & POWER_CAP)
            self._samples.append((time.time(), watts, clock, capped))

    def since(self, begin: float) -> Figures:
        """Return the columns of POWER since a Unix time; nothing without samples."""
        kept = [sample[1:] for sample in self._samples if sample[0] >= begin]
        return dict(zip(POWER, map(statistics.fmean, zip(*kept, strict=True)), strict=True)) if kept else {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def machine(sensors: Sensors | None = None) -> str:
    """Return the machine in a line: Python, processor, load, and the GPU."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    parts = [f"Python {platform.python_version()}", f"{os.cpu_count()} x {name}", f"load {os.getloadavg()[0]:.1f}"]
    return ", ".join([*parts, sensors.gpu] if sensors and sensors.gpu else parts)


def in_turn(
    ways: Mapping[str, Callable[[int], Figures]], rounds: int, sensors: Sensors | None = None
) -> dict[str, Figures]:
    """Measure each way in each round, and return the medians of what is known. A way takes the number of the round.

    Rounds alternate in their order, so that a drift of the machine's speed affects all. sensors: the columns of POWER
    are of the second half of each measurement: the first one may compile.
    """
    found: dict[str, list[Figures]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            begin = time.time()
            figures = ways[name](turn)
            found[name].append({**figures, **(sensors.since((begin + time.time()) / 2) if sensors else {})})
            print(f"round {turn + 1}  {name}: {time.time() - begin:.1f} s", flush=True)
    return {name: _medians(several) for name, several in found.items()}


def _medians(several: Sequence[Figures]) -> Figures:
    known = {name: [one[name] for one in several if one.get(name) is not None] for name in several[0]}
    return {name: statistics.median(values) if values else None for name, values in known.items()}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns."""
    texts = [[*map(str, row)] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in texts
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def figures_table(first: str, forms: Mapping[str, str], rows: Mapping[str, Figures]) -> str:
    """Return a table of figures by name. forms: column -> how its numbers are written."""
    cells = [[name, *(number(row.get(column), form) for column, form in forms.items())] for name, row in rows.items()]
    return table([first, *forms], cells)


def number(value: Any, form: str, unit: str = "") -> str:
    """Return a value as text, "-" for None."""
    return "-" if value is None else f"{value:{form}}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One measured value. goal: the value must not be above it; None: it has none."""

    what: str
    value: float
    unit: str
    goal: float | None = None


def compare_with_goals(description: str | None, measure: Callable[..., Iterator[Found]], *checkouts: str) -> int:
    """Be a program that prints medians of rounds next to their goals; return 1 if one is missed at full size.

    measure: yields the figures, at sizes that take seconds if it is called with True. checkouts: names of its further
    arguments, paths of checkouts; None if they are not given.
    """
    args = options(description, smallest=False, rounds=3, **dict.fromkeys(checkouts, Path))
    given = {name: getattr(args, name) for name in checkouts}
    print(machine(), flush=True)
    rows, missed = [], False
    for several in zip(*([*measure(args.smallest, **given)] for _ in range(args.rounds)), strict=True):
        one, value = several[0], statistics.median(found.value for found in several)
        is_missed = one.goal is not None and value > one.goal
        missed |= is_missed
        mark = "" if args.smallest or one.goal is None else "MISSED" if is_missed else "met"
        rows.append([one.what, f"{value:,.4g} {one.unit}", number(one.goal, "g", f" {one.unit}"), mark])
    print(table(["figure", "measured", "goal", ""], rows))
    return int(missed and not args.smallest)
