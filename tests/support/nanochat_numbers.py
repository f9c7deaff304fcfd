"""Numbers of the public nanochat code (tests/fixtures/nanochat), and the weights and tokens that they belong to.

The files were made by running https://github.com/karpathy/nanochat at commits 92d63d4 ("now") and 2874eda ("classic")
on a CPU in 32 bits. Weights and tokens are functions of their names, so no weights are stored: a tensor is
center + half (2u - 1), u from PCG64 seeded with the first 8 bytes (little-endian) of sha256("1337:" + name).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpt2.model.nanochat import NanoChat
from kmatrix.shapes import ModelShape

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "nanochat"
VARIANTS = ("now-tiny", "now-gqa", "now-d4", "classic-tiny", "classic-gqa", "classic-d4")
EXACT_ROTARY = ("classic-rope32-tiny", "classic-rope32-gqa")  # tables that are not rounded to bfloat16
PARTS = {
    "value_embeddings": True,
    "smear": True,
    "backout": True,
    "residual_scales": True,
    "window_pattern": "SSSL",
    "qk_scale": 1.2,
    "rope_base": 100_000.0,
}
CENTERS = {  # (center, half width) by name; all others follow from the shape
    "resid_lambdas": (1.0, 0.2),
    "x0_lambdas": (0.2, 0.2),
    "smear_lambda": (0.5, 0.1),
    "backout_lambda": (0.2, 0.05),
    "transformer.wte.weight": (0.0, 3**0.5),
}


def read(name: str) -> dict[str, Any]:
    """Return the numbers of one file."""
    numbers: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    return numbers


def words(name: str, count: int) -> np.ndarray:
    """Return 64-bit words that depend on the name only."""
    digest = hashlib.sha256(f"1337:{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:8], "little")).random_raw(count)


def tensor(name: str, shape: tuple[int, ...], center: float, half: float) -> Tensor:
    """Return a 32-bit tensor of uniform numbers in center +- half."""
    unit = (words(name, int(np.prod(shape))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy((center + half * (2.0 * unit - 1.0)).astype(np.float32).reshape(shape))


def tokens(name: str, shape: tuple[int, ...], vocab: int) -> Tensor:
    """Return random tokens."""
    return torch.from_numpy((words(name, int(np.prod(shape))) % np.uint64(vocab)).astype(np.int64).reshape(shape))


def batch(step: int, numbers: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B, T) of a step."""
    found = tokens(f"batch:{step}", (numbers["batch"], numbers["length"] + 1), numbers["config"]["vocab_size"])
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def public_name(name: str) -> str:
    """Return the public code's name of one of our parameters."""
    return f"transformer.{name}" if name.startswith(("wte.", "h.")) else name


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return center and half width of a tensor by its public name."""
    if name in CENTERS:
        return CENTERS[name]
    if name.startswith("value_embeds."):
        return 0.0, 0.5 * 3**0.5
    if name == "lm_head.weight":
        return 0.0, 4.0 * (3 / shape[1]) ** 0.5  # logits that the soft-cap bends
    if name.endswith(("ve_gate.weight", "smear_gate.weight")):
        return 0.0, 1.0
    return 0.0, (3 / shape[1]) ** 0.5


def shape_of(numbers: dict[str, Any]) -> ModelShape:
    """Return the shape of the model that the numbers belong to."""
    config, now = numbers["config"], numbers["variant"] == "now"
    sizes = {name: config[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    return ModelShape(
        arch="nanochat" if now else "nanochat2025",
        n_kv_head=config["n_kv_head"],
        block_size=config["sequence_len"],
        bias=False,
        weight_tying=False,
        logit_softcap=15.0,
        **sizes,
        **(PARTS if now else {}),
    )


def model_of(numbers: dict[str, Any], **options: Any) -> NanoChat:
    """Return the model with the weights that the numbers belong to."""
    model = NanoChat(shape_of(numbers), vocab_multiple=64, **options)
    fill(model)
    if numbers["variant"] == "classic":  # the public code of 2025 rounds its tables on every device
        model.cos, model.sin = (table.bfloat16().float() for table in (model.cos, model.sin))
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give every parameter the weights of its name."""
    for name, parameter in model.named_parameters():
        public, shape = public_name(name), tuple(parameter.shape)
        parameter.copy_(tensor(public, shape, *spread(public, shape)))
