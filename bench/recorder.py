"""What the recorder costs on simulated GPUs: rate reached, CPU, memory, bytes and late ticks, each in its own process.

The CPU of the first seconds is left out: starting Python and calibrating happen once.

python bench/recorder.py [--seconds 5] [--gpus 1,4,8] [--hz 20,100,1000] [--call-us 0]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "lib"))

from kmatrix.gpu import simulate  # noqa: E402 (the path comes first)
from kmatrix.gpu.formats import read_samples  # noqa: E402
from kmatrix.records import RunDir, read_json  # noqa: E402

START_S = 3.0  # Python's start and the calibration
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one recording cost. cpu: percent of one processor.  rss: MiB.  size: bytes a sample.  read_ms: of all."""

    hz: float
    cpu: float
    rss: float
    late: int
    size: float
    read_ms: float


def measure(library: Path, gpus: int, hz: float, seconds: float, call_us: float) -> Cost:
    """Record for a while and look at the process from outside."""
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "bench.scn"
        scenario.write_text(f"loop 10\ncall_us {call_us:g}\n0 * power 228\n5 * power 180\n")
        known = simulate.environment(library, scenario, gpus, time.time())
        run = RunDir(Path(folder) / "run")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), **known}
        command = [sys.executable, "-m", "kmatrix.gpu.recorder", str(run.path), "--hz", f"{hz:g}"]
        process = subprocess.Popen(command, env=environment)
        time.sleep(START_S)
        before, begin = _cpu(process.pid), time.monotonic()
        time.sleep(seconds)
        used, took = _cpu(process.pid) - before, time.monotonic() - begin
        rss = _rss(process.pid)
        process.terminate()
        process.wait()
        summary = read_json(run.gpu_summary)
        begin = time.perf_counter()
        recording = read_samples(run.gpu_samples)
        sum(map(sum, (columns["memory_used"] for columns in recording.columns)))
        read_ms = 1000 * (time.perf_counter() - begin)
        size = run.gpu_samples.stat().st_size / len(recording)
    return Cost(
        hz=summary["hz_reached"], cpu=100 * used / took, rss=rss, late=summary["late"], size=size, read_ms=read_ms
    )


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _rss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def main() -> None:
    """Print one line for each number of GPUs and rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--gpus", default="1,4,8")
    parser.add_argument("--hz", default="20,100,1000")
    parser.add_argument("--call-us", type=float, default=0.0, help="what each call of the driver is to cost")
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'GPUs':>4}{'asked Hz':>10}{'reached':>10}{'CPU %':>8}{'RSS MiB':>9}{'late':>6}{'B/sample':>10}{'read ms':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        library = simulate.build(Path(folder))
        for gpus in map(int, arguments.gpus.split(",")):
            for hz in map(float, arguments.hz.split(",")):
                cost = measure(library, gpus, hz, arguments.seconds, arguments.call_us)
                print(
                    f"{gpus:4}{hz:10g}{cost.hz:10.2f}{cost.cpu:8.2f}{cost.rss:9.1f}{cost.late:6}"
                    f"{cost.size:10.1f}{cost.read_ms:9.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
