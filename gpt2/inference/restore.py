"""Restore the model and the tokenizer of a checkpoint for inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint import load_checkpoint, saved_weights
from gpt2.data.tokenizer import Tokenizer, load
from gpt2.model.base import LanguageModel
from gpt2.model.precision import configure_precision
from gpt2.model.registry import MODELS
from kmatrix.errors import LaunchError
from kmatrix.records.checkpoints import damaged
from kmatrix.shapes import MODEL_FIELDS, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A model in evaluation mode, with its tokenizer."""

    model: LanguageModel
    tokenizer: Tokenizer
    name: str  # of the run
    step: int  # updates

    @property
    def description(self) -> str:
        return f"{self.name}, step {self.step}, on {next(self.model.parameters()).device.type}"


def restore(path: Path, device: str = "") -> Restored:
    """Return the model of a checkpoint. device: cpu or cuda; "": cuda if available.

    On a GPU, a model trained in bfloat16 runs in bfloat16: half the memory, and products were rounded so in training
    too. Raises RecordError, LaunchError or DataError.
    """
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    kind = device or available[-1]
    if kind not in available:
        raise LaunchError(f"DEVICE={kind} is not available", hint=f"pass DEVICE={' or DEVICE='.join(available)}")
    value = load_checkpoint(path)
    config, model = value["config"], load_model(value, path)
    configure_precision(kind)
    return Restored(
        model=model.to(kind, torch.bfloat16 if kind == "cuda" and config.get("dtype") == "bf16" else None).eval(),
        tokenizer=load(config["tokenizer"], Path(config["data_path"])),
        # A file outside of a run directory has no run.
        name=path.parent.parent.name if path.parent.name == "checkpoints" else path.stem,
        step=value["step"],
    )


def load_model(value: Mapping[str, Any], path: Path) -> LanguageModel:
    """Return the model of a checkpoint with its weights. path: of the file, for the RecordError of a damaged one."""
    config = value["config"]
    try:
        shape = ModelShape(**{name: config[name] for name in MODEL_FIELDS if name in config})
        model = MODELS[config["arch"]](shape, vocab_multiple=config["vocab_multiple"])
        model.load_state_dict(saved_weights(value))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path, " ".join(f"{type(error).__name__}: {error}".split())) from None
    return model
