"""Before a run: what it will compute, and what it needs, in plain arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kmatrix.shapes import ModelShape

BYTES = 4  # weights, gradients and optimizer states are 32-bit
MOST_WARMUP = 0.25  # of a run's steps: more compares warm-ups, not optimizers

# Numbers that an optimizer keeps for each parameter of a matrix and for each other parameter.
STATES = {"sgd": (1, 1), "adam": (2, 2), "adamw": (2, 2), "muon": (1, 2), "adafactor": (0, 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known of a run before it starts.

    params: all, without padding.  tokens: of the whole run.  flops: of the whole run.
    state_mib: MiB of weights, gradients and optimizer states on each rank, None where the optimizer's states are not
    known; activations come on top.
    """

    params: int
    tokens: int
    flops: float
    state_mib: float | None


def forecast(shape: ModelShape, *, optimizer: str, tokens: int) -> Forecast:
    """Return what a run will compute and the least memory that it needs.

    Muon keeps one number for each parameter of the blocks' matrices and two for the rest (AdamW);
    Adafactor keeps rows and columns instead of matrices, which is next to nothing.
    """
    in_blocks = 12 * shape.n_layer * shape.n_embd * shape.n_embd
    mib = None
    if optimizer in STATES:
        matrix, other = STATES[optimizer]
        states = in_blocks * matrix + (shape.params - in_blocks) * other
        mib = BYTES * (2 * shape.params + states) / 2**20
    return Forecast(params=shape.params, tokens=tokens, flops=shape.flops_per_token * tokens, state_mib=mib)


def warnings(fields: Mapping[str, Any]) -> list[str]:
    """Return what is legal and probably not meant."""
    found = []
    warmup, steps = int(fields["warmup_steps"]), int(fields["max_iters"])
    if warmup > MOST_WARMUP * steps:
        found.append(f"warm-up takes {warmup} of {steps} steps: pass WARMUP_FRACTION=0.1, or the run compares warm-ups")
    return found
