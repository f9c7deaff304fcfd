"""Measure the data loader alone, in tokens/s, and its share of the time of a training step.

    python bench/loader.py

The loader reads the bytes of the Python standard library, or the shards of --data-path, in training order. The training
is a run of the small benchmark model (train_vs_peer.py), or the rate given by --rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from train_vs_peer import ROOT, SIZES, TOKENS_PER_STEP, WARMING_UP, train_fields, train_ours

from gpt2.data.batches import Batches
from gpt2.dist import World
from gpt2.prepare.dataset import prepare
from kmatrix.records.train_config import TrainConfig

ONE_RANK = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data")
    parser.add_argument(
        "--data-path", default="", help="a folder of GPT-2 token shards instead of the standard library"
    )
    parser.add_argument("--block-size", type=int, default=SIZES["block_size"])
    parser.add_argument("--batch-size", type=int, default=SIZES["batch_size"])
    parser.add_argument("--batches", type=int, default=5000)
    parser.add_argument("--rate", type=float, help="training speed in tokens/s (default: measure a run)")
    args = parser.parse_args(argv)
    tokenizer = "gpt2" if args.data_path else "byte"
    data = prepare("shards" if args.data_path else "stdlib", args.data_dir.absolute(), args.data_path, tokenizer)
    sizes = {"block_size": args.block_size, "batch_size": args.batch_size, "global_batch": args.batch_size}
    config = TrainConfig.from_json(train_fields(data, Path(), tokenizer=tokenizer, **sizes))
    loader = tokens_per_second(Batches(config, ONE_RANK), args.batches, args.batch_size * args.block_size)
    rate = args.rate or training_rate(args.data_dir.absolute())
    print(f"loader    {loader:14,.0f} tokens/s")
    print(f"training  {rate:14,.0f} tokens/s")
    print(f"the loader takes {rate / loader:.2%} of the time of a step")


def tokens_per_second(batches: Batches, count: int, tokens: int) -> float:
    """Return the speed of `count` micro-batches of `tokens` tokens, one after the other on one CPU."""
    batches.next()  # the first one opens the shards
    start = time.perf_counter()
    for _ in range(count):
        batches.next()
    return count * tokens / (time.perf_counter() - start)


def training_rate(data_dir: Path) -> float:
    """Return the speed of a run of the small model on all cores in bfloat16, the fastest setting on a CPU."""
    data = prepare("stdlib", data_dir)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        times = train_ours(run, data, dtype="bf16", max_iters=100, cpu_threads=os.cpu_count() or 1)
    return 1e3 * TOKENS_PER_STEP / statistics.median(times[WARMING_UP:])


if __name__ == "__main__":
    main()
