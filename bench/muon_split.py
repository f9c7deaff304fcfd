"""Measure the cost of Muon's split of queries, keys and values, next to the fused form and PyTorch's Muon.

    python bench/muon_split.py --width 768 --layers 2

The three optimizers take one step in turn, on equal gradients. The table shows the median time of a step (CPU time of
all threads on the CPU, which other processes disturb less) and the operations of its Newton-Schulz iterations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # only kmatrix is installed, gpt2 is not

from gpt2.model.gpt2 import GPT
from gpt2.optim.groups import block_matrices, projections
from gpt2.optim.muon import Muon
from kmatrix.shapes import ModelShape

STEPS = 5  # Newton-Schulz iterations
WARM_UP = 2  # steps that are not timed


def flops(rows: int, columns: int) -> int:
    """Return the operations of the Newton-Schulz iterations of one matrix, a multiplication and an addition as two."""
    short, long = sorted((rows, columns))
    return STEPS * 2 * (2 * short * short * long + short**3)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    heads = max(1, args.width // 64)
    shape = ModelShape(n_layer=args.layers, n_head=heads, n_embd=args.width, block_size=64, vocab_size=256)
    model = GPT(shape).to(args.device)
    matrices = block_matrices(model)
    variants = {
        "PyTorch": torch.optim.Muon(matrices, lr=1e-3),
        "fused": Muon(matrices, parts={}, lr=1e-3),
        "split": Muon(matrices, parts=projections(model), lr=1e-3),
    }
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for step in range(WARM_UP + args.steps):
        for name, optimizer in variants.items():
            start = clock()
            optimizer.step()
            if args.device != "cpu":
                torch.cuda.synchronize()
            if step >= WARM_UP:
                seconds[name].append(clock() - start)
    fused = sum(flops(*matrix.shape) for matrix in matrices)
    split = fused + args.layers * (3 * flops(args.width, args.width) - flops(3 * args.width, args.width))
    work = {"PyTorch": fused, "fused": fused, "split": split}
    print(f"{args.layers} layers of width {args.width} on {args.device}, median of {args.steps} steps")
    for name, times in seconds.items():
        print(f"{name:8} {1e3 * statistics.median(times):8.1f} ms  {work[name] / 1e9:7.1f} GFLOP")
    return 0


if __name__ == "__main__":
    sys.exit(main())
