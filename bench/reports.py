"""How long the GPU reports take and how much memory: 3 runs of 4 GPUs, over the number of samples.

python bench/reports.py [SAMPLES ...] [--peer PATH]

Each measurement is a process of its own. PATH is a checkout of the original project: its two scripts then read
the same files of its own layout in the same run. The three runs are links to one file. They are named after resnet18,
because the original's text script looks at no others; what it then prints of them is another matter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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


def entries(samples: int) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Yield the time and the GPUs of each sample: memory climbs for a twentieth of the time, then trembles."""
    for number in range(samples):
        share = min(1.0, 20 * (number + 1) / samples)
        gpus = [
            {
                "gpu_index": index,
                "gpu_name": "NVIDIA A10G",
                "utilization": 80 + (7 * number + index) % 20,
                "memory_used": 12_800.0 * (0.1 + 0.9 * share) + 25 * index + (13 * number % 80),
                "memory_total": TOTAL,
                "power": 150.0 + (11 * number + 3 * index) % 40,
                "temperatures": {"GPU": 60 + index},
                "clocks": {"gpu": 1695, "memory": 6251},
            }
            for index in range(GPUS)
        ]
        yield STARTED + number, gpus


def make_foreign(root: Path, samples: int) -> Path:
    """Write a folder of the original project's: arrays with an indent of 2."""
    folder = root / "test_matrix_results_20250919_120000"
    for place, run in enumerate(FOREIGN):
        path = folder / run / f"gpu_stats_{run}_20250919_120000_multi_gpu.json"
        path.parent.mkdir(parents=True)
        if place:
            os.link(next((folder / FOREIGN[0]).iterdir()), path)
            continue
        with path.open("w", encoding="utf-8") as file:
            for number, (moment, gpus) in enumerate(entries(samples)):
                time_text = datetime.fromtimestamp(moment, UTC).replace(tzinfo=None).isoformat()
                used = sum(gpu["memory_used"] for gpu in gpus)
                total = {"total_memory_used": used, "total_memory_total": GPUS * TOTAL, "gpu_count": GPUS}
                entry = {"timestamp": time_text, "multi_gpu_data": gpus, "aggregate_stats": total}
                file.write("," if number else "[")
                file.write("\n  " + json.dumps(entry, indent=2).replace("\n", "\n  "))
            file.write("\n]\n")
    results = [
        {"test_id": run, "optimizer": run.split("_")[1], "pruning": "none", "target_sparsity": 0.5, "success": True}
        for run in FOREIGN
    ]
    (folder / "all_results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def make_own(root: Path, samples: int) -> Path:
    """Write a matrix of ours as a recorder leaves it: gpu_summary.json and gpu_samples.bin, by the recorder's code."""
    from kmatrix.gpu.aggregate import Aggregate
    from kmatrix.gpu.formats import COLUMNS, SampleFile
    from kmatrix.gpu.source import Device
    from kmatrix.records import MatrixDir, write_json

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
        aggregate = Aggregate(devices)
        about = [{"gpu_index": d.gpu_index, "gpu_name": d.gpu_name, "uuid": d.uuid} for d in devices]
        file = SampleFile(
            run.gpu_samples, {"device_type": "nvidia", "simulated": False, "gpus": about, "calibration": None}
        )
        for number, (moment, gpus) in enumerate(entries(samples)):
            values = [float(gpu.get(name, math.nan)) for gpu in gpus for name in COLUMNS]
            aggregate.add(float(number), moment, values)
            file.append(moment, values)
        file.close()
        write_json(run.gpu_summary, aggregate.summary({"device_type": "nvidia"}, final=True))
    return matrix.path


def measure(command: Sequence[str], folder: Path) -> str:
    """Run a command; return its wall time, processor time and greatest memory, or how it failed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, complaint = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"longer than {SECONDS} s"
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        last = complaint.strip().splitlines()[-1:] or [f"status {process.returncode}"]
        return f"failed after {wall:.0f} s: {last[0]}"
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{wall:9.2f} s {used:9.2f} s CPU {after.ru_maxrss / 1024:9.0f} MiB"


def worker(words: list[str]) -> None:
    """Measure one command in this process's only child: the greatest memory of children is then its own."""
    print(measure(words[1:], Path(words[0])), flush=True)


def line(label: str, command: Sequence[str], folder: Path) -> None:
    """Measure in a process of its own, and print."""
    own = [sys.executable, __file__, "--worker", str(folder), *command]
    result = subprocess.run(own, capture_output=True, text=True, check=True)
    print(f"  {label:42}{result.stdout.strip()}", flush=True)


def compare(samples: int, peer: Path | None) -> None:
    """Make the data of one size, and measure every reader on them."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        foreign, own = make_foreign(root / "foreign", samples), make_own(root / "own", samples)
        size = next(foreign.glob("*/gpu_stats*")).stat().st_size
        binary = next(own.glob("gpt2_*/gpu_samples.bin")).stat().st_size
        print(f"{samples:,} samples x {GPUS} GPUs x {len(RUNS)} runs; JSON {size / 2**20:.1f} MiB a run, ", end="")
        print(f"gpu_samples.bin {binary / 2**20:.1f} MiB a run", flush=True)
        for kind, script in SCRIPTS.items():
            words = [sys.executable, str(ROOT / "scripts" / script)]
            line(f"{kind}: ours, recordings of ours", [*words, str(own)], root)
            line(f"{kind}: ours, files of the original", [*words, str(foreign)], root)
            if peer:
                theirs = [sys.executable, str(peer / "scripts" / script)]
                line(f"{kind}: the original, its own files", [*theirs, *([str(foreign)] * (kind == "graphs"))], foreign)
                shutil.rmtree(foreign / "graphs", ignore_errors=True)


def main() -> None:
    """Print the machine, then a block for each size."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("samples", type=int, nargs="*", default=SIZES)
    parser.add_argument("--peer", type=Path, help="a checkout of the original project")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "lib")]
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for samples in args.samples:
        compare(samples, args.peer.resolve() if args.peer else None)


if __name__ == "__main__":
    main()
