"""Measure the table of docs/performance.md: tokens/s and MFU of whole training runs on a GPU, kmatrix and nanoGPT.

    python bench/gpu_table.py --peer ../nanoGPT

124M, 350M and 774M with a context of 1024 in bfloat16, compiled and eager, on one GPU. Both trainers run as their users
start them, on the same random GPT-2 tokens with the same micro-batch. Speed is the median of the step times that a run
logs, warm-up excluded. MFU follows docs/formats.md for both. Prints Markdown. `--device cpu --models tiny` tests the
script on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_vs_peer import ROOT, WARMING_UP, run, train_fields

from gpt2.data import shards
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape, mfu, peak_tflops

BLOCK = 1024
BATCHES = {"124m": 32, "350m": 16, "774m": 8, "tiny": 2}  # micro-batches that fit on 80 GB without recomputation
TOKENS = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table."""

    model: str
    batch: int
    compile: bool
    steps: int
    device: str
    block: int = BLOCK

    @property
    def shape(self) -> ModelShape:
        layers, heads, width = NAMED[self.model]
        return ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=self.block, vocab_size=GPT2_VOCAB)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, help="a checkout of karpathy/nanoGPT (default: only ours)")
    parser.add_argument("--models", default="124m,350m,774m")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--compile", default="both", choices=("both", "yes", "no"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: PyTorch finds no GPU\n  hint: run this on a machine with a GPU", file=sys.stderr)
        return 2
    if args.steps <= WARMING_UP:
        parser.error(f"--steps must be above {WARMING_UP}: the first {WARMING_UP} are not timed")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    peak = peak_tflops(name, "bf16")
    print(f"{name}, torch {torch.__version__}, bf16, context {args.block}, one device, {args.steps} steps\n")
    print("| model | micro-batch | compile | kmatrix tokens/s | MFU | nanoGPT tokens/s | MFU | kmatrix / nanoGPT |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as text:
        data = random_tokens(Path(text) / "data")
        for number, setting in enumerate(settings(args)):
            ours = speed(train_ours(Path(text) / f"run{number}", data, setting), setting)
            peer = speed(train_nanogpt(args.peer, data, setting, Path(text)), setting) if args.peer else None
            print(row(setting, ours, peer, peak), flush=True)
    return 0


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    """Yield the rows of the table."""
    for model in args.models.split(","):
        for compiled in {"both": (False, True), "yes": (True,), "no": (False,)}[args.compile]:
            yield Setting(
                model=model,
                batch=BATCHES[model],
                compile=compiled,
                steps=args.steps,
                device=args.device,
                block=args.block,
            )


def random_tokens(folder: Path) -> Path:
    """Write shards of random tokens: the speed does not depend on the text."""
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(0).integers(0, GPT2_VOCAB, TOKENS)
    shards.write_shard(folder / "random_train_000000.bin", drawn)
    shards.write_shard(folder / "random_val_000000.bin", drawn[: TOKENS // 20])
    return folder


def train_ours(folder: Path, data: Path, setting: Setting) -> list[float]:
    """Train one run as the launcher does, and return its step times in milliseconds."""
    about = shards.describe(data, GPT2_VOCAB, dataset="shards", source="random", tokenizer="gpt2")
    known = {"path": str(data), "sha256": about["sha256"], "shards": 0, "vocab_size": GPT2_VOCAB}
    layers, heads, width = NAMED[setting.model]
    cuda = setting.device == "cuda"
    fields = train_fields(
        known,
        folder / "checkpoints",
        **{"model": setting.model, "n_layer": layers, "n_head": heads, "n_embd": width, "block_size": setting.block},
        **{"dataset": "shards", "tokenizer": "gpt2", "vocab_multiple": 64, "dtype": "bf16", "device": setting.device},
        **{"batch_size": setting.batch, "global_batch": setting.batch, "compile": setting.compile},
        **{"max_iters": setting.steps, "tf32": True, "cpu_threads": 8 if cuda else 1},
    )
    run_dir = RunDir(folder)
    write_json(run_dir.run_json, {"run_id": "bench", "name": folder.name, "train": fields})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    run([*torchrun, "-m", "gpt2.train", str(folder)], ROOT, fields["cpu_threads"], **seen(setting))
    return [ms for line in merged_metrics(run_dir.metrics) if (ms := line.values.get("throughput/step_ms")) is not None]


def train_nanogpt(checkout: Path, data: Path, setting: Setting, scratch: Path) -> list[float]:
    """Train with nanoGPT's own train.py, and return the step times that it printed in milliseconds."""
    target = checkout / "data" / "kmatrix_random"
    target.mkdir(parents=True, exist_ok=True)
    for kind in shards.KINDS:
        tokens = np.concatenate([shards.open_shard(path) for path in shards.find(data, kind)])
        (target / f"{kind}.bin").write_bytes(tokens.astype("<u2").tobytes())
    layers, heads, width = NAMED[setting.model]
    options = {
        **{"n_layer": layers, "n_head": heads, "n_embd": width, "block_size": setting.block},
        **{"batch_size": setting.batch, "gradient_accumulation_steps": 1, "dropout": 0.0, "bias": True},
        **{"device": setting.device, "dtype": "bfloat16", "compile": setting.compile, "dataset": target.name},
        **{"max_iters": setting.steps, "lr_decay_iters": setting.steps, "warmup_iters": 10, "out_dir": scratch / "out"},
        **{"learning_rate": 6e-4, "log_interval": 1, "eval_interval": 1_000_000, "eval_iters": 1},
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    output = run([sys.executable, "train.py", *flags], checkout, 8, **seen(setting))
    return [float(ms) for ms in re.findall(r"^iter \d+: loss [\d.]+, time ([\d.]+)ms", output, re.M)]


def seen(setting: Setting) -> dict[str, str]:
    """Return the environment variable that shows the GPU, which `train_vs_peer.environment` hides."""
    return {"CUDA_VISIBLE_DEVICES": "0"} if setting.device == "cuda" else {}


def speed(step_ms: Sequence[float], setting: Setting) -> float:
    """Return tokens/s from the median step, warm-up excluded."""
    return 1e3 * setting.batch * setting.block / statistics.median(step_ms[WARMING_UP:])


def row(setting: Setting, ours: float, peer: float | None, peak: float | None) -> str:
    """Return one row of Markdown; n/a: unknown."""

    def used(tokens_per_second: float | None) -> str:
        share = tokens_per_second and mfu(tokens_per_second, setting.shape.flops_per_token, peak, 1)
        return f"{100 * share:.1f} %" if share else "n/a"

    cells: list[Any] = [setting.model, setting.batch, "yes" if setting.compile else "no", f"{ours:,.0f}", used(ours)]
    cells += ["n/a" if peer is None else f"{peer:,.0f}", used(peer)]
    cells.append("n/a" if peer is None else f"{ours / peer:.2f}")
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
