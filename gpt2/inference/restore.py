"""Restore the model and the tokenizer of a checkpoint for inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from gpt2.checkpoint.contents import saved_weights, shape_problem
from gpt2.checkpoint.files import damaged, load_checkpoint
from gpt2.data.tokenizer import Tokenizer, load
from gpt2.model.base import LanguageModel
from gpt2.model.precision import configure_precision
from gpt2.model.registry import MODELS
from kmatrix.errors import LaunchError
from kmatrix.records.decode import convert
from kmatrix.shapes import ModelShape


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

    On a GPU, a model trained in bfloat16 runs in bfloat16. Raises RecordError, LaunchError or DataError.
    """
    target = choose_device(device)
    value = load_checkpoint(path)
    config, model = value["config"], load_model(value, path)
    # Half the memory; the products were rounded to bfloat16 in training too. The CPU stays at 32 bits, because many
    # processors compute bfloat16 slowly.
    dtype = torch.bfloat16 if target.type == "cuda" and config.get("dtype") == "bf16" else torch.float32
    configure_precision(target.type, "fp32")
    folder = path.parent
    return Restored(
        model=model.to(target, dtype).eval(),
        tokenizer=load(config["tokenizer"], Path(config["data_path"])),
        # A file outside of a run directory has no run.
        name=folder.parent.name if folder.name == "checkpoints" else path.stem,
        step=value["step"],
    )


def load_model(value: Mapping[str, Any], path: Path) -> LanguageModel:
    """Return the model of a checkpoint with its weights. path: of the file, for the RecordError of a damaged one."""
    config, weights = value["config"], saved_weights(value)
    if config.get("arch") not in MODELS:
        raise damaged(path, f"unknown architecture {config.get('arch')!r}")
    # GPT-2's configuration has null for the fields of nanochat.
    given = {field.name: config.get(field.name) for field in fields(ModelShape)}
    shape = convert({name: one for name, one in given.items() if one is not None}, ModelShape, str(path))
    model = MODELS[config["arch"]](shape, vocab_multiple=config["vocab_multiple"])
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    why = shape_problem(weights, expected)
    if unknown := weights.keys() - expected.keys():
        why = f"the model has no {min(unknown)}"
    if why:
        raise damaged(path, why)
    model.load_state_dict(weights)
    return model


def choose_device(name: str) -> torch.device:
    """Return the device to run on. Raises LaunchError if this machine does not have it."""
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if name and name not in available:
        raise LaunchError(f"DEVICE={name} is not available", hint=f"pass DEVICE={' or DEVICE='.join(available)}")
    return torch.device(name or available[-1])
