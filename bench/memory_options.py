"""Measure cost and savings of the memory options: activation recomputation, and a loss computed in chunks of tokens.

    python bench/memory_options.py

Each variant takes its steps (forward, backward, AdamW) in its own process. Time is the CPU time of one thread, which
other processes disturb less than wall time. Memory is the peak of the process above its value before the first step:
AdamW's states are included, the model and the libraries are not. With --device cuda, time is wall time and memory is
that of tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # only kmatrix is installed, gpt2 is not

from gpt2.model.gpt2 import GPT
from gpt2.model.precision import autocast, configure_precision
from kmatrix.shapes import ModelShape

VARIANTS = {
    "none": {},
    "GPT2_RECOMPUTE=y": {"recompute": True},
    "GPT2_LOSS_CHUNK=128": {"loss_chunk": 128},
    "GPT2_LOSS_CHUNK=1024": {"loss_chunk": 1024},
    "both, 128": {"recompute": True, "loss_chunk": 128},
}
ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.variant:
        print(json.dumps(measure(args)))
        return
    print(
        f"{args.layers} layers, width {args.width}, {args.batch} x {args.block} tokens, vocabulary {args.vocab}, ",
        end="",
    )
    print(f"{args.dtype}, {args.device}")
    print(f"{'':22}{'ms/step':>10}{'time':>8}{'peak MiB':>10}{'memory':>8}{'loss':>12}")
    first: dict[str, float] = {}
    for name in VARIANTS:
        found = in_a_process(name, sys.argv[1:] if argv is None else argv)
        first = first or found
        time_share, memory_share = found["ms"] / first["ms"], found["mib"] / first["mib"]
        print(
            f"{name:22}{found['ms']:10.0f}{time_share:8.2f}{found['mib']:10.0f}{memory_share:8.2f}{found['loss']:12.6f}"
        )


def in_a_process(name: str, words: Sequence[str]) -> dict[str, float]:
    """Measure one variant in its own process, so that its peak memory is not that of another variant."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "lib")])}
    command = [sys.executable, __file__, *words, "--variant", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} exited with status {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Return ms per step (median, without the first), the peak in MiB, and the loss of the last step."""
    torch.set_num_threads(1)
    configure_precision(args.device, args.dtype, tf32=True)
    heads = max(1, args.width // 64)
    shape = ModelShape(
        n_layer=args.layers, n_head=heads, n_embd=args.width, block_size=args.block, vocab_size=args.vocab
    )
    model = GPT(shape, **VARIANTS[args.variant]).to(args.device)  # type: ignore[arg-type]  # the options above
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    idx, targets = torch.randint(args.vocab, (2, args.batch, args.block), generator=generator).to(args.device)
    cuda = args.device == "cuda"
    before = 0.0 if cuda else peak_mib()
    seconds = []
    for _ in range(1 + args.steps):
        start = now(cuda=cuda)
        with autocast(args.device, args.dtype):
            _, loss = model(idx, targets)
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(now(cuda=cuda) - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else peak_mib()
    return {"ms": 1e3 * statistics.median(seconds[1:]), "mib": peak - before, "loss": loss.item()}


def now(*, cuda: bool) -> float:
    """Return the CPU time of this process in s, or with CUDA the wall time after all queued kernels have finished."""
    if cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def peak_mib() -> float:
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
