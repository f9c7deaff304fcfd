"""The compiled model (torch.compile): one graph for training, one for evaluation, both of constant shapes."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import nn

from gpt2.optim.optimizers import Optimizers
from kmatrix.records.train_config import TrainConfig

CUDA_GRAPHS = ("reduce_overhead", "max_autotune")  # modes that replay a pass as a CUDA graph
BACKEND = "inductor"  # the compiler; tests that only count graphs take a faster one


def compile_model(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Return a module that computes the same as the model, with its parameters, compiled at the first call.

    Evaluation and training call it with micro-batches of one size (gpt2.evaluate fills up its last one): without
    `dynamic=False`, another size in evaluation would make the size symbolic in the graph of training, too.
    """
    # PyTorch's default cuts the graph at the borders of DDP's buckets, so that a bucket is sent while the backward
    # pass computes the next one. That costs what the compiler could have fused across the borders.
    torch._dynamo.config.optimize_ddp = False
    mode = (config.compile_mode or "default").replace("_", "-")
    options: dict[str, Any] = {} if BACKEND != "inductor" or mode == "default" else {"mode": mode}
    compiled: nn.Module = torch.compile(model, dynamic=False, backend=BACKEND, **options)  # type: ignore[assignment]
    return compiled


def begin_pass(config: TrainConfig) -> None:
    """Mark the start of a micro-batch: the memory of the outputs of the one before may be used again."""
    if config.compile_mode in CUDA_GRAPHS:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch has no type for it


def keep_gradients(model: nn.Module, optimizers: Optimizers, config: TrainConfig) -> None:
    """Give gradients memory of their own from the start, if the compile mode has CUDA graphs.

    Without it, the first backward pass of a step would leave them in the memory of its CUDA graph, which the next
    micro-batch overwrites.
    """
    if config.compile_mode in CUDA_GRAPHS:
        optimizers.keeps_gradients = True
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
