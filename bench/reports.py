"""Measure time and memory of the GPU reports by number of samples, for 3 runs on 4 GPUs.

    python bench/reports.py [SAMPLES ...] [--peer PATH] [--rounds 1]

Each measurement is its own process. PATH is a checkout of the original project: its two scripts read the same files in
its own layout, interleaved with ours. The three runs are links to one file. They are named after resnet18, because the
original's text script reads no others; its output is not checked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = (1_000, 10_000, 100_000, 1_000_000)
RUNS = ("gpt2_adamw_magnitude_50", "gpt2_adamwprune_state_50", "gpt2_sgd_magnitude_50")
FOREIGN = tuple(run.replace("gpt2", "resnet18") for run in RUNS)
GPUS, TOTAL, STARTED = 4, 24_576.0, 1_758_283_200.0
SCRIPTS = {"text": "generate_consolidated_gpu_summary.py", "graphs": "generate_gpu_memory_comparison.py"}
SECONDS = 900  # a measurement that takes longer is stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a command."""

    wall: float  # s
    cpu: float  # s
    memory: float  # MiB, peak
    failed: str = ""  # reason; the numbers are meaningless then

    def __str__(self) -> str:
        if self.failed:
            return f"after {self.wall:.0f} s and {self.memory:.0f} MiB: {self.failed}"
        return f"{self.wall:9.2f} s {self.cpu:9.2f} s CPU {self.memory:9.0f} MiB"


def entries(samples: int) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Yield the time and the GPUs of each sample. Memory grows for 5 % of the time, then fluctuates."""
    noise = random.Random(1).random
    for number in range(samples):
        share = min(1.0, 20 * (number + 1) / samples)
        gpus = []
        for index in range(GPUS):
            memory, load = 12_800.0 * (0.1 + 0.9 * share) + 25 * index + 80 * noise(), int(70 + 30 * noise())
            gpus.append(
                {
                    "gpu_index": index,
                    "gpu_name": "NVIDIA A10G",
                    "utilization": load,
                    "memory_used": memory,
                    "memory_total": TOTAL,
                    "memory_percent": 100 * memory / TOTAL,
                    "temperatures": {"GPU": 55 + load // 5},
                    "power": 120 + 0.4 * load + index,
                    "power_limit": 300.0,
                    "clocks": {"gpu": 1695, "memory": 6251},
                }
            )
        yield STARTED + number + 0.123456, gpus


def totals(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the original's totals over all GPUs."""
    used = sum(gpu["memory_used"] for gpu in gpus)
    return {
        "total_memory_used": used,
        "total_memory_total": GPUS * TOTAL,
        "total_memory_percent": 100 * used / (GPUS * TOTAL),
        "average_utilization": sum(gpu["utilization"] for gpu in gpus) / GPUS,
        "total_power": sum(gpu["power"] for gpu in gpus),
        "total_power_limit": 300.0 * GPUS,
        "max_temperature": max(gpu["temperatures"]["GPU"] for gpu in gpus),
        "gpu_count": GPUS,
    }


