"""Update a model with sharded and with unsharded optimizers on each rank. Run by test_sharded.py.

`python sharded_ranks.py FOLDER OPTIMIZER ...`, on each rank, writes FOLDER/<rank>.json: what is equal, per optimizer,
bit for bit, and the bytes of the states.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

from gpt2 import dist
from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import build_optimizers
from gpt2.optim.optimizers import Optimizers
from gpt2.optim.sharded import shard
from kmatrix.records.files import write_json
from kmatrix.shapes import ModelShape
from optim_factory import Settings, equal, run_steps

SHAPE = ModelShape(n_layer=3, n_head=2, n_embd=46, block_size=8, vocab_size=131)
STEPS = 6
MIXED = {"embedding_lr": 3e-3, "scalar_lr": 2e-3}  # more groups
SPAM = {"spam_interval": 4, "spam_warmup_steps": 2, "spam_theta": 1.5}


def weights(model: GPT) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def built(name: str, world: dist.World, stage: int) -> tuple[GPT, Optimizers]:
    settings = Settings(optimizer=name, learning_rate=1e-3, soap_frequency=3, **MIXED, **SPAM)
    model = GPT(SHAPE, seed=5)
    return model, shard(build_optimizers(settings, model), stage, world)


def sent_to_all(world: dist.World, value: Any) -> Any:
    """Return rank 0's value on every rank, as a checkpoint file would be read."""
    return dist.gather(world, value)[0]


def case(name: str, world: dist.World) -> dict[str, Any]:
    (plain_model, plain), (model, mine) = (built(name, world, stage) for stage in (0, 1))
    begun = sent_to_all(world, mine.state_dict())
    for model_, optimizers in ((plain_model, plain), (model, mine)):
        run_steps(model_, optimizers, STEPS)
    saved, half = sent_to_all(world, mine.state_dict()), weights(model)
    found: dict[str, Any] = {
        "no states at the start": equal(begun, built(name, world, 0)[1].state_dict()),
        "weights": equal(half, weights(plain_model)),
        "states": equal(saved, plain.state_dict()),
        "gradients left": sum(parameter.grad is not None for parameter in model.parameters()),
        "bytes": mine.state_bytes,
        "plain bytes": plain.state_bytes,
    }
    run_steps(plain_model, plain, STEPS, STEPS)
    for key, stage in (("sharded resumes", 1), ("plain resumes", 0)):
        other_model, other = built(name, world, stage)
        other_model.load_state_dict(half)
        other.load_state_dict(copy.deepcopy(saved))  # torch takes tensors of the same type and device as they are
        run_steps(other_model, other, STEPS, STEPS)
        found[key] = equal(weights(other_model), weights(plain_model))
    return found


def main(folder: Path, names: list[str]) -> None:
    rank, _, size, *_ = dist.environment()
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.World(rank=rank, size=size, device=torch.device("cpu"), backend="gloo")
    write_json(folder / f"{rank}.json", {name: case(name, world) for name in names})
    dist.finish(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
