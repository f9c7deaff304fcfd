"""Measure a step of optimizers: the operators that PyTorch starts, and its time.

    python bench/optimizer_step.py --layers 12 --width 256 --optimizers muon adafactor

The operators are counted twice: on tensors without memory, which take the path of a GPU, and on the device, views
included. Each starts a kernel or some host code, so their number bounds a step of a small model on a GPU. The time is
the median of the steps: CPU time of all threads on the CPU, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT), str(ROOT / "tests" / "support")]  # only kmatrix is installed

from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import BUILDERS, build_optimizers
from gpt2.optim.optimizers import Optimizers
from kmatrix.shapes import ModelShape
from operators import Operators
from optim_factory import Settings

WARM_UP = 2  # steps before the first that counts: the first makes the states


def built(name: str, shape: ModelShape, device: str) -> tuple[GPT, Optimizers]:
    model = GPT(shape).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, build_optimizers(Settings(optimizer=name), model)


def operators(name: str, shape: ModelShape, device: str) -> int | None:
    """Return the operators of a step; None if it reads values, which tensors without memory do not have."""
    found = 0
    for index, optimizer in enumerate(built(name, shape, "cpu")[1].optimizers):
        fused = optimizer.param_groups[0].get("fused")  # one kernel on each device, but not without memory
        _, optimizers = built(name, shape, "cpu" if fused else device)
        try:
            for _ in range(WARM_UP):
                optimizers.optimizers[index].step()
            with Operators() as counted:
                optimizers.optimizers[index].step()
        except (RuntimeError, NotImplementedError):
            return None
        found += counted.total
    return found


def seconds(name: str, shape: ModelShape, device: str, steps: int) -> list[float]:
    """Return the time of each step."""
    _, optimizers = built(name, shape, device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    found = []
    for step in range(WARM_UP + steps):
        start = clock()
        optimizers.step()
        if device != "cpu":
            torch.cuda.synchronize()
        if step >= WARM_UP:
            found.append(clock() - start)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=sorted(BUILDERS), choices=sorted(BUILDERS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    heads = max(1, args.width // 64)
    shape = ModelShape(n_layer=args.layers, n_head=heads, n_embd=args.width, block_size=64, vocab_size=256)
    print(f"{args.layers} layers of width {args.width} on {args.device}, median of {args.steps} steps")
    print(f"{'optimizer':18} {'operators, GPU path':>20} {'operators':>10} {'ms':>9}")
    for name in args.optimizers:
        counts = (operators(name, shape, "meta"), operators(name, shape, args.device))
        without, own = ("-" if count is None else f"{count:,}" for count in counts)
        median = 1e3 * statistics.median(seconds(name, shape, args.device, args.steps))
        print(f"{name:18} {without:>20} {own:>10} {median:9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
