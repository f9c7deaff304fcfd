"""Measure the peak memory of training processes on the CPU, and compare it with the plan.

    python bench/cpu_memory.py [ROW ...]

Each row is a run of a few steps with the real trainer; its peak is that of the largest process (VmHWM).
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kmatrix.experiment.plan import make_plan
from kmatrix.plan.memory import memory

ROOT = Path(__file__).resolve().parents[1]
SMALL = "MODEL=custom N_LAYER=6 N_HEAD=6 N_EMBD=384"
ROWS = (
    "MODEL=tiny BLOCK_SIZE=128 BATCH_SIZE=12",
    f"{SMALL} BLOCK_SIZE=256 BATCH_SIZE=16",
    f"{SMALL} BLOCK_SIZE=256 BATCH_SIZE=16 DTYPE=bf16",
    f"{SMALL} BLOCK_SIZE=1024 BATCH_SIZE=4",
    f"{SMALL} BLOCK_SIZE=256 BATCH_SIZE=16 RECOMPUTE=y",
    f"{SMALL} BLOCK_SIZE=256 BATCH_SIZE=16 OPTIMIZER=muon",
    f"{SMALL} BLOCK_SIZE=256 BATCH_SIZE=16 OPTIMIZER=sgd",
    f"{SMALL} BLOCK_SIZE=256 BATCH_SIZE=16 LOG_NORMS=y",
    "MODEL=custom N_LAYER=12 N_HEAD=8 N_EMBD=512 BLOCK_SIZE=256 BATCH_SIZE=8",
    "MODEL=124m BLOCK_SIZE=512 BATCH_SIZE=2",
)
COMMON = {
    **{"DEVICE": "cpu", "NUM_GPUS": "1", "MAX_ITERS": "6", "EVAL_SAMPLES": "8", "WARMUP_STEPS": "1", "REUSE": "n"},
    **{"SAVE_CHECKPOINT": "n", "CHECKPOINT_INTERVAL": "0", "AUTO_GENERATE_GRAPHS": "n", "TRACKER": "none"},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row per configuration: planned and measured MiB, and the error of the plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(measure(args.measure))
        return
    print(f"{'configuration':78}{'plan MiB':>10}{'measured MiB':>14}{'error':>8}", flush=True)
    for row in args.rows:
        plan = planned(row)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}:{ROOT}"}
        command = [sys.executable, __file__, "--measure", row]  # a process per row: the peak of children never falls
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        peak = float(done.stdout)
        print(f"{row:78}{plan:10.0f}{peak:14.0f}{plan / peak - 1:+8.0%}", flush=True)


def planned(row: str) -> float:
    """Return the planned memory of the process in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / ".config"
        config.write_text("", encoding="utf-8")
        (run,) = make_plan(config, {**COMMON, **_assignments(row)}, one=True).runs
    need = memory(run.config.shape, run.config.train).process
    assert need is not None
    return need / 2**20


def measure(row: str) -> float:
    """Train a few steps, and return the peak of the largest process in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        words = {**COMMON, **_assignments(row), "RESULTS_DIR": folder, "KCONFIG_CONFIG": f"{folder}/.config"}
        Path(folder, ".config").write_text("", encoding="utf-8")
        command = [sys.executable, "-m", "kmatrix", "train", *(f"{name}={value}" for name, value in words.items())]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # KiB on Linux; the largest descendant


def _assignments(row: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in row.split())


if __name__ == "__main__":
    main()
