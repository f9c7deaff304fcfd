"""Which of PyTorch's fused attention kernels runs on this device: chosen, and found out for the record.

Dimensions in comments: T tokens, H heads of queries, K heads of keys and values, D channels per head.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

from gpt2.model.attention import ROWS
from gpt2.model.base import LanguageModel
from gpt2.model.precision import autocast
from kmatrix.errors import ConfigError
from kmatrix.records.train_config import TrainConfig

FLASH_PACKAGES = {"flash3": "FA3", "flash4": "FA4"}  # PyTorch's names of separately installed kernels
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    **dict.fromkeys(FLASH_PACKAGES, SDPBackend.FLASH_ATTENTION),
}
NAMES = {
    **{SDPBackend.CUDNN_ATTENTION: "cudnn", SDPBackend.FLASH_ATTENTION: "flash"},
    **{SDPBackend.EFFICIENT_ATTENTION: "efficient", SDPBackend.MATH: "math"},
}
_CHOSEN = ExitStack()  # a choice holds as long as the process: it is never closed


def choose_kernel(config: TrainConfig, device: torch.device) -> None:
    """Set the kernel that this process prefers, and allow the others. Raises ConfigError if it is not installed."""
    wanted = config.attention_kernel or "auto"
    if device.type != "cuda" or wanted == "auto":
        return
    if package := FLASH_PACKAGES.get(wanted):
        try:
            activate_flash_attention_impl(package)
        except (ImportError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"attention kernel {wanted} cannot be used",
                why=str(error).split("\n")[0] or type(error).__name__,
                hint="install the package of the kernel for this GPU, or set ATTENTION_KERNEL=auto",
            ) from error
    first = KERNELS[wanted]
    others = [backend for backend in NAMES if backend is not first]  # for windows, which not every kernel computes
    _CHOSEN.enter_context(sdpa_kernel([first, *others], set_priority=True))


def kernels_of(model: LanguageModel, config: TrainConfig, device: torch.device) -> dict[str, str]:
    """Return the kernel of each kind of attention in the model: "causal", and "window" if layers have windows.

    "matmul": plain products instead of a kernel. Raises ConfigError if the configured kernel cannot compute causal
    attention of these sizes on this device.
    """
    shape = config.shape
    with torch.no_grad(), autocast(device.type, config.dtype):
        path = model.attention_path(torch.empty(1, shape.block_size, dtype=torch.int64, device=device))
    has_windows = min(shape.windows) < shape.block_size - 1
    kinds = ["causal", *(["window"] if has_windows else [])]
    if path == "matmul":
        return dict.fromkeys(kinds, path)
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    sizes = (1, shape.n_head, shape.block_size, shape.head_dim), (1, shape.kv_heads, shape.block_size, shape.head_dim)
    # Gradients count: some kernels have no backward pass for some sizes.
    q, k, v = (torch.empty(sizes[kv > 0], dtype=dtype, device=device, requires_grad=True) for kv in range(3))
    grouped = shape.kv_heads != shape.n_head
    found = {"causal": _chosen(q, k, v, None, config.dropout, grouped=grouped)}
    if has_windows:  # gpt2.model.attention.windowed_attention: blocks of queries with a mask
        rows = min(ROWS, shape.block_size)
        keys = min(min(shape.windows) + rows, shape.block_size)
        mask = torch.zeros(rows, keys, dtype=dtype, device=device)
        found["window"] = _chosen(q[:, :, :rows], k[:, :, :keys], v[:, :, :keys], mask, 0.0, grouped=grouped)
    wanted = config.attention_kernel or "auto"
    if device.type == "cuda" and wanted != "auto":
        if found["causal"] != NAMES[KERNELS[wanted]]:
            raise ConfigError(
                f"attention kernel {wanted} cannot compute this model on this GPU",
                why=f"PyTorch would take {found['causal']} for {shape.head_dim} channels per head in {config.dtype}",
                hint="set ATTENTION_KERNEL=auto",
            )
        found["causal"] = wanted  # which package the flash kernel comes from
    return found


def _chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    *,
    grouped: bool,
) -> str:
    """Return the name of the kernel that PyTorch takes for q (1, H, T, D), k and v (1, K, T, D)."""
    # Private, but the only way to learn it: PyTorch's own tests use it.
    number = torch._fused_sdp_choice(q, k, v, mask, dropout, mask is None, enable_gqa=grouped)
    return NAMES.get(SDPBackend(number), "math")
