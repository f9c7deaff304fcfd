"""Optimizer states sharded over the ranks: ZeRO, stage 1, on top of DDP, by whole tensors.

DDP averages the gradients on every rank as before. Each large tensor has an owner, which alone holds its states,
updates it, and sends the result to the others. So every optimizer works unchanged whose update of a tensor needs no
other tensor. Checkpoints have the states as one rank alone would save them.
Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed
from torch import nn

from gpt2.dist import World
from gpt2.optim.optimizers import Optimizers, each
from kmatrix.errors import ConfigError
from kmatrix.shapes import owners


class ShardedOptimizers(Optimizers):
    """Optimizers of which each rank has a share. All ranks call the same methods.

    state_dict returns the states of all ranks on rank 0, as copies in CPU memory, and none on the others.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer, world: World) -> None:
        """Divide optimizers that have not taken a step."""
        super().__init__(*optimizers)
        self.world = world
        self._groups = [[list(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self._all: list[nn.Parameter] = list(chain(*chain(*self._groups)))
        ranks = owners([parameter.numel() for parameter in self._all], world.size)
        # Alike on all ranks; tensors that every rank updates are not in it.
        self._owners = {p: rank for p, rank in zip(self._all, ranks, strict=True) if rank is not None}
        for optimizer in optimizers:  # states are made at the first step, so only for the share
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if self._has(parameter)]

    @property
    def sharded(self) -> bool:
        return True

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's share with the averaged gradients, and exchange the updated weights."""
        super().step()
        sent = [
            torch.distributed.broadcast(parameter.detach(), src=owner, async_op=True)
            for parameter, owner in self._owners.items()
        ]
        for work in sent:
            work.wait()

    def zero_grad(self) -> None:
        for parameter in self._all:  # the optimizers know only the share
            if self.keeps_gradients and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        found = []
        for optimizer, groups in zip(self.optimizers, self._groups, strict=True):
            states: dict[int, Any] = {}
            described, first = [], 0
            for saved, group in zip(optimizer.state_dict()["param_groups"], groups, strict=True):
                described.append({**saved, "params": list(range(first, first + len(group)))})
                for index, parameter in enumerate(group, first):
                    if state := self._collected(parameter, optimizer.state.get(parameter)):
                        states[index] = state
                first += len(group)
            found.append({"state": states, "param_groups": described})
        return {"optimizers": found if self.world.main else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's share of what `state_dict` or the unsharded optimizers have saved."""
        shares = []
        for groups, saved in zip(self._groups, state["optimizers"], strict=True):
            states: dict[int, Any] = {}
            described, first = [], 0
            for group, known in zip(groups, saved["param_groups"], strict=True):
                names = [name for p, name in zip(group, known["params"], strict=True) if self._has(p)]
                states |= {n: saved["state"][name] for n, name in enumerate(names, first) if name in saved["state"]}
                described.append({**known, "params": list(range(first, first + len(names)))})
                first += len(names)
            shares.append({"state": states, "param_groups": described})
        super().load_state_dict({"optimizers": shares})

    def _has(self, parameter: nn.Parameter) -> bool:
        return self._owners.get(parameter, self.world.rank) == self.world.rank

    def _collected(self, parameter: nn.Parameter, state: Any) -> Any:
        """Return the state of one parameter on rank 0, copied to the CPU; None on the other ranks. A collective."""
        owner, rank = self._owners.get(parameter, 0), self.world.rank
        if rank not in (0, owner):
            return None
        if owner == 0:
            return each(state, lambda tensor: tensor.detach().to("cpu", copy=True)) if rank == 0 else None
        # gloo does not send tensors of a GPU in every version.
        device = torch.device("cpu") if self.world.backend == "gloo" else self.world.device
        if rank == owner:
            held = each(state, lambda tensor: tensor.detach().to(device, copy=True))
            torch.distributed.send_object_list([each(held, lambda tensor: torch.empty_like(tensor, device="meta"))], 0)
            each(held, lambda tensor: torch.distributed.send(_bytes(tensor), 0))
            return None
        described: list[Any] = [None]
        torch.distributed.recv_object_list(described, owner)

        def received(item: torch.Tensor) -> torch.Tensor:
            tensor = torch.empty_like(item, device=device)
            torch.distributed.recv(_bytes(tensor), owner)
            return tensor.cpu()

        return each(described[0], received)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps, in the order of its memory, as a view (n,)."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def shard(optimizers: Optimizers, stage: int, world: World) -> Optimizers:
    """Return the optimizers with states sharded over the ranks if the stage is 1 and there are several ranks.

    Raises ConfigError for optimizers that average the weights.
    """
    if not stage or world.size == 1:
        return optimizers
    if optimizers.averages:
        raise ConfigError(
            "an optimizer that averages the weights cannot be sharded",
            why="a rank has the averages of its share only, and evaluates all of the model",
            hint="set ZERO_STAGE=0",
        )
    return ShardedOptimizers(*optimizers.optimizers, world=world)
