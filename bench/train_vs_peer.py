"""Measure whole training runs, from run.json to result.json, and nanoGPT's train.py if a checkout is given.

    python bench/train_vs_peer.py --peer ../nanoGPT --rounds 3

Both train the same model on the same tokens (the bytes of the Python standard library) with as many threads, on the
CPU, in their own processes. Rounds are interleaved, so that a drift of the machine's speed affects both. A figure is
the median of the step times that a run printed, without the first 20; the table shows the median over rounds. With
--cpu-time it is the CPU time of a run beyond that of one with 25 steps, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # only kmatrix is installed, gpt2 is not

from gpt2.data import shards
from gpt2.prepare.dataset import prepare
from kmatrix.config import read_run
from kmatrix.engines.local.engine import KEEP_MEMORY
from kmatrix.kconfig.assignments import apply_assignments
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import parse_override
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics

ROOT = Path(__file__).resolve().parents[1]
WARMING_UP = 20
FEW = 25  # steps of the short run whose CPU time is subtracted, to exclude start-up
Way = Callable[[int, int], list[float]]  # a round and a number of steps -> the step times that a run logged
SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 128, "batch_size": 12}
SYMBOLS = {
    **{"MODEL": "custom", "DATASET": "stdlib", "OPTIMIZER": "adamw", "LEARNING_RATE": "1e-3", "WARMUP_STEPS": "10"},
    **{"EVAL_INTERVAL": "1000000", "EVAL_SAMPLES": "12", "LOG_INTERVAL": "1", "SAVE_CHECKPOINT": "n"},
    **{"DEVICE": "cpu", "NUM_GPUS": "1", "USE_DDP": "n"},
}
TOKENS_PER_STEP = SIZES["batch_size"] * SIZES["block_size"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, help="a checkout of karpathy/nanoGPT (default: only ours)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time instead of logged step times")
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data")
    args = parser.parse_args(argv)
    if args.steps <= FEW:
        parser.error(f"--steps must be above {FEW}: the first ones are not timed")
    data = prepare("stdlib", args.data_dir.absolute())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways: dict[str, Way] = {
            f"kmatrix {dtype}": lambda turn, steps, dtype=dtype: train_ours(  # type: ignore[misc]  # default argument: bound in each iteration
                folder / f"{dtype}{turn}_{steps}", data, dtype=dtype, max_iters=steps, cpu_threads=args.threads
            )
            for dtype in ("fp32", "bf16")
        }
        if args.peer:
            peer = copy_of_peer(args.peer, folder / "peer", Path(data["path"]))
            ways = {"nanoGPT fp32": lambda _, steps: train_peer(peer, steps=steps, threads=args.threads), **ways}
        time_of_a_step = cpu_ms if args.cpu_time else logged_ms
        medians = interleaved(ways, args.rounds, lambda way, turn: time_of_a_step(way, turn, args.steps))
    report(medians, args.threads)


def interleaved(
    ways: dict[str, Way], rounds: int, time_of_a_step: Callable[[Way, int], float]
) -> dict[str, list[float]]:
    """Return each way's time of a step in each round, in milliseconds."""
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, train in ways.items():
            medians[name].append(time_of_a_step(train, turn))
            print(f"round {turn + 1}  {name:14} {medians[name][-1]:8.1f} ms", flush=True)
    return medians


def logged_ms(train: Way, turn: int, steps: int) -> float:
    """Return the median of the step times that a run logged."""
    return statistics.median(train(turn, steps)[WARMING_UP:])


def cpu_ms(train: Way, turn: int, steps: int) -> float:
    """Return the CPU time per step in ms: of a run with all steps minus one with FEW, per step of the difference."""
    spent = []
    for count in (FEW, steps):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        train(turn, count)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1e3 * (spent[1] - spent[0]) / (steps - FEW)


