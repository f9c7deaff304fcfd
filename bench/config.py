"""Measure the time of configuration targets as processes, compared with `python -c pass`: medians of interleaved runs.

    python bench/config.py [ROUNDS]

CPU time is printed next to wall time. Compare CPU times on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 21
LIMIT_MS = 150.0  # of a configuration target: docs/architecture.md


def commands(folder: str) -> dict[str, list[str]]:
    """Return the commands to time: name -> command line."""
    program = [sys.executable, "-m", "kmatrix"]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "kmatrix defconfig-gpt2-cpu-quick": [*program, "defconfig-gpt2-cpu-quick", f"O={folder}"],
        "kmatrix defconfig-gpt2-finewebedu-a10gx4": [*program, "defconfig-gpt2-finewebedu-a10gx4", f"O={folder}/flag"],
        "kmatrix olddefconfig": [*program, "olddefconfig", f"O={folder}"],
        "kmatrix test-matrix-dry-run": [*program, "test-matrix-dry-run", f"O={folder}"],
        "make defconfig-gpt2-cpu-quick": [
            *("make", "-s", f"PYTHON={sys.executable}", "defconfig-gpt2-cpu-quick", f"O={folder}"),
        ],
    }


def measure(lines: dict[str, list[str]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall time and CPU time in ms of each command, one sample per round.

    The first round warms up the caches and is not counted.
    """
    # Without make's variables, which the commands would take for their own.
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    environment["PYTHONPATH"] = f"{ROOT / 'lib'}:{ROOT}"
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in lines}
    for number in range(rounds + 1):
        for name, line in lines.items():
            started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(line, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if number:
                taken[name].append((1000 * (time.perf_counter() - started), 1000 * used))
    return taken


def main() -> None:
    """Print a table of medians, and whether defconfig stays below its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=ROUNDS)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(commands(folder), rounds)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds")
    print(f"{'ms':44}{'median':>8}{'least':>8}{'most':>8}{'CPU':>8}")
    medians = {}
    for name, pairs in taken.items():
        clock, cpu = ([pair[side] for pair in pairs] for side in (0, 1))
        medians[name] = statistics.median(clock)
        print(f"{name:44}{medians[name]:8.1f}{min(clock):8.1f}{max(clock):8.1f}{statistics.median(cpu):8.1f}")
    slowest = max(time for name, time in medians.items() if "defconfig-" in name)
    print(f"defconfig: {slowest:.0f} ms, limit {LIMIT_MS:.0f} ms: {'kept' if slowest < LIMIT_MS else 'NOT KEPT'}")


if __name__ == "__main__":
    main()
