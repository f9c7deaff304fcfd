"""Start a run from the weights of a checkpoint (INIT_FROM): describe them for the plan, and load them.

python -m gpt2.checkpoint.initial CHECKPOINT...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.files import load_checkpoint, saved_weights, weights_sha256
from gpt2.model.base import LanguageModel
from kmatrix.errors import DataError, KmatrixError
from kmatrix.records.train_config import SAME_AS_INITIAL, TrainConfig


def describe(path: Path) -> dict[str, Any]:
    """Return the SHA-256 of a checkpoint's weights, and the settings that a run from them must share."""
    value = load_checkpoint(path)
    settings = {name: value["config"].get(name) for name in SAME_AS_INITIAL}
    return {"sha256": weights_sha256(unpadded(value)), **settings}


def unpadded(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint to evaluate, without the rows that pad the vocabulary."""
    rows = value["config"]["vocab_size"]
    return {name: weights[:rows] if is_table(name) else weights for name, weights in saved_weights(value).items()}


def is_table(name: str) -> bool:
    """Return whether a weight has a row per token, and so rows for the padding of the vocabulary."""
    return name in ("wte.weight", "lm_head.weight") or name.startswith("value_embeds.")


def initialize(model: LanguageModel, config: TrainConfig) -> None:
    """Load the weights of config.init_from. Raises DataError if they are not those that the run was planned with."""
    weights = unpadded(load_checkpoint(Path(config.init_from), next(model.parameters()).device))
    found = weights_sha256(weights)
    if found != config.init_sha256:
        raise DataError(
            f"the weights in {config.init_from} changed after the run was planned",
            why=f"hash {found[:12]}..., expected {config.init_sha256[:12]}...",
            hint="restore the file, or create a new matrix",
        )
    for name, own in model.state_dict().items():
        if is_table(name):  # padding rows keep their initial values: they are masked out of the loss
            weights[name] = torch.cat([weights[name], own[len(weights[name]) :]])
    model.load_state_dict(weights)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the descriptions of checkpoints as a JSON list, or the error of the first that cannot be used."""
    try:
        print(json.dumps([describe(Path(path)) for path in (sys.argv[1:] if argv is None else argv)]))
    except KmatrixError as error:
        print(json.dumps({"what": error.what, "why": error.why, "hint": error.hint}))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
