"""Trace the peak memory of eager training steps on the double of an H100.

    python tests/support/fake_gpu_memory.py '[["124m", 32], ["124m", 32, 8192]]'

Each step is a model, its micro-batch and the rows of a chunk of the loss: -1, all of them, if it is left out.

A storage on the device counts from its making to its end, rounded up as by the caching allocator. Fragmentation, the
workspaces of cuBLAS and the context of the process are not included.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fake_cuda
import inductor_wrapper
from gpt2.model.gpt2 import GPT
from gpt2.model.precision import autocast
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape


class PeakCounter(TorchDispatchMode):
    """Counts the bytes of storages on the device, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.at = ""  # the operator after which the maximum was reached
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if body := fake_cuda.body_of(func):
            with self:
                return body(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self._count(leaf.untyped_storage(), str(func))
        return result

    def _count(self, storage: torch.UntypedStorage, name: str) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = inductor_wrapper.rounded(storage.nbytes())
        self.now += size
        if self.now > self.most:
            self.most, self.at = self.now, name
        self._alive[key] = weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._alive.pop(key, None)
        self.now -= size


def traced(name: str, batch: int, loss_chunk: int = -1) -> dict[str, Any]:
    """Return the peak in bytes of the second step, in which the states of the optimizer exist from its start."""
    started = time.perf_counter()
    layers, heads, width = NAMED[name]
    shape = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=GPT2_VOCAB)
    with fake_cuda.fake_h100(), FakeTensorMode(), PeakCounter() as peak:
        model = fake_cuda.to_gpu(GPT(shape, vocab_multiple=64, loss_chunk=loss_chunk))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            peak.most = peak.now
            step(model, optimizer, batch, shape.block_size)
    seconds = round(time.perf_counter() - started, 1)
    return {"model": name, "micro_batch": batch, "peak": peak.most, "at": peak.at, "seconds": seconds}


def step(model: GPT, optimizer: torch.optim.Optimizer, batch: int, context: int) -> None:
    """Train one step as the training loop does."""
    with autocast("cuda", "bf16"):
        _, loss = model(*fake_cuda.tokens(batch, context))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main(argv: list[str]) -> list[dict[str, Any]]:
    return [traced(*step) for step in json.loads(argv[0])]


if __name__ == "__main__":
    fake_cuda.run_program(main)
