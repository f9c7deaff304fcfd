"""Measure a step and the optimizer states of a rank, with all states on each rank (DDP) and with sharded ones (ZeRO-1).

    python bench/zero.py --optimizer adamw muon

Starts its own ranks, on the CPU with gloo or with --device cuda on one GPU per rank with NCCL. Each rank has one model
for each way, and both take their steps in turn, on equal batches, so that a slow second of the machine slows down both.
The table shows the median and the quartiles of a step in ms (until the slowest rank is done), the bytes of the states
on each rank, the time to gather them for a checkpoint, and whether all weights and losses were equal bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # only kmatrix is installed, gpt2 is not

from gpt2 import dist
from gpt2.model.gpt2 import GPT
from gpt2.model.precision import autocast, configure_precision
from gpt2.optim.builders import build_optimizers
from gpt2.optim.optimizers import Optimizers
from gpt2.optim.sharded import shard
from gpt2.steps import clip, distributed
from kmatrix.shapes import ModelShape

WAYS = {"DDP": 0, "ZERO_STAGE=1": 1}
WARM_UP = 2  # steps that are not timed
SETTINGS = {  # the fields of TrainConfig that the optimizers read: the defaults of their symbols
    **{"learning_rate": 1e-3, "embedding_lr": None, "head_lr": None, "scalar_lr": None, "weight_decay": 0.1},
    **{"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "sgd_momentum": 0.9, "sgd_nesterov": False, "amsgrad": False},
    **{"spam_theta": 5000.0, "spam_interval": 500, "spam_warmup_steps": 150, "soap_frequency": 10},
    **{"muon_momentum": 0.95, "muon_nesterov": True, "muon_ns_steps": 5, "muon_adamw_lr": 6e-4},
    **{"muon_split_qkv": True, "muon_adjust_lr_fn": "original"},
    **{"adafactor_beta2_decay": -0.8, "adafactor_clip": 1.0},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        worker(args)
    words = list(sys.argv[1:] if argv is None else argv)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "lib")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run([*torchrun, __file__, *words], env=environment, check=False).returncode


def worker(args: argparse.Namespace) -> None:
    rank, local_rank, size = dist.environment()
    torch.set_num_threads(1)
    device = dist.choose_device(args.device, local_rank)
    backend = "nccl" if args.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, device_id=device if backend == "nccl" else None)
    world = dist.World(rank=rank, local_rank=local_rank, size=size, device=device, backend=backend)
    say = partial(print, flush=True) if rank == 0 else lambda *_: None
    configure_precision(args.device, args.dtype, tf32=True)
    heads = max(1, args.width // 64)
    shape = ModelShape(
        n_layer=args.layers, n_head=heads, n_embd=args.width, block_size=args.block, vocab_size=args.vocab
    )
    say(
        f"{shape.params:,} parameters, {size} ranks on {world.device_name}, {args.batch} x {args.block} tokens each, "
        f"{args.dtype}, {args.steps} steps"
    )
    say(
        f"{'optimizer':12}{'way':14}{'ms/step':>9}{'quartiles':>20}{'bytes of states, by rank':>32}{'gather':>9}  equal"
    )
    for name in args.optimizer:
        for line in compare(name, args, shape, world):
            say(line)
    dist.finish(0)


def compare(name: str, args: argparse.Namespace, shape: ModelShape, world: dist.World) -> list[str]:
    """Train with both ways in turn, and return a line for each."""
    config = SimpleNamespace(optimizer=name, ddp_find_unused_params=False, **SETTINGS)
    models, optimizers, replicas = {}, {}, {}
    for way, stage in WAYS.items():
        models[way] = GPT(shape, seed=1).to(world.device)
        optimizers[way] = shard(build_optimizers(config, models[way]), stage, world)
        replicas[way] = distributed(models[way], config, world)  # type: ignore[arg-type]  # it reads two fields
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(WARM_UP + args.steps):
        idx, targets = torch.randint(args.vocab, (2, args.batch, args.block), generator=generator).to(world.device)
        for way in WAYS if step % 2 else reversed(WAYS):  # neither is always first
            world.barrier()
            start = time.perf_counter()
            with autocast(args.device, args.dtype):
                _, loss = replicas[way](idx, targets)
            loss.backward()
            clip(list(models[way].parameters()), 1.0)
            optimizers[way].step()
            optimizers[way].zero_grad()
            world.barrier()  # the slowest rank counts; it also waits for the GPU
            if step >= WARM_UP:
                seconds[way].append(time.perf_counter() - start)
            losses[way].append(loss.item())
    weights = {way: list(model.state_dict().values()) for way, model in models.items()}
    equal = losses["DDP"] == losses["ZERO_STAGE=1"] and all(map(torch.equal, *weights.values()))
    equal = all(dist.gather(world, equal))
    return [
        f"{name:12}{way:14}{_milliseconds(seconds[way])}{_bytes(optimizers[way], world):>32}"
        f"{_gather_seconds(optimizers[way], world):8.2f}s  {'yes' if equal else 'NO'}"
        for way in WAYS
    ]


def _milliseconds(seconds: Sequence[float]) -> str:
    low, middle, high = (1e3 * part for part in statistics.quantiles(seconds, n=4))
    return f"{middle:9.1f}{f'{low:.1f} to {high:.1f}':>20}"


def _bytes(optimizers: Optimizers, world: dist.World) -> str:
    return " ".join(f"{size:,}" for size in dist.gather(world, optimizers.state_bytes))


def _gather_seconds(optimizers: Optimizers, world: dist.World) -> float:
    """Return the seconds until rank 0 has the states of all ranks for a checkpoint."""
    world.barrier()
    start = time.perf_counter()
    optimizers.state_dict()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