def report(medians: dict[str, list[float]], threads: int) -> None:
    """Print the median over rounds of each variant, and its speed relative to the first."""
    first = statistics.median(next(iter(medians.values())))
    print(f"\n{threads} threads, {TOKENS_PER_STEP} tokens/step, {SIZES}")
    print(f"{'':16}{'ms/step':>10}{'tokens/s':>12}{'speed':>8}")
    for name, values in medians.items():
        median = statistics.median(values)
        print(f"{name:16}{median:10.1f}{1e3 * TOKENS_PER_STEP / median:12.0f}{first / median:8.2f}")


def environment(threads: int) -> dict[str, str]:
    """Return the common environment: number of threads, passive waiting, no GPU."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "lib")])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "CUDA_VISIBLE_DEVICES": "",
    }


def train_fields(data: dict[str, Any], checkpoint_dir: Path, **overrides: Any) -> dict[str, Any]:
    """Return the training fields of this benchmark: the defaults of the project with a few symbols set."""
    tree = Tree.parse(srctree=ROOT)
    apply_assignments(tree, [parse_override(tree, name, text)[1][0] for name, text in SYMBOLS.items()])
    fields = read_run({name: tree.typed(name, tree.value(name)) for name in tree.names()}).train.to_json()
    fields.update(SIZES, global_batch=SIZES["batch_size"])
    fields.update(data_path=data["path"], data_sha256=data["sha256"], data_shards=data["shards"])
    fields.update(vocab_size=data["vocab_size"])
    fields.update(checkpoint_dir=str(checkpoint_dir), cpu_threads=1)
    return fields | overrides


def train_ours(folder: Path, data: dict[str, Any], **overrides: Any) -> list[float]:
    """Train one run as the launcher does, and return the step times of its metrics.jsonl in milliseconds."""
    run_dir = RunDir(folder)
    fields = train_fields(data, run_dir.checkpoints, **overrides)
    write_json(run_dir.run_json, {"run_id": "bench", "name": folder.name, "train": fields})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    run([*torchrun, "-m", "gpt2.train", str(folder)], ROOT, fields["cpu_threads"], **KEEP_MEMORY)
    return [ms for line in merged_metrics(run_dir.metrics) if (ms := line.values.get("throughput/step_ms")) is not None]


def copy_of_peer(checkout: Path, folder: Path, data: Path) -> Path:
    """Return a copy of the checkout that has our tokens, in its own format, as the dataset "bytes"."""
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git", "*.bin"))
    target = folder / "data" / "bytes"
    target.mkdir(parents=True)
    for kind in shards.KINDS:
        with (target / f"{kind}.bin").open("wb") as file:
            for path in shards.find(data, kind):
                file.write(shards.open_shard(path).tobytes())
    (target / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 257}))
    return folder


def train_peer(folder: Path, *, steps: int, threads: int) -> list[float]:
    """Train with the peer's own train.py, and return the step times that it printed in milliseconds."""
    options = {
        **SIZES,
        **{"device": "cpu", "dtype": "float32", "compile": False, "dataset": "bytes", "out_dir": "out"},
        **{"dropout": 0.0, "bias": True, "gradient_accumulation_steps": 1, "max_iters": steps, "lr_decay_iters": steps},
        **{"learning_rate": 1e-3, "min_lr": 1e-4, "warmup_iters": 10, "grad_clip": 1.0, "log_interval": 1},
        **{"eval_interval": 1_000_000, "eval_iters": 1},
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    output = run([sys.executable, "train.py", *flags], folder, threads)
    return [float(ms) for ms in re.findall(r"^iter \d+: loss [\d.]+, time ([\d.]+)ms", output, re.M)]


def run(command: list[str], folder: Path, threads: int, **more: str) -> str:
    """Run a command to its end and return what it printed; end the benchmark where it fails."""
    done = subprocess.run(
        command, cwd=folder, env=environment(threads) | more, capture_output=True, text=True, check=False, timeout=3600
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
