"""Measure the cost of trackers: one line of metrics in the trainer, the tracker process, and training with trackers.

    python bench/trackers.py [--seconds 20] [--lines 10] [--gpus 8] [--rounds 3] [--steps 1500]
                             [--only log,process,training]

The process is measured from outside with all its children, start-up excluded, while the files of a run grow by --lines
per second and by one sample of each GPU. Training: `kmatrix train` with TRACKER=none and TRACKER=all in turn, start-up
excluded: the median step time, and the trainer's CPU time per step, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "lib")]

from kmatrix.gpu.formats.json_array import JsonArrayFile
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.tracking import read_track
from kmatrix.track.processes import kill, start

ARMS = ("tensorboard", "trackio", "wandb", "tensorboard,trackio,wandb")
START_S = 10.0  # imports, the first opening, W&B's service
FIRST_S = 5.0  # start of a run that is not measured: allocators, caches, the start of the tracker
CALLS = 5000
METRICS = "test_matrix_results_*/*/metrics.jsonl"
VALUES = {f"value/{number}": 0.123456789 * number for number in range(6)}
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=64", "BLOCK_SIZE=64", "BATCH_SIZE=4"),
    *("GLOBAL_BATCH=4", "EVAL_INTERVAL=100000", "EVAL_SAMPLES=4", "LOG_INTERVAL=10", "REUSE=n", "SEED=1"),
    *("NUM_GPUS=1", "OPTIMIZER=adamw", "CPU_THREADS=1"),
)


def log_call(folder: Path) -> tuple[float, float]:
    """Return the median and the 99th percentile of a line of metrics, in microseconds, as the trainer writes it."""
    from gpt2.log import finite_items

    times = []
    for step in range(CALLS):
        line = {"step": step, "time": time.time(), "attempt": 1, "train/loss": 3.0, "tokens": 4096 * step, **VALUES}
        begin = time.perf_counter()
        append_jsonl(folder / "metrics.jsonl", finite_items(line))
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def synthetic_run(folder: Path, trackers: str) -> RunDir:
    """Return a run directory to which this benchmark writes the metrics."""
    run = RunDir(folder / "test_matrix_results_20260101_000000" / "gpt2_adamw_8gpu")
    run.path.mkdir(parents=True)
    tracking = {"trackers": trackers.split(","), "project": "gpt2-bench"}
    record = {"run_id": "0123456789", "name": run.name, "matrix": run.path.parent.name, "train": {}}
    write_json(run.run_json, {**record, "symbols": {"GPT2_MAX_ITERS": "1"}, "tracking": tracking})
    return run


def process(folder: Path, trackers: str, *, seconds: float, lines: int, gpus: int) -> tuple[float, float, int]:
    """Return CPU (percent of a core) and RSS (MiB) of the process with its children, and the number of points sent."""
    run = synthetic_run(folder, trackers)
    # `start` passes on this environment. W&B must not upload a benchmark.
    environment, os.environ["WANDB_MODE"] = dict(os.environ), "offline"
    feeder = start(Path(sys.executable), ROOT, run, "--parent", str(os.getpid()))
    os.environ.clear()
    os.environ.update(environment)
    array, begin, step = JsonArrayFile(run.gpu_stats_multi), time.monotonic(), 0
    first: tuple[float, float] | None = None
    try:
        while (now := time.monotonic()) < begin + START_S + seconds:
            if first is None and now > begin + START_S:
                first = _cpu(feeder.pid), now
            append_jsonl(run.metrics, {"step": step, "time": time.time(), "attempt": 1, "train/loss": 3.0, **VALUES})
            if step % lines == 0:
                array.append(_snapshot(gpus))
            step += 1
            time.sleep(max(0.0, begin + step / lines - time.monotonic()))
        assert first is not None
        cpu = 100 * (_cpu(feeder.pid) - first[0]) / (time.monotonic() - first[1])
        rss = sum(one.memory_info().rss for one in _family(feeder.pid)) / 2**20
    finally:
        feeder.terminate()
        try:
            feeder.wait(90)
        except subprocess.TimeoutExpired:
            kill(feeder)
    return cpu, rss, min((sent.points for sent in read_track(run)), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The speed of a run."""

    wall: float  # ms per step, median
    cpu: float  # ms of the trainer's CPU time per step


