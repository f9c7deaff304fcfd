"""Measure training on data that are tokenized meanwhile against training on prepared shards, in alternation.

    python bench/streaming.py --rounds 5

Both train the small benchmark model (train_vs_peer.py) on the bytes of the Python standard library. The streamed run
starts with an empty folder each time, so that its producer works next to it. A figure is the time from the 20th step to
the last one, per step: unlike the median of train_vs_peer.py it includes the waits for data. Other programs disturb it;
the loader alone, in one process, shows what reading streamed shards costs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from train_vs_peer import TOKENS_PER_STEP, WARMING_UP, train_fields, train_ours

from gpt2.data.batches import Batches
from gpt2.dist import World
from gpt2.prepare.dataset import prepare
from kmatrix.records.files import read_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig

SHARD_TOKENS = 1_000_000
CHUNK = 100  # batches


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--chunks", type=int, default=60, help=f"of {CHUNK} batches, for the loader alone: the fastest counts"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    figures: dict[str, list[float]] = {"prepared": [], "streamed": []}
    starts: dict[str, list[float]] = {"prepared": [], "streamed": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = {"shard_tokens": SHARD_TOKENS}
        fields = {"max_iters": args.steps, "cpu_threads": args.threads, **recipe}
        begin = time.perf_counter()
        whole = prepare("stdlib", folder / "prepared", **recipe)
        preparation = time.perf_counter() - begin
        streaming = {"data_streaming": True, "data_cache": "keep", "data_wait": 600}
        again = prepare("stdlib", folder / "prepared", stream="keep", **recipe)
        readers = {
            "prepared": open_batches(folder / "loader", whole, **recipe),
            "streamed": open_batches(folder / "loader", again, **recipe, **streaming),
        }
        alone = {way: min(times) for way, times in loader_ms(readers, args.chunks).items()}
        print(
            f"loader alone: prepared {alone['prepared']:.3f} ms/step, streamed {alone['streamed']:.3f} ms/step",
            flush=True,
        )
        for turn in range(args.rounds):
            streamed = prepare("stdlib", folder / f"streamed{turn}", stream="keep", **recipe)
            ways: list[tuple[str, dict[str, Any], dict[str, Any]]]
            ways = [("prepared", whole, {}), ("streamed", streamed, streaming)]
            for way, data, more in ways if turn % 2 else reversed(ways):
                ms, first_s = measure(folder / f"{way}_run{turn}", data, {**fields, **more})
                figures[way].append(ms)
                starts[way].append(first_s)
                print(f"round {turn + 1}  {way:10} {ms:8.1f} ms/step, first step after {first_s:.1f} s", flush=True)
            shutil.rmtree(folder / f"streamed{turn}")
    if not args.rounds:
        return
    prepared, stream = (statistics.median(figures[way]) for way in ("prepared", "streamed"))
    print(
        f"\n{args.threads} threads, {TOKENS_PER_STEP} tokens/step, {args.rounds} rounds of {args.steps} steps, medians"
    )
    print(f"prepared  {1e3 * TOKENS_PER_STEP / prepared:8.0f} tokens/s, after a preparation of {preparation:.1f} s")
    print(f"streamed  {1e3 * TOKENS_PER_STEP / stream:8.0f} tokens/s ({prepared / stream - 1:+.1%})")


def open_batches(folder: Path, data: dict[str, Any], **fields: Any) -> Batches:
    """Return the batches of a run whose shards are all there."""
    folder.mkdir(exist_ok=True)
    config = TrainConfig.from_json(train_fields(data, folder, max_iters=100_000, **fields))
    batches = Batches(config, World(rank=0, local_rank=0, size=1, device=torch.device("cpu")))
    if config.data_streaming:
        batches.open_stream(RunDir(folder), print).begin(lambda: False)
    return batches


def loader_ms(readers: dict[str, Batches], chunks: int) -> dict[str, list[float]]:
    """Return the times (ms) to read the batch of a step, without training on it: of CHUNK batches each, in turns."""
    found: dict[str, list[float]] = {way: [] for way in readers}
    for _ in range(chunks):
        for way, batches in readers.items():
            begin = time.perf_counter()
            for _ in range(CHUNK):
                batches.wait(lambda: False)
                batches.next()
            found[way].append(1e3 * (time.perf_counter() - begin) / CHUNK)
    for batches in readers.values():
        batches.close()
    return found


def measure(folder: Path, data: dict[str, Any], fields: dict[str, Any]) -> tuple[float, float]:
    """Train one run; return its time per step (ms), and the time from its launch to its first step (s)."""
    begin = time.time()
    train_ours(folder, data, **fields)
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]
    first, last = lines[WARMING_UP], lines[-1]
    return 1e3 * (last["time"] - first["time"]) / (last["step"] - first["step"]), lines[0]["time"] - begin


if __name__ == "__main__":
    main()
