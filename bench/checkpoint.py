"""Time what a checkpoint costs: how long training waits for it, how long it is written, and read back.

    python bench/checkpoint.py --model 124m

A model with the states of AdamW is saved several times by the trainer's own keeper, beside the training and not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from train_vs_peer import train_fields

from gpt2 import checkpoint, optim
from gpt2.config import TrainConfig
from gpt2.dist import World
from gpt2.log import RunLog
from gpt2.train import build_model
from kmatrix.records import RunDir
from kmatrix.records.checkpoints import Kind
from kmatrix.shapes import GPT2_VOCAB, NAMED


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*NAMED], default="124m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="the disk that is measured")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(Path(folder), args.model, args.rounds)


def measure(folder: Path, model: str, rounds: int) -> None:
    """Print the medians of the rounds."""
    parts = made(folder, model)
    for beside in (False, True):
        log = RunLog(RunDir(folder), "bench", 1, main=True)
        log.say = log.event = lambda *_: None  # type: ignore[method-assign,assignment]  # nothing but the table
        keeper = checkpoint.Keeper(with_async(parts, beside), log)
        waited, worked, whole = [], [], []
        for step in range(rounds + 1):
            log.step = 1 + step + 100 * beside
            start, cpu = time.perf_counter(), time.thread_time()
            keeper.save(Kind.ROLLING)
            waited.append(time.perf_counter() - start)
            worked.append(time.thread_time() - cpu)
            keeper.wait()
            whole.append(time.perf_counter() - start)
        name = "beside the training" if beside else "training waits"
        print(f"{name:20}  waits {in_ms(waited[1:])} (the first {in_ms(waited[:1])})  CPU {in_ms(worked[1:])}")
        print(f"{'':20}  written after {in_ms(whole[1:])}")
    newest = keeper.shelf.present[-1]
    path = keeper.folder / newest.name
    verified = [timed(lambda: checkpoint.load(path)) for _ in range(rounds)]
    plain = [timed(lambda: checkpoint.load(path, verify=False)) for _ in range(rounds)]
    print(f"{'read and verified':20}  {in_ms(verified)}, of which the hash {in_ms(verified, plain)}")
    count = sum(p.numel() for p in parts.model.parameters())
    print(f"{newest.bytes / 1e9:.3f} GB, {newest.bytes / count:.2f} bytes a parameter")


def made(folder: Path, model: str) -> checkpoint.Parts:
    """Return a model with optimizer states, as after a step."""
    layers, heads, width = NAMED[model]
    fields = train_fields({"path": "", "sha256": "", "vocab_size": GPT2_VOCAB}, folder / "checkpoints") | {
        **{"model": model, "n_layer": layers, "n_head": heads, "n_embd": width, "optimizer": "adamw"},
        **{"tokenizer": "gpt2", "vocab_size": GPT2_VOCAB, "block_size": 1024, "keep_checkpoints": 2},
    }
    config = TrainConfig.from_json(fields)
    raw = build_model(config)
    optimizers = optim.build(config, raw)
    for parameter in raw.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    optimizers.zero_grad()
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    return checkpoint.Parts(config=config, world=world, model=raw, optimizers=optimizers)


def with_async(parts: checkpoint.Parts, beside: bool) -> checkpoint.Parts:
    """Return the same parts, written beside the training or not."""
    return replace(parts, config=replace(parts.config, async_checkpoint=beside))


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_ms(seconds: Sequence[float], less: Sequence[float] | None = None) -> str:
    """Return the median in milliseconds, less another median."""
    return f"{1e3 * (statistics.median(seconds) - (statistics.median(less) if less else 0)):7.0f} ms"


if __name__ == "__main__":
    main()
