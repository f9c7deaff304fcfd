"""The models of nanochat: that of October 2025, and that of 2026 with its later parts, each part a switch of the shape.

The parts and their formulas are those of https://github.com/karpathy/nanochat (nanochat/gpt.py): commit 2874eda for
"nanochat2025", 92d63d4 for "nanochat"; tests compare losses, logits and gradients with numbers of both.

Dimensions in comments: B sequences, T tokens, E width, H heads of queries, K heads of keys and values, D = E / H,
V vocabulary; Q new tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpt2.model.attention import attention, fused_attention, window_mask
from gpt2.model.base import Embedding, LanguageModel, Linear
from gpt2.model.cache import Cache, Layer
from kmatrix.shapes import GATE_CHANNELS, ROPE_BASE, SMEAR_CHANNELS, ModelShape

EPSILON = torch.finfo(torch.float32).eps  # of every RMSNorm, also in bfloat16: the default of torch.nn.functional
GATE_FACTOR = 3.0  # bound of the gate of a value embedding
BACKOUT = 0.2  # initial share of the middle of the residual stream that is subtracted at its end


def rms_norm(x: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return functional.rms_norm(x, (x.shape[-1],), eps=EPSILON)


class RmsNorm(nn.Module):
    """RMSNorm without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x)


def norm_of(shape: ModelShape) -> nn.Module:
    """Return a norm of the residual stream, of the shape's kind."""
    return nn.LayerNorm(shape.n_embd, bias=False) if shape.norm == "layer" else RmsNorm()


