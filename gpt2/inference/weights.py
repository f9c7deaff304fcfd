"""Compare the weights of two checkpoints. Prints one JSON object: equality, SHA-256 and the largest difference.

python -m gpt2.inference.weights WAS.pt NOW.pt
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.contents import bytes_of, weights_sha256
from gpt2.checkpoint.files import load_checkpoint
from kmatrix.output import run_program

Weights = Mapping[str, torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    was, now = sys.argv[1:] if argv is None else argv
    print(json.dumps(compare(load_checkpoint(Path(was))["model"], load_checkpoint(Path(now))["model"])))
    return 0


def compare(was: Weights, now: Weights) -> dict[str, Any]:
    """Return equality, number of tensors and of differing ones, SHA-256 of the second, and the largest difference.

    by: the difference; None if a tensor is missing, not finite or of another shape.
    """
    differences = {name: _difference(was.get(name), now.get(name)) for name in sorted(was.keys() | now.keys())}
    differing = {name: by for name, by in differences.items() if by}
    most = max(differing, key=lambda name: differing[name], default=None)
    return {
        "equal": not differing,
        "tensors": len(differences),
        "differing": len(differing),
        "sha256": weights_sha256(now),
        "most": most,
        "by": differing[most] if most and math.isfinite(differing[most]) else None,  # JSON has no infinity
    }


def _difference(was: torch.Tensor | None, now: torch.Tensor | None) -> float:
    """Return the largest difference of two tensors; 0 only if they are equal bit for bit, inf if not comparable."""
    if was is None or now is None or was.shape != now.shape or was.dtype != now.dtype:
        return math.inf
    if torch.equal(bytes_of(was), bytes_of(now)):  # bytes, because NaN != NaN and 0.0 == -0.0
        return 0.0
    difference = (was.double() - now.double()).abs().max().item()
    return difference if difference > 0 else math.inf  # NaN, or a zero of another sign


if __name__ == "__main__":
    sys.exit(run_program(main))
