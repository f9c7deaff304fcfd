"""Measure recording on simulated GPUs: sampling rate, CPU, memory, bytes and late ticks, compared with other tools.

    python bench/recorder.py [--seconds 5] [--gpus 1,4,8] [--hz 10,20,100,1000] [--call-us 0] [--peer PATH]

Each tool runs in its own process and is measured from outside, start-up and calibration excluded. Rows of the table:

    recorder    kmatrix.gpu.recorder
    empty loop  a Python loop that wakes up at the same rate and does nothing: the lower bound in Python
    pynvml+CSV  a plain loop: power and temperature from pynvml, a CSV line, a flush, a sleep
    original    with --peer, a checkout of the original project: `gputop.py --stats` at its fixed rate, on a terminal;
                once after its start, and once after a simulated hour, because it rewrites its files every second

"over" is the CPU time above that of the empty loop at the same rate.
"""

from __future__ import annotations

import argparse
import os
import platform
import pty
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "lib"))

import kmatrix.simulate.library as simulate
from kmatrix.gpu.formats.binary import read_samples
from kmatrix.records.paths import RunDir

START_S = 3.0  # Python's start and the calibration
HOUR = 3600  # samples of the original in an hour
TERMINAL = (40, 120)  # lines and columns
EMPTY = """
import signal, sys, time
period, stop = 1 / float(sys.argv[1]), {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, stop)
begin, tick = time.monotonic(), 0
while signal.sigtimedwait(stop, max(0.0, begin + tick * period - time.monotonic())) is None:
    tick = max(tick, int((time.monotonic() - begin) / period)) + 1
"""
PLAIN = """
import csv, signal, sys, time
from datetime import datetime
import pynvml
period, running = 1 / float(sys.argv[1]), True
def stop(*_):
    global running
    running = False
signal.signal(signal.SIGTERM, stop)
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
with open(sys.argv[2], "w", newline="") as file:
    writer, begin = csv.writer(file), time.perf_counter()
    while running:
        now = time.perf_counter()
        row = [datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3], f"{now - begin:.3f}"]
        for handle in handles:
            row.append(f"{pynvml.nvmlDeviceGetPowerUsage(handle) / 1000:.2f}")
            row.append(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
        writer.writerow(row)
        file.flush()
        time.sleep(max(0.0, period - (time.perf_counter() - now)))
"""
ORIGINAL = """
import sys
sys.path.insert(0, sys.argv[1])
import gputop
app, before = gputop.GPUTop(stats_file=sys.argv[2]), int(sys.argv[3])
if before:
    app.log_stats_to_json(app.gpu_monitor.get_stats(0))
    app.json_data *= before
    if hasattr(app, "multi_gpu_data"):
        app.multi_gpu_data *= before
app.run()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one way of recording. None: the tool writes nothing, or does not report it."""

    cpu: float  # percent of one core
    rss: float  # MiB
    hz: float | None = None  # reached rate
    late: int | None = None  # ticks without a sample
    size: float | None = None  # bytes/h at the requested rate


class FileState:
    """The state of a recording: number of samples, bytes and time (s)."""

    def __init__(self, path: Path, samples: int) -> None:
        self.samples, self.size, self.time = samples, path.stat().st_size, time.monotonic()


