"""Before a run: what it will compute, and what it needs, in plain arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kmatrix.shapes import ModelShape

BYTES = 4  # weights, gradients and optimizer states are 32-bit
FEWEST_CHANGES = 5  # of the masks, below which pruning is a blow and no ramp
MOST_WARMUP = 0.25  # of a run's steps: more compares warm-ups, not optimizers

# Numbers that an optimizer keeps for each parameter of a matrix in a block and for each other parameter.
STATES = {
    "sgd": (1, 1),
    "adam": (2, 2),
    "adamw": (2, 2),
    "adamwadv": (3, 3),
    "adamwspam": (2, 2),
    "adamwprune": (2, 2),
    "muon": (1, 2),
    "adafactor": (0, 0),
    "lion": (1, 1),
    "adopt": (2, 2),
    "soap": (2, 2),
    "schedulefree": (2, 2),
}
SOAP_WIDEST = 10_000  # a side above this has no preconditioner


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known of a run before it starts.

    params: all, without padding.  tokens, flops: of the whole run, None where the data decide its length.
    state_mib: MiB of weights, gradients and optimizer states on each rank, None where the optimizer's states are not
    known; activations come on top.
    """

    params: int
    tokens: int | None
    flops: float | None
    state_mib: float | None


def forecast(shape: ModelShape, fields: Mapping[str, Any], *, tokens: int | None) -> Forecast:
    """Return what a run will compute and the least memory that it needs. fields: the trainer's, by their names."""
    kept = states(shape, fields)
    if kept is not None:
        kept += masks(shape, fields)
    mib = None if kept is None else BYTES * (2 * shape.params + kept) / 2**20
    flops = None if tokens is None else shape.flops_per_token * tokens
    return Forecast(params=shape.params, tokens=tokens, flops=flops, state_mib=mib)


def states(shape: ModelShape, fields: Mapping[str, Any]) -> float | None:
    """Return the numbers of 32 bits that the optimizer keeps, None where its kind is not known.

    Muon keeps one number for each parameter of the blocks' matrices and two for the rest (AdamW);
    Adafactor keeps rows and columns instead of matrices, which is next to nothing.
    SOAP keeps two square matrices, and the eigenvectors of each, beside every matrix.
    """
    optimizer = str(fields["optimizer"])
    if optimizer not in STATES:
        return None
    matrix, other = (count + bool(fields.get("amsgrad")) for count in STATES[optimizer])
    in_blocks = 12 * shape.n_layer * shape.n_embd * shape.n_embd
    squares = _squares(shape) if optimizer == "soap" else 0
    return in_blocks * matrix + (shape.params - in_blocks) * other + squares


def masks(shape: ModelShape, fields: Mapping[str, Any]) -> float:
    """Return what pruning keeps, in numbers of 32 bits: a byte for each weight in a block, and movement's scores."""
    kept = {"none": 0.0, "movement": 1.25}.get(str(fields.get("pruning", "none")), 0.25)
    return 12 * shape.n_layer * shape.n_embd * shape.n_embd * kept


def _squares(shape: ModelShape) -> int:
    """Return the numbers in SOAP's preconditioners and their eigenvectors."""
    d = shape.n_embd
    block = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
    tables = [(shape.vocab_size, d)] * (1 if shape.weight_tying else 2) + [(shape.block_size, d)]
    sides = [side for pair in block * shape.n_layer + tables for side in pair]
    return 2 * sum(side * side for side in sides if side <= SOAP_WIDEST)


def warnings(fields: Mapping[str, Any]) -> list[str]:
    """Return what is legal and probably not meant."""
    found = []
    warmup, steps = fields["warmup_steps"], fields["max_iters"]
    if warmup is not None and steps is not None and warmup > MOST_WARMUP * steps:
        found.append(f"warm-up takes {warmup} of {steps} steps: pass WARMUP_FRACTION=0.1, or the run compares warm-ups")
    if fields.get("pruning", "none") != "none" and steps is not None:
        ramp = round(fields["pruning_ramp_end"] * steps) - round(fields["pruning_warmup"] * steps)
        every = int(fields["pruning_frequency"])
        if (changes := -(-ramp // every)) < FEWEST_CHANGES:
            found.append(
                f"pruning reaches its target in {changes} change{'s' if changes > 1 else ''} of the masks, every "
                f"{every} of {ramp} steps: PRUNING_FREQUENCY={max(1, ramp // (2 * FEWEST_CHANGES))} makes a ramp of it"
            )
    return found
