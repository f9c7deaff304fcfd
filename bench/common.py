"""What the benchmarks share: the machine, sensors of a GPU, the cost of a process, tables, and goals."""

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

    def since(self, begin: float) -> dict[str, float]:
        """Return mean power, mean SM clock and the share of samples at the power limit since a Unix time."""
        kept = [sample for sample in self._samples if sample[0] >= begin]
        if not kept:
            return {}
        watts, clock, capped = (statistics.fmean(column) for column in list(zip(*kept, strict=True))[1:])
        return {"watts": watts, "mhz": clock, "capped": capped}

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
    load = f"load {os.getloadavg()[0]:.1f}"
    return ", ".join(
        filter(
            None, [f"Python {platform.python_version()}", f"{os.cpu_count()} x {name}", load, sensors and sensors.gpu]
        )
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns."""
    texts = [[*map(str, row)] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in texts
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def about_power(power: Mapping[str, float]) -> str:
    """Return what `Sensors.since` found as text: W, MHz, and the share at the power limit."""
    return "{watts:.0f} W, {mhz:.0f} MHz, {capped:.0%}".format(**power) if power else "-"


def number(value: float | None, form: str, unit: str = "") -> str:
    """Return a number as text, "-" for None."""
    return "-" if value is None else f"{value:{form}}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One measured value. goal: the value must not be above it; None: it has none."""

    what: str
    value: float
    unit: str
    goal: float | None = None


def compare_with_goals(description: str | None, measure: Callable[..., Iterator[Found]], **checkouts: str) -> int:
    """Be a program that prints medians of rounds next to their goals; return 1 if one is missed at full size.

    measure: yields the figures, at sizes that take seconds if it is called with True. Its further arguments are paths
    of checkouts, None if they are not given.  checkouts: the help of each of their options.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", action="store_true", help="sizes that take seconds, to see that it works")
    parser.add_argument("--rounds", type=int, default=3)
    for name, text in checkouts.items():
        parser.add_argument(f"--{name}", type=Path, help=text)
    args = parser.parse_args()
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
