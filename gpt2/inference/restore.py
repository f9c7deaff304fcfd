"""Restore the model and the tokenizer of a checkpoint for inference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.files import load_checkpoint
from gpt2.checkpoint.state import saved_weights
from gpt2.data.tokenizer import Tokenizer, load
from gpt2.model import GPT, MODELS, configure_precision
from kmatrix.errors import LaunchError, RecordError
from kmatrix.records.train_config import typed
from kmatrix.shapes import ModelShape

SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "weight_tying")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A model in evaluation mode, with its tokenizer."""

    model: GPT
    tokenizer: Tokenizer
    path: Path  # of the checkpoint
    run_id: str
    step: int  # updates

    @property
    def name(self) -> str:
        """The model's name: its run's, if the checkpoint is in a run directory, else the file's."""
        folder = self.path.parent
        return folder.parent.name if folder.name == "checkpoints" else self.path.stem


def restore(path: Path, device: str = "") -> Restored:
    """Return the model of a checkpoint. device: cpu or cuda; "": cuda if available.

    On a GPU, a model trained in bfloat16 runs in bfloat16. Raises RecordError, LaunchError or DataError.
    """
    target = choose_device(device)
    value = load_checkpoint(path)
    config = value["config"]
    model = build(config, path)
    model.load_state_dict(saved_weights(value))
    # Half the memory; the products were rounded to bfloat16 in training too. The CPU stays at 32 bits, because many
    # processors compute bfloat16 slowly.
    dtype = torch.bfloat16 if target.type == "cuda" and config.get("dtype") == "bf16" else torch.float32
    configure_precision(target.type, "fp32", tf32=bool(config.get("tf32", False)))
    return Restored(
        model=model.to(target, dtype).eval(),
        tokenizer=load(str(config.get("tokenizer")), Path(str(config.get("data_path")))),
        path=path,
        run_id=str(value["run_id"]),
        step=int(value["step"]),
    )


def build(config: dict[str, Any], path: Path) -> GPT:
    """Return an untrained model with the shape of a checkpoint's configuration."""
    # A checkpoint may come from another version or an import, so each field is checked before a shape is made of them.
    try:
        kinds = {name: bool if name in ("bias", "weight_tying") else int for name in SHAPE}
        shape = ModelShape(**{name: typed(name, config[name], (kind,)) for name, kind in kinds.items()})
        return MODELS[config["arch"]](shape, vocab_multiple=config["vocab_multiple"])
    except KeyError as missing:
        raise RecordError(
            f"the configuration in {path} is not supported by this trainer",
            why=f"{missing} is missing or unknown",
            hint="use the trainer that wrote it",
        ) from None


def choose_device(name: str) -> torch.device:
    """Return the device to run on."""
    if name and name not in DEVICES:
        raise LaunchError(f"invalid DEVICE={name}", hint=f"pass one of {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise LaunchError("DEVICE=cuda, but PyTorch finds no GPU", hint="pass DEVICE=cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")
