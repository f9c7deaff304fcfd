"""GPT-2, numerically equal to the published model, fast on CPUs and GPUs.

Dimensions in comments: B sequences, T tokens, E width, H heads, D = E / H, V vocabulary; Q new tokens, K all tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpt2.model.attention import attention
from gpt2.model.base import Embedding, LanguageModel, Linear
from gpt2.model.cache import Cache, Layer
from kmatrix.shapes import ModelShape


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.n_head, self.dropout = shape.n_head, dropout
        self.c_attn = Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.c_proj = Linear(shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor, past: Layer | None = None) -> Tensor:
        b, t, e = x.shape  # (B, T, E)
        # One product for all three, in the order of the published c_attn: queries, keys, values.
        qkv = self.c_attn(x).view(b, t, 3, self.n_head, e // self.n_head)  # (B, T, 3, H, D)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        if past:
            # Not is_causal: it aligns the first query with the first key, and new queries are the last of K tokens.
            y = functional.scaled_dot_product_attention(q, *past.extend(k, v), attn_mask=past.mask)
        else:
            y = attention(q, k, v, dropout=dropout)
        # y: (B, H, T, D)
        y = self.c_proj(y.transpose(1, 2).reshape(b, t, e))  # (B, T, E)
        return functional.dropout(y, dropout) if dropout else y


class Mlp(nn.Module):
    """Two linear layers with GPT-2's GELU (tanh approximation) between them."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.c_fc = Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.c_proj = Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        # tanh: OpenAI's code uses this approximation, and its weights were trained with it.
        x = self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))  # (B, T, 4 E) -> (B, T, E)
        return functional.dropout(x, self.dropout) if self.dropout and self.training else x


class Block(nn.Module):
    """A transformer block: pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.n_embd, eps=1e-5, bias=shape.bias)  # the epsilon of OpenAI's code
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.n_embd, eps=1e-5, bias=shape.bias)
        self.mlp = Mlp(shape, dropout)

    def forward(self, x: Tensor, past: Layer | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), past)  # (B, T, E)
        added: Tensor = self.mlp(self.ln_2(x))
        return x + added


class GPT(LanguageModel):
    """GPT-2 (Radford et al. 2019). Parameter names are those of the published checkpoints.

    seed: decides the initial weights, which are the same on every device and for every vocab_multiple.
    dropout, options: see LanguageModel.
    """

    def __init__(self, shape: ModelShape, *, seed: int = 1337, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(shape, seed=seed, dropout=dropout, **options)
        self.wpe = Embedding(shape.block_size, shape.n_embd)
        self.h = nn.ModuleList(Block(shape, dropout) for _ in range(shape.n_layer))
        self.ln_f = nn.LayerNorm(shape.n_embd, eps=1e-5, bias=shape.bias)
        # Tied to the token embedding in GPT-2 (Press and Wolf 2017, arXiv:1608.05859)
        self.lm_head = None if shape.weight_tying else Linear(shape.n_embd, self.wte.num_embeddings, bias=False)
        self._draw_weights(torch.Generator().manual_seed(seed))
        self.select_fp8()

    @torch.no_grad()
    def extend(self, idx: Tensor, cache: Cache) -> Tensor:
        positions, layers = cache.append(idx.shape[1])
        x = self.wte(idx) + self.wpe(positions)  # (B, Q, E)
        for block, past in zip(self.h, layers, strict=True):
            x = block(x, past)  # (B, Q, E)
        # Only the last token predicts something new: the output layer would dominate the time of a long prompt.
        return self.logits(self.ln_f(x[:, -1])).float()  # (B, V)

    @property
    def head(self) -> Tensor:
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def residual_stream(self, idx: Tensor) -> Tensor:
        x = self.stream(self.wte(idx) + self.wpe.weight[: idx.shape[1]])  # (B, T, E)
        x = functional.dropout(x, self.dropout) if self.training and self.dropout else x
        for block in self.h:
            x = self.run_block(block, x)
        normed: Tensor = self.ln_f(x)  # GPT-2 adds this norm after the last block (Radford et al. 2019, section 2.3)
        return normed

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        """Initialize weights with N(0, 0.02), residual projections with N(0, 0.02 / sqrt(2 layers)), biases with 0.

        Source: GPT-2's section 2.3 and nanoGPT's model.py. Padding of the vocabulary is 0.
        """
        vocab = self.shape.vocab_size
        # Two projections per layer add to the residual stream; without this its variance would grow with depth.
        residual = 0.02 / math.sqrt(2 * self.shape.n_layer)
        # A generator on the CPU gives the same weights for every device; the order is that of construction.
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif name in ("wte.weight", "lm_head.weight"):
                # Padding draws no numbers, so all later weights are the same for every vocab_multiple.
                parameter[:vocab].normal_(0.0, 0.02, generator=generator)
                parameter[vocab:].zero_()
            elif parameter.ndim == 2:  # gains of layer norms have one dimension, and stay 1
                deviation = residual if name.endswith("c_proj.weight") else 0.02
                parameter.normal_(0.0, deviation, generator=generator)
