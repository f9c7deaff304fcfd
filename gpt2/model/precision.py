"""The precision of matrix products, and which attention is faster in it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._inductor.config
import torch.utils.deterministic

# Measurements: docs/decisions/0003-attention-and-precision-on-the-cpu.md
CPU_MATMUL_MAX_TOKENS = 512  # for longer contexts SDPA is as fast and does not store probabilities


def configure_precision(device: str, dtype: str) -> str:
    """Set the precision of 32-bit matrix products in this process, and return a line for the log.

    On the CPU "medium" uses oneDNN, which is faster than the default. It is set only if its results are as accurate,
    and never on CPUs with AMX, where oneDNN would round the factors to bfloat16.
    """
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        products = "TF32"
    else:
        onednn = not has_amx() and _medium_is_exact()
        torch.set_float32_matmul_precision("medium" if onednn else "highest")
        products = "32-bit (oneDNN)" if onednn else "32-bit"
    activations = "bfloat16 autocast" if dtype == "bf16" else "32-bit activations"
    return f"Precision on {device}: {activations}, matrix products of 32-bit numbers in {products}"


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


@functools.cache
def has_amx() -> bool:
    """Return whether the CPU has AMX tiles, which "medium" would use for bfloat16. PyTorch reports it since 2.12."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities:
        return bool(capabilities.get("amx_bf16", False) or capabilities.get("amx_tile", False))
    try:  # older versions of PyTorch
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  (no path of ours)
            return any("amx_tile" in line.split() for line in file if line.startswith("flags"))
    except OSError:  # not Linux: the measurement of `_medium_is_exact` detects the rounding as well
        return False


def _medium_is_exact() -> bool:
    """Return whether "medium" keeps 32-bit accuracy on this CPU; bfloat16 factors would err by about 2e-3."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        generator = torch.Generator().manual_seed(0)  # its own: training must not depend on whether this ran
        a, b = (torch.randn(8, 256, 256, generator=generator) for _ in range(2))  # each (8, 256, 256)
        exact = a.double() @ b.double()
        # A batched and a plain product, because PyTorch has separate code for them.
        errors = ((a @ b - exact).norm() / exact.norm(), (a[0] @ b[0] - exact[0]).norm() / exact[0].norm())
        # 32-bit products err by 4e-7, bfloat16 factors by 2e-3: 1e-5 separates them on any CPU.
        return max(float(error) for error in errors) < 1e-5
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(device: str, dtype: str) -> AbstractContextManager[object]:
    """Return the context for a forward pass: bfloat16 autocast, or a null context for fp32."""
    return torch.autocast(device, torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


def attention_path(device: str, dtype: str, block_size: int, *, amx: bool = False) -> str:
    """Return the faster attention: "sdpa" (PyTorch's fused attention) or "matmul" (plain matrix products).

    dtype: "fp32" or "bf16".  block_size: tokens per sequence.  amx: the CPU has AMX tiles, so 32-bit products are not
    computed by oneDNN, which slows SDPA down.
    """
    if device == "cpu" and dtype == "fp32" and amx:
        return "sdpa"
    # SDPA never stores the T x T probabilities, so its memory decides once the two are equally fast.
    if device == "cpu" and dtype in ("fp32", "bf16"):
        return "matmul" if block_size <= CPU_MATMUL_MAX_TOKENS else "sdpa"
    return "sdpa"