def make_foreign(root: Path, samples: int) -> Path:
    """Write a results folder in the layout of the original project: arrays with an indent of 2."""
    folder = root / "test_matrix_results_20250919_120000"
    for place, run in enumerate(FOREIGN):
        path = folder / run / f"gpu_stats_{run}_20250919_120000_multi_gpu.json"
        path.parent.mkdir(parents=True)
        if place:
            os.link(next((folder / FOREIGN[0]).iterdir()), path)
            continue
        with path.open("w", encoding="utf-8") as file:
            for number, (now, gpus) in enumerate(entries(samples)):
                time_text = datetime.fromtimestamp(now, UTC).replace(tzinfo=None).isoformat()
                entry = {"timestamp": time_text, "multi_gpu_data": gpus, "aggregate_stats": totals(gpus)}
                file.write("," if number else "[")
                file.write("\n  " + json.dumps(entry, indent=2).replace("\n", "\n  "))
            file.write("\n]")
    results = [
        {"test_id": run, "optimizer": run.split("_")[1], "pruning": "none", "target_sparsity": 0.5, "success": True}
        for run in FOREIGN
    ]
    (folder / "all_results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def make_own(root: Path, samples: int) -> Path:
    """Write a matrix in our layout, gpu_summary.json and gpu_samples.bin, with the code of the recorder."""
    from kmatrix.gpu.devices import Device
    from kmatrix.gpu.formats.binary import COLUMNS, SampleFile
    from kmatrix.gpu.recorder.summary import RunTotals
    from kmatrix.records.files import write_json
    from kmatrix.records.paths import MatrixDir

    matrix = MatrixDir(root / "test_matrix_results_20260101_000000")
    devices = [
        Device(gpu_index=index, gpu_name="NVIDIA A10G", uuid=f"GPU-{index}", memory_total=TOTAL)
        for index in range(GPUS)
    ]
    for place, name in enumerate(RUNS):
        run = matrix.run(name)
        run.path.mkdir(parents=True)
        train = {"optimizer": name.split("_")[1], "num_gpus": GPUS, "device": "cuda"}
        write_json(
            run.run_json, {"run_id": name, "name": name, "axes": {"optimizer": train["optimizer"]}, "train": train}
        )
        if place:
            for path in (matrix.run(RUNS[0]).gpu_samples, matrix.run(RUNS[0]).gpu_summary):
                os.link(path, run.path / path.name)
            continue
        aggregate = RunTotals(devices)
        about = [{"gpu_index": d.gpu_index, "gpu_name": d.gpu_name, "uuid": d.uuid} for d in devices]
        file = SampleFile(
            run.gpu_samples, {"device_type": "nvidia", "simulated": False, "gpus": about, "calibration": None}
        )
        for number, (now, gpus) in enumerate(entries(samples)):
            values = [float(gpu.get(name, math.nan)) for gpu in gpus for name in COLUMNS]
            aggregate.add(float(number), now, values)
            file.append(now, float(number), values)
        file.close()
        write_json(run.gpu_summary, aggregate.summary({"device_type": "nvidia"}, final=True))
    return matrix.path


def measure(command: Sequence[str], folder: Path) -> Cost:
    """Run a command to its end, for SECONDS at most."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        _, status, used = os.wait4(process.pid, 0)  # the only call that returns the usage of a single child
        wall = time.perf_counter() - started
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:] or [f"status {process.returncode}"]
    return Cost(
        wall=wall,
        cpu=used.ru_utime + used.ru_stime,
        memory=used.ru_maxrss / 1024,
        failed=last[0] if process.returncode else "",
    )


def middle(costs: Sequence[Cost]) -> Cost:
    """Return the cost with the median wall time, or the first failure."""
    failed = [cost for cost in costs if cost.failed]
    wall = statistics.median_low(cost.wall for cost in costs)
    return failed[0] if failed else next(cost for cost in costs if cost.wall == wall)


def compare(samples: int, peer: Path | None, rounds: int) -> None:
    """Write the data of one size, and measure every reader on them, interleaved."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        foreign, own = make_foreign(root / "foreign", samples), make_own(root / "own", samples)
        size = next(foreign.glob("*/gpu_stats*")).stat().st_size
        binary = next(own.glob("gpt2_*/gpu_samples.bin")).stat().st_size
        print(f"{samples:,} samples x {GPUS} GPUs x {len(RUNS)} runs; JSON {size / 2**20:.1f} MiB/run, ", end="")
        print(f"gpu_samples.bin {binary / 2**20:.1f} MiB/run", flush=True)
        for kind, script in SCRIPTS.items():
            words = [sys.executable, str(ROOT / "scripts" / script)]
            commands = {
                "ours, recordings of ours": ([*words, str(own)], root),
                "ours, files of the original": ([*words, str(foreign)], root),
            }
            if peer:
                theirs = [sys.executable, str(peer / "scripts" / script), *([str(foreign)] * (kind == "graphs"))]
                commands["the original, its own files"] = (theirs, foreign)
            costs: dict[str, list[Cost]] = {name: [] for name in commands}
            for _ in range(rounds):
                for name, (command, folder) in commands.items():
                    costs[name].append(measure(command, folder))
                    shutil.rmtree(foreign / "graphs", ignore_errors=True)
            show(kind, {name: middle(several) for name, several in costs.items()})


def show(kind: str, costs: dict[str, Cost]) -> None:
    """Print one line per reader, with its speed relative to the last one."""
    slowest = list(costs.values())[-1]
    for name, cost in costs.items():
        compared = len(costs) > 2 and cost is not slowest and not cost.failed and not slowest.failed
        ratio = f"  {slowest.wall / cost.wall:6.1f} x as fast, CPU {slowest.cpu / cost.cpu:.1f} x" if compared else ""
        print(f"  {kind + ': ' + name:42}{cost}{ratio}", flush=True)


def main() -> None:
    """Print the machine, then a block per size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("samples", type=int, nargs="*", default=SIZES)
    parser.add_argument("--peer", type=Path, help="a checkout of the original project")
    parser.add_argument("--rounds", type=int, default=1, help="measurements per reader; the median is printed")
    args = parser.parse_args()
    if args.peer and not all((args.peer / "scripts" / script).is_file() for script in SCRIPTS.values()):
        parser.error(f"{args.peer} is not a checkout of the original project: scripts/{SCRIPTS['text']} is missing")
    sys.path[:0] = [str(ROOT / "lib")]
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for samples in args.samples:
        compare(samples, args.peer.resolve() if args.peer else None, max(1, args.rounds))


if __name__ == "__main__":
    main()
