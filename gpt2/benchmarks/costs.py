"""The cost of tokens, and of text as nanochat counts it for its bits per byte.

Dimensions in comments: R rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target, in nats: (R, T), from logits (R, T, V) and targets (R, T)."""
    # cross_entropy expects the classes in dimension 1: (R, V, T)
    return functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")


def text_costs(losses: Tensor, targets: Tensor, token_bytes: Tensor) -> Tensor:
    """Return (2,), float64: the nats of all targets that are text, and their UTF-8 bytes.

    losses: nats, (R, T).  targets: (R, T); negative ones are ignored.  token_bytes: (V,); 0: a special token, whose
    nats do not count (evaluate_bpb in nanochat's loss_eval.py, commit 92d63d4).
    """
    sizes = torch.where(targets >= 0, token_bytes[targets.clamp(min=0)], 0)
    return torch.stack([losses.double()[sizes > 0].sum(), sizes.sum().double()])