def rotary_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding (Su et al. 2021, arXiv:2104.09864): each (T, D / 2)."""
    channels = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / ((shape.rope_base or ROPE_BASE) ** (channels / shape.head_dim))
    angles = torch.outer(torch.arange(shape.block_size, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., T, heads, D), rotated by its position in the planes of channel i and channel i + D / 2.

    cos, sin: (..., T, D / 2). By -angle: nanochat's direction, which only matters for weights from elsewhere.
    """
    cos, sin = (table[..., None, :].to(x.dtype) for table in (cos, sin))  # in the precision of the queries
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class NanoChatAttention(nn.Module):
    """Causal attention with rotary positions, normalized queries and keys, grouped queries and value embeddings."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.n_head, self.kv_heads, self.head_dim = shape.n_head, shape.kv_heads, shape.head_dim
        self.qk_scale = shape.qk_scale or 1.0
        kv_width = shape.kv_heads * shape.head_dim
        self.c_q = Linear(shape.n_embd, shape.n_embd, bias=False)
        self.c_k = Linear(shape.n_embd, kv_width, bias=False)
        self.c_v = Linear(shape.n_embd, kv_width, bias=False)
        self.c_proj = Linear(shape.n_embd, shape.n_embd, bias=False)
        has_gate = shape.has_value_embedding(layer)
        self.ve_gate = Linear(GATE_CHANNELS, shape.kv_heads, bias=False) if has_gate else None

    def forward(
        self, x: Tensor, embedded: Tensor | None, rotary: tuple[Tensor, Tensor], how: Tensor | Layer | None
    ) -> Tensor:
        """Return the attention output (B, T, E).

        embedded: the value embeddings of the tokens, (B, T, K D).  rotary: cosines and sines of the positions.
        how: the cache, or the mask of the layer's window, if it has one.
        """
        b, t, e = x.shape
        q = self.c_q(x).view(b, t, self.n_head, self.head_dim)
        k = self.c_k(x).view(b, t, self.kv_heads, self.head_dim)
        v = self.c_v(x).view(b, t, self.kv_heads, self.head_dim)
        if self.ve_gate is not None and embedded is not None:
            gate = GATE_FACTOR * torch.sigmoid(self.ve_gate(x[..., :GATE_CHANNELS]))  # (B, T, K)
            v = v + gate[..., None] * embedded.view(v.shape)
        q, k = (rms_norm(rotate(part, *rotary)) for part in (q, k))
        if self.qk_scale != 1:
            q, k = q * self.qk_scale, k * self.qk_scale
        q, k, v = (part.transpose(1, 2).to(v.dtype) for part in (q, k, v))  # (B, H or K, T, D); norms may be 32-bit
        if isinstance(how, Layer):
            y = fused_attention(q, *how.extend(k, v), mask=how.mask)
        else:
            y = attention(q, k, v, window=how)
        output: Tensor = self.c_proj(y.transpose(1, 2).reshape(b, t, e))
        return output


class NanoChatMlp(nn.Module):
    """Two linear layers with relu(x)^2 (So et al. 2021, arXiv:2109.08668) or GELU between them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gelu = shape.activation == "gelu"
        self.c_fc = Linear(shape.n_embd, 4 * shape.n_embd, bias=False)
        self.c_proj = Linear(4 * shape.n_embd, shape.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.c_fc(x)  # (B, T, 4 E)
        hidden = functional.gelu(hidden, approximate="tanh") if self.gelu else functional.relu(hidden).square()
        output: Tensor = self.c_proj(hidden)
        return output


class NanoChatBlock(nn.Module):
    """A transformer block: pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = norm_of(shape), norm_of(shape)
        self.attn, self.mlp = NanoChatAttention(shape, layer), NanoChatMlp(shape)

    def forward(
        self, x: Tensor, embedded: Tensor | None, rotary: tuple[Tensor, Tensor], how: Tensor | Layer | None
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), embedded, rotary, how)  # (B, T, E)
        added: Tensor = self.mlp(self.ln_2(x))
        return x + added


class NanoChat(LanguageModel):
    """A model of nanochat, with the parts that its shape names. Parameter names are those of the public code.

    seed: decides the initial weights, which are the same on every device and for every vocab_multiple.
    options: see LanguageModel; dropout is not part of this architecture.
    """

    window_mask: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, *, seed: int = 1337, dropout: float = 0.0, **options: Any) -> None:
        if dropout:
            raise ValueError(f"dropout is {dropout}, but {shape.arch} has none")
        super().__init__(shape, seed=seed, **options)
        rows, layers = self.wte.num_embeddings, range(shape.n_layer)
        kv_width = shape.kv_heads * shape.head_dim
        self.ln_e, self.ln_f = norm_of(shape), norm_of(shape)
        self.value_embeds = nn.ModuleDict(
            {str(layer): Embedding(rows, kv_width) for layer in layers if shape.has_value_embedding(layer)}
        )
        self.smear_gate = Linear(SMEAR_CHANNELS, 1, bias=False) if shape.smear else None
        self.smear_lambda = nn.Parameter(torch.empty(1)) if shape.smear else None
        self.resid_lambdas = nn.Parameter(torch.empty(shape.n_layer)) if shape.residual_scales else None
        self.x0_lambdas = nn.Parameter(torch.empty(shape.n_layer)) if shape.residual_scales else None
        self.h = nn.ModuleList(NanoChatBlock(shape, layer) for layer in layers)
        self.backout_lambda = nn.Parameter(torch.empty(1)) if shape.backout else None
        self.lm_head = Linear(shape.n_embd, rows, bias=False)
        # Not persistent: constants, which would tie checkpoints to the block size of the attention.
        short = min(shape.windows)
        self.register_buffer("window_mask", window_mask(min(short, shape.block_size)), persistent=False)
        for name, table in zip(("cos", "sin"), rotary_tables(shape), strict=True):
            self.register_buffer(name, table, persistent=False)
        self._draw_weights(torch.Generator().manual_seed(seed))
        self.select_fp8()

    @property
    def head(self) -> Tensor:
        return self.lm_head.weight

    def residual_stream(self, idx: Tensor) -> Tensor:
        t = idx.shape[1]
        x = self.stream(self.ln_e(self.wte(idx)))  # (B, T, E)
        if self.smear_gate is not None:
            x = torch.cat([x[:, :1], self._smeared(x[:, 1:], x[:, :-1])], dim=1)
        ways = [self.window_mask if window < t - 1 else None for window in self.shape.windows]
        return self._blocks(x, idx, (self.cos[:t], self.sin[:t]), ways)

    @torch.no_grad()
    def extend(self, idx: Tensor, cache: Cache) -> Tensor:
        positions, layers = cache.append(idx.shape[1])
        x = self.ln_e(self.wte(idx))  # (B, Q, E)
        if self.smear_gate is not None:
            before = torch.cat([cache.newest[:, None].to(x.dtype), x[:, :-1]], dim=1)
            cache.newest[:] = x[:, -1]
            # The first token of a text has none before it, whatever the cache held.
            x = torch.where(positions[:, None] > 0, self._smeared(x, before), x)
        x = self._blocks(x, idx, (self.cos[positions], self.sin[positions]), layers)
        # Only the last token predicts something new: the output layer would dominate the time of a long prompt.
        return self.logits(x[:, -1]).float()

    def _smeared(self, x: Tensor, before: Tensor) -> Tensor:
        """Return tokens (B, T, E) with a gated share of the tokens before each of them."""
        assert self.smear_gate is not None
        assert self.smear_lambda is not None
        gate = self.smear_lambda * torch.sigmoid(self.smear_gate(x[..., :SMEAR_CHANNELS]))  # (B, T, 1)
        return x + gate.to(x.dtype) * before

    def _blocks(
        self,
        x: Tensor,
        idx: Tensor,
        rotary: tuple[Tensor, Tensor],
        ways: list[Tensor | None] | list[Layer],
    ) -> Tensor:
        """Return the residual stream after all blocks and the last norm, from the embedded tokens x (B, T, E)."""
        start, middle = x, x
        for i, (block, how) in enumerate(zip(self.h, ways, strict=True)):
            if self.resid_lambdas is not None and self.x0_lambdas is not None:
                x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * start
            name = str(i)
            embedded = self.value_embeds[name](idx) if name in self.value_embeds else None
            x = self.run_block(block, x, embedded, rotary, how)
            if i == self.shape.n_layer // 2:
                middle = x
        if self.backout_lambda is not None:
            x = x - (self.backout_lambda * middle).to(x.dtype)
        normed: Tensor = self.ln_f(x)
        return normed

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        """Initialize the weights by the rules of the architecture's commit. Padding of the vocabulary is 0.

        nanochat2025: tokens N(0, 1), matrices N(0, min(1, sqrt(out / in)) / sqrt(in)), output layer 0.
        nanochat: tokens N(0, 0.8), output layer N(0, 0.001), queries, keys, values and value embeddings uniform with a
        deviation of 1 / sqrt(width), the first matrix of the MLP 0.4 of that, gates uniform in 0 to 0.02.
        Both: the last matrices of attention and MLP 0, so that blocks add nothing at first.
        """
        shape, vocab = self.shape, self.shape.vocab_size
        classic = shape.arch == "nanochat2025"
        bound = math.sqrt(3 / shape.n_embd)  # of a uniform distribution with a deviation of 1 / sqrt(width)
        # A generator on the CPU gives the same weights for every device; the order is that of construction.
        for name, parameter in self.named_parameters():
            last = max(shape.n_layer - 1, 1)
            depth = torch.arange(shape.n_layer) / last
            if name == "resid_lambdas":
                parameter.copy_(1.15 - 0.10 * depth)
            elif name == "x0_lambdas":
                parameter.copy_(0.20 - 0.15 * depth)
            elif name in ("smear_lambda", "backout_lambda"):
                parameter.fill_(BACKOUT if name == "backout_lambda" else 0.0)
            elif parameter.ndim == 1:
                parameter.fill_(1.0)  # gains of layer norms
            elif name.endswith("c_proj.weight"):
                parameter.zero_()
            elif name.endswith("gate.weight"):
                parameter.uniform_(0.0, 0.02, generator=generator)
            elif name in ("wte.weight", "lm_head.weight") or name.startswith("value_embeds."):
                # Padding draws no numbers, so all later weights are the same for every vocab_multiple.
                parameter[vocab:].zero_()
                if name.startswith("value_embeds."):
                    parameter[:vocab].uniform_(-bound, bound, generator=generator)
                else:
                    deviations = {"wte.weight": (0.8, 1.0), "lm_head.weight": (0.001, 0.0)}
                    parameter[:vocab].normal_(0.0, deviations[name][classic], generator=generator)
            elif classic:
                rows, columns = parameter.shape
                parameter.normal_(0.0, min(1.0, math.sqrt(rows / columns)) / math.sqrt(columns), generator=generator)
            else:
                factor = 0.4 if name.endswith("c_fc.weight") else 1.0
                parameter.uniform_(-factor * bound, factor * bound, generator=generator)
