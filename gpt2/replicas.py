"""One model on several ranks: gradients averaged over them once a step, and clipped."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gpt2.config import TrainConfig
from gpt2.dist import World
from gpt2.steps import Steps

# The model's buffers are constants, and need not be sent at each forward pass; newer PyTorch has another name for it.
NEW_NAME = "forward_sync_buffers"
KNOWN = inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS: dict[str, Any] = {NEW_NAME if NEW_NAME in KNOWN else "broadcast_buffers": False}


def distributed(model: nn.Module, config: TrainConfig, world: World) -> DistributedDataParallel:
    """Return the model with its gradients averaged over the ranks after each step's last micro-batch."""
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **NO_BUFFERS,
        find_unused_parameters=bool(config.ddp_find_unused_params),
    )


def average_gradients(steps: Steps, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket of gradients over the ranks, as DDP does by itself; with the last, this rank has computed."""
    if bucket.is_last():
        steps.computed()
    return allreduce_hook(torch.distributed.group.WORLD, bucket)  # type: ignore[arg-type]  # None means the world


def clip(parameters: list[nn.Parameter], most: float) -> torch.Tensor:
    """Scale the gradients down to a norm of `most` (0: leave them), and return the norm they had."""
    if most:
        return nn.utils.clip_grad_norm_(parameters, most)
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