def grown(cost: Cost, hz: float, first: FileState, last: FileState) -> Cost:
    """Return a cost with the rate, late ticks and size between two states, for a requested rate of `hz`."""
    seconds, samples = last.time - first.time, max(1, last.samples - first.samples)
    return replace(
        cost,
        hz=samples / seconds,
        late=max(0, round(hz * seconds) - samples),
        size=3600 * hz * (last.size - first.size) / samples,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The measurements for one number of GPUs."""

    folder: Path  # of the recordings
    environment: dict[str, str]  # with the simulated driver
    seconds: float  # s per measurement

    def recorder(self, hz: float) -> Cost:
        run = RunDir(self.folder / f"run{hz:g}")
        states: list[FileState] = []
        cost = self._watch(
            [sys.executable, "-m", "kmatrix.gpu.recorder", str(run.path), "--hz", f"{hz:g}"],
            lambda: states.append(FileState(run.gpu_samples, len(read_samples(run.gpu_samples)))),
        )
        return grown(cost, hz, *states)

    def empty(self, hz: float) -> Cost:
        return self._watch([sys.executable, "-c", EMPTY, f"{hz:g}"])

    def plain(self, hz: float) -> Cost:
        path = self.folder / f"{hz:g}.csv"
        states: list[FileState] = []
        cost = self._watch(
            [sys.executable, "-c", PLAIN, f"{hz:g}", str(path)],
            lambda: states.append(FileState(path, path.read_bytes().count(b"\n"))),
        )
        return grown(cost, hz, *states)

    def original(self, peer: Path, before: int) -> Cost:
        """Run the original's screen on a terminal. before: number of samples at the start."""
        path = self.folder / f"original{before}.json"
        screen, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, TERMINAL)
        threading.Thread(target=_drain, args=(screen,), daemon=True).start()
        command = [sys.executable, "-c", ORIGINAL, str(peer / "scripts"), str(path), str(before)]
        cost = self._watch(command, terminal=terminal, end=signal.SIGKILL)  # SIGINT would have it draw graphs
        os.close(terminal)
        return cost

    def _watch(self, command, read_state=lambda: None, *, terminal=subprocess.DEVNULL, end=signal.SIGTERM) -> Cost:
        """Run a command for `seconds`, measure its process from outside, and end it."""
        process = subprocess.Popen(
            command, env=self.environment, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, text=True
        )
        try:
            time.sleep(START_S)
            read_state()
            before, begin = _cpu(process.pid), time.monotonic()
            time.sleep(self.seconds)
            used, took = _cpu(process.pid) - before, time.monotonic() - begin
            rss = _rss(process.pid)
            read_state()
        except OSError:
            sys.exit(f"{command[1:3]} ended early: {process.communicate()[1]}")
        finally:
            process.send_signal(end)
        process.communicate()
        return Cost(cpu=100 * used / took, rss=rss)


def _drain(screen: int) -> None:
    """Read the output, as a terminal does: a full buffer would block the program."""
    try:
        while os.read(screen, 1 << 16):
            pass
    except OSError:
        os.close(screen)


def _cpu(pid: int) -> float:
    """Return the CPU seconds of all threads of a process. schedstat counts nanoseconds, stat only ticks of 10 ms."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _rss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def measure(bench: Bench, rates: list[float], peer: Path | None) -> Iterator[tuple[str, float, Cost, float | None]]:
    """Yield name, rate and cost of each tool, and the CPU of the empty loop at that rate."""
    for hz in rates:
        empty = bench.empty(hz)
        yield "empty loop", hz, empty, None
        yield "recorder", hz, bench.recorder(hz), empty.cpu
        yield "pynvml+CSV", hz, bench.plain(hz), empty.cpu
    if peer:
        yield "original", 1.0, bench.original(peer, 0), None
        yield "original, 1 h", 1.0, bench.original(peer, HOUR), None


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> None:
    """Print one line per tool, number of GPUs and rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--gpus", default="1,4,8")
    parser.add_argument("--hz", default="10,20,100,1000")
    parser.add_argument("--call-us", type=float, default=0.0, help="duration of each call of the simulated driver")
    parser.add_argument("--peer", type=Path, help="a checkout of the original project")
    arguments = parser.parse_args()
    if arguments.peer and not (arguments.peer / "scripts" / "gputop.py").is_file():
        parser.error(f"{arguments.peer} is not a checkout of the original project: scripts/gputop.py is missing")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'':14}{'GPUs':>5}{'asked Hz':>10}{'reached':>10}{'CPU %':>8}{'over':>7}{'RSS MiB':>9}{'late':>6}{'MB/h':>9}"
    )
    with tempfile.TemporaryDirectory() as place:
        library = simulate.build(Path(place))
        for gpus in map(int, arguments.gpus.split(",")):
            folder = Path(place) / str(gpus)
            folder.mkdir()
            scenario = folder / "bench.scn"
            scenario.write_text(f"loop 10\ncall_us {arguments.call_us:g}\n0 * power 228\n5 * power 180\n")
            known = simulate.environment(library, scenario, gpus, time.time())
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), "TERM": "xterm", **known}
            bench = Bench(folder=folder, environment=environment, seconds=arguments.seconds)
            rates = [float(hz) for hz in arguments.hz.split(",")]
            for name, hz, cost, empty in measure(bench, rates, arguments.peer):
                over = None if empty is None else cost.cpu - empty
                size = None if cost.size is None else cost.size / 1e6
                print(
                    f"{name:14}{gpus:5}{hz:10g}{_cell(cost.hz, '10.2f'):>10}{cost.cpu:8.2f}{_cell(over, '7.2f'):>7}"
                    f"{cost.rss:9.1f}{_cell(cost.late, '6'):>6}{_cell(size, '9.1f'):>9}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
