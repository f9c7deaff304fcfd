"""Measure recording on simulated GPUs: CPU, memory, reached rate and bytes.

    python bench/monitor.py [--gpus 8] [--hz 20,100] [--seconds 20] [--rounds 3]

Each tool runs in its own process and is measured from outside, after its start. The simulated driver takes no time, and
its values change as those of a training run. Rows:

empty loop  a Python loop that wakes up at the same rate and does nothing: the lower bound in Python
recorder    kmatrix.gpu.recorder.  over: its CPU above that of the empty loop; bytes: of gpu_samples.bin
gputop csv  gputop --csv FILE --hz; bytes: of the file

CPU is percent of one core with the children of the program, MiB its memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
from common import ROOT, Figures, environment, figures_table, in_turn, machine, options

import kmatrix.simulate.library as simulate
from kmatrix.gpu.formats.binary import read_samples

START_S = 6.0  # Python's imports and the calibration
EMPTY = """
import sys, time
period, begin, tick = 1 / float(sys.argv[1]), time.monotonic(), 0
while True:
    time.sleep(max(0.0, begin + tick * period - time.monotonic()))
    tick = max(tick, int((time.monotonic() - begin) / period)) + 1
"""
TOOLS = {  # arguments of Python, and the file that it writes
    "empty loop": (["-c", EMPTY, "HZ"], ""),
    "recorder": (["-m", "kmatrix.gpu.recorder", "FOLDER", "--hz", "HZ"], "gpu_samples.bin"),
    "gputop csv": ([f"{ROOT}/scripts/gputop.py", "--csv", "FOLDER/gputop.csv", "--hz", "HZ"], "gputop.csv"),
}
FORMS = {"CPU %": ".2f", "over": ".2f", "MiB": ".1f", "reached Hz": ".2f", "bytes/s": ",.0f"}


def main() -> None:
    args = options(__doc__, gpus=8, hz="20,100", seconds=20.0, rounds=3)
    print(machine(), f"{args.gpus} simulated GPUs", sep=", ", flush=True)
    with tempfile.TemporaryDirectory() as place:
        scenario, library = simulate.SCENARIOS / "calm.scn", simulate.build(Path(place))
        variables = environment(**simulate.environment(library, scenario, args.gpus, time.time()))
        ways = {
            f"{name}, {hz} Hz": partial(watch, *tool, hz, variables, args.seconds)
            for hz in args.hz.split(",")
            for name, tool in TOOLS.items()
        }
        found = in_turn(ways, args.rounds)
    for hz in args.hz.split(","):
        recorder = found[f"recorder, {hz} Hz"]
        found[f"recorder, {hz} Hz"] = {**recorder, "over": recorder["CPU %"] - found[f"empty loop, {hz} Hz"]["CPU %"]}
    print(figures_table("tool", FORMS, found))


def watch(words: list[str], file: str, hz: str, variables: dict[str, str], seconds: float, _: int) -> Figures:
    """Run a tool, measure it from outside after its start, and end it."""

    def state() -> tuple[int, int]:
        if not file:
            return 0, 0
        samples = len(read_samples(path)) if path.suffix == ".bin" else path.read_bytes().count(b"\n")
        return samples, path.stat().st_size

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file
        command = [sys.executable, *(word.replace("FOLDER", folder).replace("HZ", hz) for word in words)]
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            time.sleep(START_S)
            while not path.exists() and process.poll() is None:  # on a busy machine the start takes longer
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
    reached, written = ((b - a) / lasted if file else None for a, b in zip(first, last, strict=True))
    return {"CPU %": 100 * used / lasted, "MiB": memory, "reached Hz": reached, "bytes/s": written}


def _cpu(pid: int) -> float:
    """Return the CPU seconds of all threads of a process and its children: schedstat counts nanoseconds."""
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    paths = (path for one in family for path in Path(f"/proc/{one}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


if __name__ == "__main__":
    main()
