"""Which of PyTorch's fused attention kernels a GPU takes."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

from gpt2.model.attention import fused_attention
from kmatrix.errors import ConfigError
from kmatrix.records.train_config import TrainConfig

KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
FLASH_PACKAGES = {"flash3": "FA3", "flash4": "FA4"}  # PyTorch's names of separately installed kernels
OTHERS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CHOSEN = ExitStack()  # a choice holds as long as the process: it is never closed


def choose_kernel(config: TrainConfig, device: torch.device) -> None:
    """Set the kernel of causal attention in this process. Raises ConfigError if it cannot compute the model here."""
    wanted = config.attention_kernel or "auto"
    if device.type != "cuda" or wanted == "auto":
        return
    first = KERNELS["flash" if wanted in FLASH_PACKAGES else wanted]
    try:
        if package := FLASH_PACKAGES.get(wanted):
            activate_flash_attention_impl(package)
        try_kernel(first, config, device)
    except (ImportError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"attention kernel {wanted} cannot be used",
            why=str(error).split("\n")[0] or type(error).__name__,
            hint="install the package of the kernel for this GPU, or set ATTENTION_KERNEL=auto",
        ) from error
    # The others stay allowed, for attention with a mask: windows, and texts that are generated.
    _CHOSEN.enter_context(sdpa_kernel(list(dict.fromkeys([first, *OTHERS])), set_priority=True))


def try_kernel(kernel: SDPBackend, config: TrainConfig, device: torch.device) -> None:
    """Compute causal attention of the model's sizes and its gradients. Raises RuntimeError if the kernel cannot."""
    shape, dtype = config.shape, torch.bfloat16 if config.dtype == "bf16" else torch.float32
    heads = shape.n_head, shape.kv_heads, shape.kv_heads
    q, k, v = (
        torch.zeros(1, count, shape.block_size, shape.head_dim, dtype=dtype, device=device, requires_grad=True)
        for count in heads
    )
    with sdpa_kernel(kernel):
        out = fused_attention(q, k, v, dropout=config.dropout)
    torch.autograd.grad(out.sum(), (q, k, v))
