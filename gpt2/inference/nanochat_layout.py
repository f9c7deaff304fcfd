"""The layout of transformers' NanoChat: names of the weights and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kmatrix.errors import ConfigError
from kmatrix.shapes import ROPE_BASE, ModelShape

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
# Values of a shape that transformers' class computes; with others there is no layout.
FIXED = {
    **dict.fromkeys(("value_embeddings", "smear", "backout", "residual_scales"), False),
    **{"qk_scale": 1.0, "norm": "rms", "activation": "relu2"},
}


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


def nanochat_config(shape: ModelShape) -> dict[str, Any]:
    """Return config.json for a shape. Raises ConfigError if transformers' NanoChat cannot compute the model."""
    parts = {name: getattr(shape, name) for name in FIXED}
    other = [f"{name} is {part}" for name, part in parts.items() if part not in (None, FIXED[name])]
    if min(shape.windows) < shape.block_size:
        other.append(f"window_pattern is {shape.window_pattern}")
    if other:
        raise ConfigError(
            f"transformers' NanoChat cannot compute this model of type {shape.arch!r}",
            why="; ".join(other),
            hint="only models with the parts of nanochat2025 can be exported (docs/nanochat.md)",
        )
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
