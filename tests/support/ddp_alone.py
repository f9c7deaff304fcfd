"""Print what rank 0 of many ranks would send with DDP, as JSON. `python ddp_alone.py RANKS`.

The other ranks do not exist: PyTorch's fake process group ends every collective at once. Buckets depend on the
parameters alone, so the model is real, and its context short.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from counted_graphs import backend
from factories import train_config
from gpt2 import dist
from gpt2.dist import World
from gpt2.model import compiled
from gpt2.model.gpt2 import GPT
from gpt2.steps import distributed
from kmatrix.shapes import ModelShape

SHAPE = ModelShape(n_layer=4, n_head=4, n_embd=512, block_size=16, vocab_size=4096)
CASES: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "compiled": {"compile": True, "compile_mode": "default"},
}


def case(options: dict[str, Any], world: World) -> dict[str, Any]:
    """Return the number of forward graphs and what is sent in the second step, in which DDP has its final buckets."""
    torch._dynamo.reset()
    config, graphs, sent = train_config(num_gpus=world.size, **options), [], []
    compiled.BACKEND = backend(graphs)
    model = GPT(SHAPE)
    inner = compiled.compile_model(model, config) if config.compile else model
    ddp = distributed(inner, config, world)

    def count(bucket: Any) -> Any:
        # Not the trainer's hook: the work of the fake group has no result.
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, lambda _, bucket: count(bucket))  # torch refuses annotations that are strings
    tokens = torch.zeros(1, SHAPE.block_size, dtype=torch.int64)
    for _ in range(2):
        sent.clear()
        ddp(tokens, tokens)[1].backward()
    forward = sum(graph["pass"] == "forward" for graph in graphs)
    return {"graphs": forward, "buckets": len(sent), "bytes": sum(sent)}


if __name__ == "__main__":
    size = int(sys.argv[1])
    torch.distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    rank = World(rank=0, local_rank=0, size=size, device=torch.device("cpu"), backend="fake")
    found: dict[str, Any] = {name: case(options, rank) for name, options in CASES.items()}
    print(json.dumps({**found, "params": GPT(SHAPE).params}))
    dist.exit_now(0)
