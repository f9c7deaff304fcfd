"""Activation checkpointing (Chen et al. 2016, arXiv:1604.06174): of whole blocks, or of what is cheap to recompute."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Operators whose results are kept with the scope "elementwise": matrix products and attention, which take the time.
# Norms, activations, residual additions and casts, which take the memory, are recomputed.
KEPT = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "mkldnn_linear", "_linear_pointwise")
ATTENTION = "_scaled_dot_product_"  # and the name of the kernel


def recomputed(block: nn.Module, scope: str, *arguments: object) -> Tensor:
    """Return the output of a block whose backward pass recomputes activations.

    scope: "blocks": everything, only the input of the block is kept; "elementwise": all but products and attention.
    """
    # use_reentrant=False: the variant that torch recommends. It also restores the random state, so recomputed dropout
    # masks are the same.
    options: dict[str, Any] = {"use_reentrant": False}
    if scope == "elementwise":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    output: Tensor = checkpoint(block, *arguments, **options)
    return output


def _policy(_: object, operator: Any, *arguments: object, **options: object) -> CheckpointPolicy:  # noqa: ARG001
    packet = getattr(operator, "overloadpacket", operator)
    name = getattr(packet, "__name__", "")
    kept = name in KEPT or name.startswith(ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
