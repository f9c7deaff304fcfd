"""Compare gputop with nvitop, which has to be installed, on simulated GPUs: CPU time, and bytes to the terminal.

    python bench/gputop.py [--gpus 8,16] [--seconds 60] [--rounds 3] [--size 50x160] [--interval 2] [--scenario calm]
    python bench/gputop.py --hz 100 --gpus 4,8     # a table instead: gputop --csv FILE --hz 100, bytes of the file

Both programs run on terminals of the same size, one after the other in turn, with the same interval, on the same
simulated driver, whose values change as those of a training run; each GPU is used by one process of this machine.
A measurement takes a whole period of the scenario, so that both see the same changes of values.
Start-up is excluded: it begins some seconds after the first output. "busy" is the load of the machine.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "lib"))

import psutil

import kmatrix.simulate.library as simulate

SETTLE_S = 6.0  # after the first output: Python's imports, and the first, complete, pictures
PROGRAMS = {
    "gputop": ("-m", "kmatrix.gputop", "--interval"),
    "nvitop": ("-m", "nvitop", "--monitor", "auto", "--interval"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a program used in a measurement."""

    cpu: float  # percent of one core
    bytes_per_second: float
    rss_mib: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="8,16")
    parser.add_argument("--seconds", type=float, default=60.0, help="one period of the scenario calm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="50x160", help="lines x columns")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two updates: nvitop's default")
    parser.add_argument("--scenario", default="calm", help="a scenario of kmatrix.simulate, or a file")
    parser.add_argument("--hz", type=float, help="measure gputop --csv at this rate instead")
    args = parser.parse_args()
    lines, columns = (int(word) for word in args.size.split("x"))
    programs = PROGRAMS if args.hz is None else {"csv": ()}
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    )
    what = f"{args.size} terminal, every {args.interval:g} s" if args.hz is None else f"a table, {args.hz:g} Hz"
    print(f"{what}, scenario {args.scenario}, medians of {args.rounds} rounds")
    print(f"{'GPUs':>4}  {'program':8}{'CPU %':>8}{'bytes/s':>10}{'MiB':>7}   rounds")
    with tempfile.TemporaryDirectory() as name:
        library = simulate.build(Path(name))
        for gpus in map(int, args.gpus.split(",")):
            workers = [subprocess.Popen(["sleep", "3600"]) for _ in range(gpus)]
            try:
                variables = environment(library, Path(name), gpus, args.scenario, [worker.pid for worker in workers])
                rounds: dict[str, list[Measured]] = {program: [] for program in programs}
                psutil.cpu_percent()
                for number in range(args.rounds):
                    if args.hz is not None:
                        table = Path(name) / f"{gpus}-{number}.csv"
                        rounds["csv"].append(measure_table(table, args.hz, variables, args.seconds))
                        continue
                    for program, words in PROGRAMS.items():
                        command = [sys.executable, *words, f"{args.interval:g}"]
                        rounds[program].append(measure(command, variables, (lines, columns), args.seconds))
                for program, found in rounds.items():
                    print(row(gpus, program, found))
                print(f"      busy {psutil.cpu_percent():.0f} %")
            finally:
                for worker in workers:
                    worker.kill()
                    worker.wait()
    return 0


def environment(library: Path, folder: Path, gpus: int, scenario: str, pids: list[int]) -> dict[str, str]:
    """Return the environment of a program that sees the GPUs of a scenario, each used by one process."""
    included = simulate.SCENARIOS / f"{scenario}.scn"
    text = (included if included.exists() else Path(scenario)).read_text(encoding="utf-8")
    path = folder / f"{gpus}.scn"
    path.write_text(text + "".join(f"0 {gpu} process {pid} 17000\n" for gpu, pid in enumerate(pids)), encoding="utf-8")
    return {
        **os.environ,
        **simulate.environment(library, path, gpus, time.time()),
        "PYTHONPATH": str(ROOT / "lib"),
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
    }


def measure(command: list[str], variables: Mapping[str, str], size: tuple[int, int], seconds: float) -> Measured:
    """Run a program on a terminal of its own, and return what it used after its start."""
    pid, master = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, dict(variables))
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    try:
        process = psutil.Process(pid)
        if not drain(master, 60.0, first=True):
            raise SystemExit(f"error: {' '.join(command)} printed nothing")
        drain(master, SETTLE_S)
        begin, before = time.monotonic(), cpu_seconds(process)
        written = drain(master, seconds)
        lasted = time.monotonic() - begin
        return Measured(
            cpu=100 * (cpu_seconds(process) - before) / lasted,
            bytes_per_second=written / lasted,
            rss_mib=process.memory_info().rss / 2**20,
        )
    finally:
        os.kill(pid, signal.SIGTERM)
        drain(master, 1.0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(master)


def measure_table(path: Path, hz: float, variables: Mapping[str, str], seconds: float) -> Measured:
    """Write a table of samples, and return what gputop used after its start. bytes: of the table."""
    command = [sys.executable, str(ROOT / "scripts" / "gputop.py"), "--csv", str(path), "--hz", f"{hz:g}"]
    child = subprocess.Popen(command, env=dict(variables), stdout=subprocess.DEVNULL)
    try:
        process = psutil.Process(child.pid)
        time.sleep(SETTLE_S)
        begin, before, size = time.monotonic(), cpu_seconds(process), path.stat().st_size
        time.sleep(seconds)
        lasted = time.monotonic() - begin
        return Measured(
            cpu=100 * (cpu_seconds(process) - before) / lasted,
            bytes_per_second=(path.stat().st_size - size) / lasted,
            rss_mib=process.memory_info().rss / 2**20,
        )
    finally:
        child.terminate()
        child.wait()


def drain(master: int, seconds: float, *, first: bool = False) -> int:
    """Read the output of a program for some seconds, or up to its first output; return the number of bytes."""
    total, end = 0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([master], [], [], left)[0]:
            break
        try:
            data = os.read(master, 65536)
        except OSError:  # the program has ended
            break
        total += len(data)
        if first and total:
            break
    return total


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and its children, in s."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def row(gpus: int, program: str, found: list[Measured]) -> str:
    middle = [statistics.median(getattr(one, name) for one in found) for name in ("cpu", "bytes_per_second", "rss_mib")]
    rounds = ", ".join(f"{one.cpu:.2f} % {one.bytes_per_second:.0f} B/s" for one in found)
    return f"{gpus:4}  {program:8}{middle[0]:8.2f}{middle[1]:10.0f}{middle[2]:7.0f}   {rounds}"


if __name__ == "__main__":
    sys.exit(main())