def training(folder: Path, tracker: str, steps: int) -> Pace:
    """Return the pace of one run."""
    words = ["train", f"O={folder}", *TINY, f"MAX_ITERS={steps}", f"TRACKER={tracker}", f"RESULTS_DIR={folder}"]
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": f"{ROOT / 'lib'}:{ROOT}"}
    if not (folder / ".config").exists():
        _kmatrix(["defconfig-gpt2-cpu-quick", f"O={folder}"], environment).communicate()
    known = set(folder.glob(METRICS))
    runner, states = _kmatrix(words, environment), []
    while runner.poll() is None:
        time.sleep(0.5)
        path = next(iter(set(folder.glob(METRICS)) - known), None)
        if path and (trained := _trained(path)) and (cpu := _trainer_cpu(runner.pid)):
            states.append((trained[-1]["time"], trained[-1]["step"], cpu))
    if runner.returncode:
        sys.exit(f"kmatrix {words[0]}: {runner.communicate()[0][-2000:]}")
    kept = [state for state in states if state[0] > states[0][0] + FIRST_S]
    if len(kept) < 2 or kept[-1][1] == kept[0][1]:
        sys.exit(f"{steps} steps take less than {FIRST_S:g} s: pass more --steps")
    trained = _trained(next(iter(set(folder.glob(METRICS)) - known)))
    walls = [line["throughput/step_ms"] for line in trained if line["time"] >= kept[0][0]]
    return Pace(wall=statistics.median(walls), cpu=1e3 * (kept[-1][2] - kept[0][2]) / (kept[-1][1] - kept[0][1]))


def _kmatrix(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kmatrix", *words]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **output)


def _trained(path: Path) -> list[dict[str, float]]:
    """Return the complete lines of training steps."""
    lines = [json.loads(text) for text in path.read_text().splitlines(keepends=True) if text.endswith("\n")]
    return [line for line in lines if "throughput/step_ms" in line]


def _trainer_cpu(runner: int) -> float | None:
    """Return the CPU seconds of the rank below a runner, or None if it is not running."""
    try:
        for process in psutil.Process(runner).children(recursive=True):
            words = process.cmdline()
            if "gpt2.train" in words and "torch.distributed.run" not in words:
                return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return None
    return None


def _snapshot(gpus: int) -> dict[str, object]:
    """Return one entry of a recording with the keys that the recorder writes."""
    values = {"utilization": 97.5, "memory_used": 18000.25, "memory_total": 23028, "power": 228.125, "temperature": 61}
    more = {"memory_percent": 78.164, "power_limit": 300, "sm_clock": 1695, "energy_j": 123456.789}
    devices = [{"gpu_index": index, "gpu_name": "NVIDIA A10G", **values, **more} for index in range(gpus)]
    total = {"total_memory_used": 18000.25 * gpus, "average_utilization": 97.5}
    return {"timestamp": datetime.now(UTC).isoformat(), "multi_gpu_data": devices, "aggregate_stats": total}


def _family(pid: int) -> Iterator[psutil.Process]:
    root = psutil.Process(pid)
    return iter([root, *root.children(recursive=True)])


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process and its living descendants."""
    return sum(sum(one.cpu_times()[:2]) for one in _family(pid))


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of a measurement")
    parser.add_argument("--lines", type=int, default=10, help="lines of metrics per second")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500, help="steps per run, for some tens of seconds")
    parser.add_argument("--only", default="log,process,training")
    asked = parser.parse_args()
    parts = asked.only.split(",")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "log" in parts:
            middle, high = log_call(folder)
            print(f"a line of metrics in the trainer: {middle:.0f} us, 99 % below {high:.0f} us; a step without one: 0")
        for number, arm in enumerate(ARMS if "process" in parts else ()):
            cpu, rss, sent = process(
                folder / f"arm{number}", arm, seconds=asked.seconds, lines=asked.lines, gpus=asked.gpus
            )
            print(f"{arm:28} {cpu:6.2f} % of a core {rss:7.1f} MiB  {sent} points sent", flush=True)
        if "training" in parts:
            _interleaved(folder / "training", asked.rounds, asked.steps)


def _interleaved(folder: Path, rounds: int, steps: int) -> None:
    """Print the pace with and without trackers, run by run and as medians."""
    folder.mkdir()
    found: dict[str, list[Pace]] = {"none": [], "all": []}
    for number in range(rounds):
        for tracker in ("none", "all") if number % 2 == 0 else ("all", "none"):
            pace = training(folder, tracker, steps)
            found[tracker].append(pace)
            print(
                f"round {number + 1}, TRACKER={tracker:4}: {pace.wall:.2f} ms/step, {pace.cpu:.2f} ms CPU", flush=True
            )
    # Medians over rounds of the time and of the CPU time, and the difference in percent.
    for name, values in (("time", [p.wall for p in found["none"]]), ("CPU", [p.cpu for p in found["none"]])):
        every = statistics.median(p.wall if name == "time" else p.cpu for p in found["all"])
        none = statistics.median(values)
        print(f"{name} per step, medians: none {none:.2f} ms, all {every:.2f} ms: {100 * (every / none - 1):+.1f} %")


if __name__ == "__main__":
    main()
