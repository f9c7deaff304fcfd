"""Train as users do, by torchrun and gpt2.train, and read speed, memory, waits and losses from the files of the run."""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import gpu_profile
import numpy as np
import torch
from gpu_results import FailedError, OutOfTimeError, Results, Scale, Values

from gpt2.data import shards
from gpt2.data.batches import Batches
from gpt2.dist import World
from kmatrix.config import read_run
from kmatrix.kconfig.assignments import apply_assignments
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import parse_override
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.paths import RunDir, extended_path
from kmatrix.records.runs import merged_metrics
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import GPT2_VOCAB, mfu, peak_tflops

ROOT = Path(__file__).resolve().parents[1]
SETTLE = 10  # steps that are not timed: compilation, allocation, clocks
STEPS = 50
TOKENS = 4_000_000
TINY_STEPS, TINY_SETTLE = 4, 2
RECOMPILED = re.compile(r"Recompiling function|recompile_limit")
# A line of the log about a step appears at the end of the next one: what follows this line belongs to later steps.
STEP_2_ENDED = re.compile(r"^Iter 1 \|.*", re.MULTILINE)
OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)
SYMBOLS = {  # of every run; the others have their defaults
    **{"MODEL": "124m", "DATASET": "shards", "TOKENIZER": "gpt2", "OPTIMIZER": "adamw", "WARMUP_STEPS": "10"},
    **{"EVAL_INTERVAL": "1000000", "EVAL_SAMPLES": "8", "LOG_INTERVAL": "1", "SAVE_CHECKPOINT": "n"},
    **{"DTYPE": "bf16", "BLOCK_SIZE": "1024", "VOCAB_MULTIPLE": "64", "CPU_THREADS": "8"},
}
TINY: dict[str, str] = {  # replaces the sizes of a run in the check on the CPU
    **{"MODEL": "custom", "N_LAYER": "2", "N_HEAD": "2", "N_EMBD": "64", "BLOCK_SIZE": "32", "BATCH_SIZE": "2"},
    **{"CPU_THREADS": "1", "COMPILE": "n"},
}
# Not with COMPILE=n, or not on the CPU: the check on the CPU leaves them out.
ONLY_COMPILED = ("COMPILE_MODE", "ATTENTION_KERNEL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run: its symbols besides the common ones."""

    symbols: Mapping[str, str]
    steps: int = STEPS
    ranks: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)  # of "train", which no symbol sets

    def on(self, scale: Scale) -> Setting:
        """Return the setting with the sizes of a device."""
        if not scale.tiny:
            return replace(self, symbols={"COMPILE": "y", **self.symbols})
        kept = {name: value for name, value in self.symbols.items() if name not in ONLY_COMPILED}
        sizes = dict(TINY)
        if "ARCH" in kept:
            sizes = {**TINY, "MODEL": "depth", "DEPTH": "2", "ASPECT_RATIO": "32", "HEAD_DIM": "32"}
            sizes = {name: value for name, value in sizes.items() if not name.startswith("N_")}
        steps = min(self.steps, TINY_STEPS)
        return replace(self, symbols=kept | sizes, steps=steps, ranks=min(self.ranks, 2))


