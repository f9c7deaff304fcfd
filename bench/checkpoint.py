"""Measure the cost of a checkpoint: the time that training waits, the time to write it, and the time to read it.

    python bench/checkpoint.py --model 124m

The trainer's CheckpointManager saves a model with the states of AdamW several times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from train_vs_peer import train_fields

from gpt2.checkpoint.files import load_checkpoint
from gpt2.checkpoint.manager import CheckpointManager
from gpt2.checkpoint.state import TrainingState
from gpt2.dist import World
from gpt2.log import RunLog
from gpt2.optim.builders import build_optimizers
from gpt2.train import build_model
from kmatrix.records.checkpoints import CheckpointKind
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig
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
    state = made(folder, model)
    log = RunLog(RunDir(folder), "bench", 1, main=True)
    log.say = log.event = lambda *_: None  # type: ignore[method-assign,assignment]  # print only the table
    manager = CheckpointManager(state, log)
    waited, worked, whole = [], [], []
    for step in range(rounds + 1):
        log.step = 1 + step
        start, cpu = time.perf_counter(), time.thread_time()
        manager.save(CheckpointKind.ROLLING)
        waited.append(time.perf_counter() - start)
        worked.append(time.thread_time() - cpu)
        manager.wait()
        whole.append(time.perf_counter() - start)
    print(f"{'saved':20}  waits {in_ms(waited[1:])} (the first {in_ms(waited[:1])})  CPU {in_ms(worked[1:])}")
    print(f"{'':20}  written after {in_ms(whole[1:])}")
    newest = manager.index.present[-1]
    path = manager.folder / newest.name
    verified = [timed(lambda: load_checkpoint(path)) for _ in range(rounds)]
    plain = [timed(lambda: load_checkpoint(path, verify=False)) for _ in range(rounds)]
    print(f"{'read and verified':20}  {in_ms(verified)}, of which the hash {in_ms(verified, plain)}")
    count = sum(p.numel() for p in state.model.parameters())
    print(f"{newest.bytes / 1e9:.3f} GB, {newest.bytes / count:.2f} bytes/parameter")


def made(folder: Path, model: str) -> TrainingState:
    """Return a model with optimizer states, as after a step."""
    layers, heads, width = NAMED[model]
    fields = train_fields({"path": "", "sha256": "", "vocab_size": GPT2_VOCAB, "shards": 0}, folder / "checkpoints") | {
        **{"model": model, "n_layer": layers, "n_head": heads, "n_embd": width, "optimizer": "adamw"},
        **{"tokenizer": "gpt2", "vocab_size": GPT2_VOCAB, "block_size": 1024, "keep_checkpoints": 2},
    }
    config = TrainConfig.from_json(fields)
    raw = build_model(config)
    optimizers = build_optimizers(config, raw)
    for parameter in raw.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    optimizers.zero_grad()
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    return TrainingState(config=config, world=world, model=raw, optimizers=optimizers)


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_ms(seconds: Sequence[float], less: Sequence[float] | None = None) -> str:
    """Return the median in ms, minus that of `less`."""
    return f"{1e3 * (statistics.median(seconds) - (statistics.median(less) if less else 0)):7.0f} ms"


if __name__ == "__main__":
    main()
