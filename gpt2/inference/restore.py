"""Restore the model and the tokenizer of a checkpoint for inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch

from gpt2.checkpoint.contents import layers_of, saved_weights, shape_problem
from gpt2.checkpoint.files import damaged, load_checkpoint
from gpt2.data.tokenizer import Tokenizer, load
from gpt2.model.base import LanguageModel
from gpt2.model.precision import configure_precision
from gpt2.model.registry import MODELS
from kmatrix.errors import LaunchError, RecordError
from kmatrix.shapes import ModelShape, padded

FIELDS: dict[str, type] = get_type_hints(ModelShape)
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "vocab_multiple")  # at least 1
DEVICES = ("cpu", "cuda")
LARGEST_SIZE = 2**31 - 1  # of a dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A model in evaluation mode, with its tokenizer."""

    model: LanguageModel
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
    config, model = value["config"], load_model(value, path)
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


def load_model(value: Mapping[str, Any], path: Path) -> LanguageModel:
    """Return the model of a checkpoint with its weights. path: of the file, for the RecordError of a damaged one."""
    config, weights = value["config"], saved_weights(value)
    shape = shape_of(config, path)
    # Before the model is made: a damaged configuration may describe one that no machine can hold.
    rows = padded(shape.vocab_size, config["vocab_multiple"])
    tables = {"wte.weight": (rows, shape.n_embd)}
    if not shape.is_nanochat:
        tables["wpe.weight"] = (shape.block_size, shape.n_embd)
    why = shape_problem(weights, tables)
    if (layers := layers_of(weights)) != shape.n_layer:
        why = why or f"weights of {layers} layers, the configuration has n_layer {shape.n_layer}"
    if why:
        raise damaged(path, why)
    model = build(config, path)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    unknown = min(weights.keys() - expected.keys(), default=None)
    if why := shape_problem(weights, expected) or (f"{unknown[:80]} is not a weight of the model" if unknown else ""):
        raise damaged(path, why)
    model.load_state_dict(weights)
    return model


def shape_of(config: Mapping[str, Any], path: Path) -> ModelShape:
    """Return the sizes and parts in a checkpoint's configuration. Raises RecordError if they are impossible."""
    if config.get("arch") not in MODELS:
        raise RecordError(
            f"the configuration in {path} is not supported by this trainer",
            why=f"'arch' is {str(config.get('arch'))[:40]!r}",
            hint="use the trainer that wrote it",
        )
    # A checkpoint may come from an import, so each field is checked before a shape is made of them.
    given = {name: config[name] for name in FIELDS if config.get(name) is not None}
    for name, value in {**given, "vocab_multiple": config.get("vocab_multiple")}.items():
        out_of_range = type(value) is int and not int(name in SIZES) <= value <= LARGEST_SIZE
        if type(value) is not FIELDS.get(name, int) or out_of_range:
            raise damaged(path, f"{name} is {str(value)[:40]}")
    try:
        return ModelShape(**given)
    except (TypeError, ValueError) as error:
        raise damaged(path, str(error)) from None


def build(config: Mapping[str, Any], path: Path) -> LanguageModel:
    """Return an untrained model with the shape of a checkpoint's configuration."""
    return MODELS[config["arch"]](shape_of(config, path), vocab_multiple=config["vocab_multiple"])


def choose_device(name: str) -> torch.device:
    """Return the device to run on."""
    if name and name not in DEVICES:
        raise LaunchError(f"invalid DEVICE={name}", hint=f"pass one of {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise LaunchError("DEVICE=cuda, but PyTorch finds no GPU", hint="pass DEVICE=cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")
