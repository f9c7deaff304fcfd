"""Measure recording on simulated GPUs: CPU, memory, reached rate and bytes.

    python bench/monitor.py [--gpus 8] [--hz 20,100] [--seconds 20] [--rounds 3]

Each tool runs in its own process and is measured from outside, after its start. The simulated driver takes no time, and
its values change as those of a training run. Rows:

empty loop  a Python loop that wakes up at the same rate and does nothing: the lower bound in Python
recorder    kmatrix.gpu.recorder.  over: its CPU above that of the empty loop; bytes: of gpu_samples.bin
gputop csv  gputop --csv FILE --hz; bytes: of the file
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
from common import ROOT, environment, machine, number, table

import kmatrix.simulate.library as simulate
from kmatrix.gpu.formats.binary import read_samples
from kmatrix.records.paths import RunDir

START_S = 6.0  # Python's imports and the calibration
EMPTY = """
import sys, time
period, begin, tick = 1 / float(sys.argv[1]), time.monotonic(), 0
while True:
    time.sleep(max(0.0, begin + tick * period - time.monotonic()))
    tick = max(tick, int((time.monotonic() - begin) / period)) + 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a program used in a measurement. None: it does not have that."""

    cpu: float  # percent of one core, with its children
    memory: float  # MiB
    hz: float | None = None  # samples per second
    bytes: float | None = None  # per second


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--hz", default="20,100")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    print(machine(), f"{args.gpus} simulated GPUs", sep=", ", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        scenario = simulate.SCENARIOS / "calm.scn"
        known = simulate.environment(simulate.build(folder), scenario, args.gpus, time.time())
        variables = environment(**known)
        tools = {
            name: tool
            for hz in map(float, args.hz.split(","))
            for name, tool in at_rate(hz, folder, args.seconds, variables)
        }
        rounds = [{name: tool(turn) for name, tool in tools.items()} for turn in range(args.rounds)]  # in turn
    rows, empty = [], 0.0
    for name in tools:
        columns = zip(*(astuple(found[name]) for found in rounds), strict=True)
        cpu, memory, hz, written = (None if None in column else statistics.median(column) for column in columns)
        empty = cpu if name.startswith("empty") else empty
        over = cpu - empty if name.startswith("recorder") else None
        rows.append(
            [name, f"{cpu:.2f}", number(over, ".2f"), f"{memory:.1f}", number(hz, ".2f"), number(written, ",.0f")]
        )
    print(table(["tool", "CPU %", "over", "MiB", "reached Hz", "bytes/s"], rows))
    return 0


Tool = Callable[[int], Used]


def at_rate(hz: float, folder: Path, seconds: float, variables: Mapping[str, str]) -> Iterator[tuple[str, Tool]]:
    """Yield the tools that sample at a rate."""

    def empty(_: int) -> Used:
        return watch([sys.executable, "-c", EMPTY, f"{hz:g}"], seconds, variables)

    def recorder(turn: int) -> Used:
        path = RunDir(folder / f"recorder{hz:g}-{turn}").gpu_samples
        command = [sys.executable, "-m", "kmatrix.gpu.recorder", str(path.parent), "--hz", f"{hz:g}"]
        return watch(command, seconds, variables, path, lambda: len(read_samples(path)))

    def csv(turn: int) -> Used:
        path = folder / f"gputop{hz:g}-{turn}.csv"
        command = [sys.executable, str(ROOT / "scripts" / "gputop.py"), "--csv", str(path), "--hz", f"{hz:g}"]
        return watch(command, seconds, variables, path, lambda: path.read_bytes().count(b"\n"))

    yield from (
        (f"{name}, {hz:g} Hz", tool)
        for name, tool in (("empty loop", empty), ("recorder", recorder), ("gputop csv", csv))
    )


def watch(
    command: Sequence[str],
    seconds: float,
    variables: Mapping[str, str],
    path: Path | None = None,
    samples: Callable[[], int] = lambda: 0,
) -> Used:
    """Run a command, measure it from outside after its start, and end it. path: the file that it writes."""

    def state() -> tuple[int, int]:
        return (samples(), path.stat().st_size) if path else (0, 0)

    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        time.sleep(START_S)
        while path and not path.exists() and process.poll() is None:  # on a busy machine the start takes longer
            time.sleep(0.1)
        first, begin, before = state(), time.monotonic(), _cpu(process.pid)
        time.sleep(seconds)
        used, lasted, last = _cpu(process.pid) - before, time.monotonic() - begin, state()
        memory = psutil.Process(process.pid).memory_info().rss / 2**20
    except (psutil.NoSuchProcess, OSError):
        sys.exit(f"{command[1:3]} ended early: {process.communicate()[1].decode()}")
    finally:
        process.send_signal(signal.SIGTERM)
    process.communicate()
    hz, written = ((b - a) / lasted if path else None for a, b in zip(first, last, strict=True))
    return Used(cpu=100 * used / lasted, memory=memory, hz=hz, bytes=written)


def _cpu(pid: int) -> float:
    """Return the CPU seconds of all threads of a process and its children: schedstat counts nanoseconds."""
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    paths = (path for one in family for path in Path(f"/proc/{one}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


if __name__ == "__main__":
    sys.exit(main())
