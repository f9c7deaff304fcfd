"""The precision of a forward pass, and equal bits."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager

import torch
import torch._inductor.config
import torch.utils.deterministic

from kmatrix.shapes import cpu_info


def configure_precision(device: str) -> None:
    """Set the products of 32-bit matrices: TF32 on GPUs, which TRAINER_ENV=NVIDIA_TF32_OVERRIDE=0 disables.

    On the CPU "medium" is oneDNN in 32 bits, whose threads wait less for each other than MKL's if the cores are shared.
    With AMX it would round to bfloat16. Measurements: docs/decisions/0003-attention-and-precision-on-the-cpu.md
    """
    rounds = "amx_bf16" in cpu_info()  # PyTorch 2.9 does not tell
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest" if rounds else "medium")


def configure_determinism(*, deterministic: bool) -> None:
    """Make equal runs equal bit for bit on GPUs, at a price in time. On the CPU they are in any case.

    Without it, the gradient of the embedding and the backward pass of fused attention add in an order that varies.
    """
    if not deterministic:
        return
    # Before the first product, which makes cuBLAS's workspace; the size is that of its documentation.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # A check for programs that read such memory, which takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch._inductor.config.deterministic = True  # choices of the compiler do not depend on measured times


def autocast(device: str, dtype: str) -> AbstractContextManager[object]:
    """Return the context for a forward pass: bfloat16 autocast, or a null context for fp32."""
    return torch.autocast(device, torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()
