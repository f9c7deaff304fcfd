"""A checkpoint -> the model that was trained, with its tokenizer, ready to answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt2 import checkpoint
from gpt2.config import typed
from gpt2.model import GPT, MODELS, configure_precision
from gpt2.tokenizer import Tokenizer, load
from kmatrix.errors import LaunchError, RecordError
from kmatrix.shapes import ModelShape

SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "weight_tying")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A model in evaluation mode. step: updates behind its weights.  dtype: of the weights: 32 bits, or bfloat16."""

    model: GPT
    tokenizer: Tokenizer
    path: Path
    run_id: str
    step: int
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """What people call it: its run, where the checkpoint lies in a run's folder, else its own name."""
        folder = self.path.parent
        return folder.parent.name if folder.name == "checkpoints" else self.path.stem


def restore(path: Path, device: str = "") -> Restored:
    """Return the model of a checkpoint. device: cpu or cuda; empty for a GPU where there is one.

    On a GPU a model that was trained in bfloat16 answers in it. Raises RecordError, LaunchError or DataError.
    """
    place = choose_device(device)
    value = checkpoint.load(path)
    config = value["config"]
    model = build(config, path)
    model.load_state_dict(checkpoint.weights(value))
    dtype = torch.bfloat16 if place.type == "cuda" and config.get("dtype") == "bf16" else torch.float32
    configure_precision(place.type, "fp32", tf32=bool(config.get("tf32", False)))
    return Restored(
        model=model.to(place, dtype).eval(),
        tokenizer=load(str(config.get("tokenizer")), Path(str(config.get("data_path")))),
        path=path,
        run_id=str(value["run_id"]),
        step=int(value["step"]),
        config=config,
    )


def build(config: dict[str, Any], path: Path) -> GPT:
    """Return a model of the checkpoint's shape; of its configuration only what the shape needs is read."""
    try:
        kinds = {name: bool if name in ("bias", "weight_tying") else int for name in SHAPE}
        shape = ModelShape(**{name: typed(name, config[name], kind) for name, kind in kinds.items()})
        return MODELS[config["arch"]](shape, vocab_multiple=config["vocab_multiple"])
    except KeyError as missing:
        raise RecordError(
            f"the configuration in {path} does not fit this trainer",
            why=f"{missing} is missing or unknown",
            fix="use the trainer that wrote it",
        ) from None


def choose_device(asked: str) -> torch.device:
    """Return the device to answer on; where none is asked for, a GPU if there is one."""
    if asked and asked not in DEVICES:
        raise LaunchError(f"DEVICE={asked} is no device to answer on", fix=f"pass one of {', '.join(DEVICES)}")
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise LaunchError("DEVICE=cuda needs a GPU that PyTorch sees, and there is none", fix="pass DEVICE=cpu")
    return torch.device("cuda" if there and asked != "cpu" else "cpu")