@cache
def tokens_of(folder: Path) -> dict[str, Any]:
    """Write shards of artificial text into a folder, and return the fields of "train" that name them.

    Every second token follows from the one before, and all have the frequencies of Zipf's law: unlike in uniform
    tokens, there is something to learn, so that losses show the accuracy of a setting after a few steps.
    """
    if not (folder / "random_val_000000.bin").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(0)
        drawn = generator.zipf(1.2, TOKENS) % GPT2_VOCAB
        drawn[1::2] = generator.permutation(GPT2_VOCAB)[drawn[::2]]
        shards.write_shard(folder / "random_train_000000.bin", drawn)
        shards.write_shard(folder / "random_val_000000.bin", drawn[: TOKENS // 20])
    data = folder
    about = shards.describe(data, GPT2_VOCAB, dataset="shards", source="random", tokenizer="gpt2")
    fields = {"data_path": str(data), "data_sha256": about["sha256"], "data_shards": 0, "vocab_size": GPT2_VOCAB}
    return {"dataset": "shards", "tokenizer": "gpt2", **fields}


def config_of(setting: Setting, scale: Scale, data: Mapping[str, Any]) -> TrainConfig:
    """Return the training configuration of a run, by the rules of Kconfig."""
    setting = setting.on(scale)
    device = {"DEVICE": scale.device, "NUM_GPUS": str(setting.ranks), "USE_DDP": "y" if setting.ranks > 1 else "n"}
    symbols = SYMBOLS | device | setting.symbols | {"MAX_ITERS": str(setting.steps)}
    tree = Tree.parse(srctree=ROOT)
    apply_assignments(tree, [parse_override(tree, name, text)[1][0] for name, text in symbols.items()])
    fields = read_run({name: tree.typed(name, tree.value(name)) for name in tree.names()}).train.to_json()
    return TrainConfig.from_json({**fields, **data, **setting.fields})


def train(setting: Setting, results: Results, keep: Path | None = None) -> Values:
    """Train a run, and return its measurements.  keep: where the trace of a profile goes.

    Raises FailedError with the last line of its log if it fails, and OutOfTimeError at the end of the call.
    """
    scale = results.scale
    # The folder of a run is deleted with its checkpoints: only the numbers stay.
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        data = tokens_of(results.path.parent / "random-tokens")
        config = config_of(setting, scale, data)
        run_dir = RunDir(Path(name) / "run")
        write_json(run_dir.run_json, {"run_id": "bench", "name": "bench", "train": config.to_json()})
        NodeDir(run_dir, 0).recording.path.mkdir(parents=True, exist_ok=True)  # makes the trainer record its phases
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={setting.on(scale).ranks}", "-m", "gpt2.train", str(run_dir.path)]
        output = execute(command, ROOT, scale, config.cpu_threads, results.left_s)
        if keep and run_dir.profile.exists():
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.write_bytes(run_dir.profile.read_bytes())
        return measured(run_dir, config, scale, output)


def measured(run_dir: RunDir, config: TrainConfig, scale: Scale, output: str) -> Values:
    """Return the numbers of a finished run.

    step_ms: median after the warm-up, from CUDA events on a GPU.  loss: of the last step, nats/token.
    peak_mib: of tensors.  recompilations: of torch.compile, after step 2.
    phases_s: seconds of each evaluation and checkpoint, by kind.
    """
    lines = [line.values for line in merged_metrics(run_dir.metrics)]
    times = [values["throughput/step_ms"] for values in lines if "throughput/step_ms" in values]
    losses = [values["train/loss"] for values in lines if "train/loss" in values]
    settle = TINY_SETTLE if scale.tiny else SETTLE
    step_ms = statistics.median(times[settle:])
    low, _, high = statistics.quantiles(times[settle:], n=4) if len(times) > settle + 1 else (step_ms,) * 3
    speed = 1e3 * config.tokens_per_step / step_ms
    result = read_json(run_dir.result)
    used = read_json(run_dir.run_used) if run_dir.run_used.exists() else {}
    peak = peak_tflops(scale.name, "bf16")
    phases: dict[str, list[float]] = {}
    for line in read_jsonl(NodeDir(run_dir, 0).recording.phases):
        phases.setdefault(line["phase"], []).append(line["end"] - line["begin"])
    return {
        "step_ms": step_ms,
        "quartiles_ms": [low, high],
        "tokens_per_second": speed,
        "mfu": mfu(speed, config.shape.flops_per_token, peak, config.num_gpus),
        "peak_mib": result.get("peak_memory_mib"),
        "loss": losses[-1] if losses else None,
        "steps": len(times),
        "micro_batch": config.batch_size,
        "accumulation": config.gradient_accumulation,
        "ranks": config.num_gpus,
        "attention": used.get("attention"),
        "recompilations": late_recompilations(output),
        "phases_s": phases,
        "optimizer_state_mib": result.get("optimizer_state_mib"),
    }


def late_recompilations(output: str) -> int | None:
    """Return the number of recompilations after step 2, None if the log has no such step.

    Earlier ones are expected: evaluation and training are two graphs.
    """
    ended = STEP_2_ENDED.search(output)
    return len(RECOMPILED.findall(output, ended.end())) if ended else None


def execute(command: Sequence[str], folder: Path, scale: Scale, threads: int, limit_s: float) -> str:
    """Run a command in a folder and return its output, also of its errors."""
    with _started(command, folder, scale, threads) as process:
        try:
            output, _ = process.communicate(timeout=None if math.isinf(limit_s) else max(1.0, limit_s))
        except subprocess.TimeoutExpired as error:
            raise OutOfTimeError from error
    return _finished(process.returncode, output)


def stamped(
    command: Sequence[str], folder: Path, scale: Scale, threads: int, limit_s: float
) -> list[tuple[float, str]]:
    """Run a command, and return its lines with the second at which each arrived."""
    lines: list[tuple[float, str]] = []
    end = time.monotonic() + limit_s
    with _started(command, folder, scale, threads) as process:
        assert process.stdout
        for line in process.stdout:
            lines.append((time.monotonic(), line))
            if time.monotonic() > end:
                raise OutOfTimeError
        process.wait()
    _finished(process.returncode, "".join(line for _, line in lines))
    return lines


@contextmanager
def _started(command: Sequence[str], folder: Path, scale: Scale, threads: int) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a group of its own, and kill the group at the end: torchrun's ranks end with it."""
    environment = {
        **os.environ,
        "PYTHONPATH": extended_path(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TORCH_LOGS": "recompiles",
    }
    if scale.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        close_fds=False,  # it keeps the lock of the results, should it outlive this process
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def _finished(status: int, output: str) -> str:
    """Return the output of a command, or raise FailedError with the reason in it."""
    if status == 0:
        return output
    if OUT_OF_MEMORY.search(output):
        raise FailedError("out of memory")
    errors = re.findall(r"^(?:\w+(?:\.\w+)*Error|error): ?.*", output, re.MULTILINE)
    last = errors[0] if errors else (output.strip().splitlines() or ["no output"])[-1]
    raise FailedError(f"exit status {status}: {last[:160]}")


def fitting(setting: Setting, results: Results) -> Values:
    """Train with the largest micro-batch that fits: halved as long as the memory is full."""
    while True:
        try:
            return train(setting, results)
        except FailedError as error:
            batch = int(setting.symbols.get("BATCH_SIZE", "1"))
            if str(error) != "out of memory" or batch == 1:
                raise
            print(f"micro-batch {batch} does not fit: trying {batch // 2}", flush=True)
            setting = replace(setting, symbols={**setting.symbols, "BATCH_SIZE": str(batch // 2)})


def loader(setting: Setting, results: Results) -> Values:
    """Measure the input pipeline alone: seconds per micro-batch until it is on the device."""
    scale = results.scale
    config = config_of(setting, scale, tokens_of(results.path.parent / "random-tokens"))
    device = torch.device(scale.device, 0) if scale.device == "cuda" else torch.device("cpu")
    batches = Batches(config, World(rank=0, local_rank=0, size=1, device=device))
    count = 5 if scale.tiny else 200
    batches.next()  # opens the shards
    start = time.perf_counter()
    for _ in range(count):
        batches.next()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / count
    batches.close()
    return {"seconds": seconds, "micro_batch": config.batch_size}


def profiled(setting: Setting, results: Results, trace: Path) -> Values:
    """Train with a profile of some steps, and return the share of each kind of kernel."""
    first = TINY_SETTLE if results.scale.tiny else SETTLE + 10
    count = 1 if results.scale.tiny else 3
    span = {"profile": f"{first}:{first + count}"}
    values = train(replace(setting, fields={**setting.fields, **span}), results, keep=trace)
    if not trace.exists():
        raise FailedError("the run wrote no trace")
    return {**gpu_profile.shares(gpu_profile.load(trace), count), "micro_batch": values["micro_batch"]}
