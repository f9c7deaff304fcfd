"""Compare the weights of two checkpoints of one configuration, and print the comparison as one JSON object.

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

from gpt2.checkpoint import bytes_of, load_checkpoint, weights_sha256
from kmatrix.output import run_program


def main(argv: Sequence[str] | None = None) -> int:
    was, now = (load_checkpoint(Path(path))["model"] for path in (sys.argv[1:] if argv is None else argv))
    print(json.dumps(compare(was, now)))
    return 0


def compare(was: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return equality, number of tensors and of differing ones, SHA-256 of the second, and the largest difference.

    by: the difference; None if there is none, or it is not finite.
    """
    differences = {
        name: (was[name].double() - now[name].double()).abs().max().item()
        for name in now
        if not torch.equal(bytes_of(was[name]), bytes_of(now[name]))  # bytes, because NaN != NaN and 0.0 == -0.0
    }
    most = max(differences, key=lambda name: differences[name], default=None)
    return {
        "equal": not differences,
        "tensors": len(now),
        "differing": len(differences),
        "sha256": weights_sha256(now),
        "most": most,
        "by": differences[most] if most and math.isfinite(differences[most]) else None,  # JSON has no infinity
    }


if __name__ == "__main__":
    sys.exit(run_program(main))
