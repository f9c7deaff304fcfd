"""The random numbers of this process: GPT-2 as it stands needs none of them, a model or optimizer of one's own may."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from gpt2.dist import World


def gathered(world: World) -> list[dict[str, Any]]:
    """Return where every rank's generators stand, in the order of ranks; all ranks must call it."""
    mine = here(world)
    if world.size == 1:
        return [mine]
    states: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(states, mine)
    return states


def here(world: World) -> dict[str, Any]:
    """Return where this process's generators stand: PyTorch's, the GPU's, NumPy's and Python's own."""
    version, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state()
    cuda = world.device.type == "cuda"
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(world.device).cpu() if cuda else None,
        "numpy": {
            "key": torch.from_numpy(np.asarray(key).astype(np.int64)),
            "rest": [int(position), int(has_gauss), float(cached)],
        },
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }


def set_here(state: dict[str, Any], world: World) -> None:
    """Put this process's generators where they stood."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), world.device)
    position, has_gauss, cached = state["numpy"]["rest"]
    key = state["numpy"]["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, cached))
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
