"""The layout of transformers' NanoChat: names of the weights and config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from kmatrix.errors import ConfigError
from kmatrix.shapes import MODEL_FIELDS, ROPE_BASE, ModelShape

# Ours -> transformers', inside of a block and outside.
IN_BLOCK = {
    "attn.c_q": "self_attn.q_proj",
    "attn.c_k": "self_attn.k_proj",
    "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
OUTSIDE = {"wte.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "weight_tying")
# Fields of nanochat's models that config.json has, and values of others that transformers' class computes.
GIVEN = (*SIZES, "arch", "n_kv_head", "rope_base", "logit_softcap")
FIXED = {"qk_scale": 1.0, "norm": "rms", "activation": "relu2"}


def nanochat_to_hugging_face(weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return the weights by transformers' names, without vocabulary padding."""
    found = {}
    for name, tensor in weights.items():
        if name in OUTSIDE:
            found[OUTSIDE[name]] = tensor[:vocab_size].clone()  # safetensors refuses views
        else:
            _, layer, part = name.removesuffix(".weight").split(".", 2)  # h.LAYER.PART.weight
            found[f"model.layers.{layer}.{IN_BLOCK[part]}.weight"] = tensor.clone()
    return found


def refuse_parts(shape: ModelShape, given: Collection[str], fixed: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field of a model is neither `given` in config.json, nor empty, nor as in `fixed`."""
    parts = {name: getattr(shape, name) for name in MODEL_FIELDS if name not in given}
    if other := [f"{name} is {part}" for name, part in parts.items() if part and part != fixed.get(name)]:
        raise ConfigError(
            f"transformers cannot compute this model of type {shape.arch!r}",
            why="; ".join(other),
            hint="export GPT-2 as published, or a model with the parts of nanochat2025 (docs/nanochat.md)",
        )


def nanochat_config(shape: ModelShape) -> dict[str, Any]:
    """Return config.json for a shape. Raises ConfigError if transformers' NanoChat cannot compute the model."""
    windowed = min(shape.windows) < shape.block_size
    refuse_parts(shape, GIVEN if windowed else (*GIVEN, "window_pattern"), FIXED)
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.n_embd,
        "intermediate_size": 4 * shape.n_embd,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.block_size,
        "hidden_act": "relu2",
        "attention_bias": False,
        "rms_norm_eps": torch.finfo(torch.float32).eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base or ROPE_BASE},
        "final_logit_softcapping": shape.logit_softcap or None,
        "tie_word_embeddings": False,
        "pad_token_id": None,  # transformers' default, token 1, would get no gradient
    }
