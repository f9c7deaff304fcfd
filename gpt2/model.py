"""GPT-2, exactly: the same numbers as the published model, and the fastest way to them on the device at hand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpt2.cache import Cache, Layer
from gpt2.loss import CHUNK_ROWS, chunked_cross_entropy, padding_bias
from kmatrix.shapes import ModelShape, padded

# How attention is computed on the CPU: docs/decisions/0003-attention-and-precision-on-the-cpu.md has the measurements.
CPU_MATMUL_MAX_TOKENS = 512  # at longer contexts SDPA is as fast and keeps no probabilities
ROWS = 256  # query rows that plain attention takes at once; keys after the last of them are never multiplied
CPU_CHUNK_MAX_WIDTH, CPU_CHUNK_MIN_VOCAB = 128, 32768  # where the head in chunks of rows wins on the CPU


def configure_precision(device: str, dtype: str, *, tf32: bool) -> str:
    """Set how this process multiplies 32-bit matrices, and return a sentence for the log.

    On the CPU "medium" hands the products to oneDNN, which is faster than the default; it is taken only where
    its results are as exact, and not where oneDNN would round the factors to bfloat16 (AMX).
    """
    if device == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        products = "TF32" if tf32 else "32-bit"
    else:
        onednn = not _has_amx() and _medium_is_exact()
        torch.set_float32_matmul_precision("medium" if onednn else "highest")
        products = "32-bit (oneDNN)" if onednn else "32-bit"
    activations = "bfloat16 autocast" if dtype == "bf16" else "32-bit activations"
    return f"Precision on {device}: {activations}, matrix products of 32-bit numbers in {products}"


def _has_amx() -> bool:
    """Return whether the CPU has tiles for bfloat16, which "medium" would use. Known since torch 2.12."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16", False) or capabilities.get("amx_tile", False))


def _medium_is_exact() -> bool:
    """Return whether "medium" keeps 32-bit accuracy here: bfloat16 factors would err by about 2e-3."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(8, 256, 256, generator=generator) for _ in range(2))
        exact = a.double() @ b.double()
        errors = ((a @ b - exact).norm() / exact.norm(), (a[0] @ b[0] - exact[0]).norm() / exact[0].norm())
        return max(float(error) for error in errors) < 1e-5
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(device: str, dtype: str) -> AbstractContextManager[object]:
    """Return the context in which a forward pass runs: bfloat16 activations, or nothing for fp32."""
    return torch.autocast(device, torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


def attention_path(device: str, dtype: str, block_size: int, flash: bool) -> str:
    """Return "sdpa" (PyTorch's fused attention) or "matmul" (plain products), whichever is faster.

    dtype: "fp32" or "bf16"; the measured rule on the CPU is the same for both.  block_size: tokens in a sequence.
    """
    if not flash:
        return "matmul"
    if device == "cpu" and dtype in ("fp32", "bf16"):
        return "matmul" if block_size <= CPU_MATMUL_MAX_TOKENS else "sdpa"
    return "sdpa"


class Linear(nn.Linear):
    """A linear layer that draws no weights: GPT draws them all, from its own generator."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """An embedding that draws no weights: GPT draws them all, from its own generator."""

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.n_head, self.dropout = shape.n_head, dropout
        self.c_attn = Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.c_proj = Linear(shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor, path: str, mask: Tensor, past: Layer | None = None) -> Tensor:
        b, t, e = x.shape
        qkv = self.c_attn(x).view(b, t, 3, self.n_head, e // self.n_head)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        if past:
            y = functional.scaled_dot_product_attention(q, *past.extend(k, v), attn_mask=past.mask)
        elif path == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            y = plain_attention(q, k, v, mask, dropout)
        y = self.c_proj(y.transpose(1, 2).reshape(b, t, e))  # (B, T, E)
        return functional.dropout(y, dropout) if dropout else y


def causal_mask(block_size: int) -> Tensor:
    """Return what is added to the scores of ROWS query rows: (ROWS, ceil(block_size / ROWS) x ROWS).

    Zeros, and in the last ROWS columns minus infinity where a key comes after its query.
    """
    rows = min(ROWS, block_size)
    triangle = torch.full((rows, rows), -math.inf).triu(1)
    return torch.cat([torch.zeros(rows, padded(block_size, rows) - rows), triangle], dim=1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Return softmax(q k' / sqrt(D), causal) v for q, k, v of (B, H, T, D), some rows of queries at a time.

    Rows start..stop look at keys 0..stop only, which saves up to half of the work. `mask`: see causal_mask.
    """
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))
    rows, width = mask.shape
    if t <= rows:  # one piece: a slice would cost a copy on the way back
        return _attend(q, k, v, mask[:t, width - rows : width - rows + t], dropout).view(b, h, t, d)
    out = []
    for start in range(0, t, rows):
        stop = min(start + rows, t)
        first = width - rows - start  # the column of `mask` that belongs to key 0
        causal = mask[: stop - start, first : first + stop]
        out.append(_attend(q[:, start:stop], k[:, :stop], v[:, :stop], causal, dropout))
    return torch.cat(out, dim=1).view(b, h, t, d)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: Tensor, dropout: float) -> Tensor:
    """Return softmax(q k' / sqrt(D) + causal) v for q (B H, rows, D), k and v (B H, keys, D)."""
    scores = torch.baddbmm(causal.to(q.dtype), q, k.transpose(1, 2), alpha=1 / math.sqrt(q.shape[-1]))
    weights = functional.softmax(scores, dim=-1)  # (B H, rows, keys)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return torch.bmm(weights.to(v.dtype), v)


class Mlp(nn.Module):
    """Two linear layers with GPT-2's GELU, the tanh approximation, between them."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.c_fc = Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.c_proj = Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))  # (B, T, E)
        return functional.dropout(x, self.dropout) if self.dropout and self.training else x


class Block(nn.Module):
    """A transformer block: attention and MLP, each after a layer norm and added to the stream."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.n_embd, eps=1e-5, bias=shape.bias)
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.n_embd, eps=1e-5, bias=shape.bias)
        self.mlp = Mlp(shape, dropout)

    def forward(self, x: Tensor, path: str, mask: Tensor, past: Layer | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), path, mask, past)  # (B, T, E)
        added: Tensor = self.mlp(self.ln_2(x))
        return x + added


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019). Parameter names are those of the published checkpoints.

    dropout: a probability.  vocab_multiple: the vocabulary is padded to a multiple of this; the added tokens have
    probability 0, so losses are those of the unpadded model.  flash: use fused attention where it is faster.
    seed: decides the initial weights, alone: the same on every device and for every vocab_multiple.
    recompute: keep the input of each block alone, and compute the block again on the way back.
    loss_chunk: rows whose logits exist at the same time; 0: all, but for narrow models on the CPU.
    """

    causal_mask: Tensor
    padding_bias: Tensor | None

    def __init__(
        self,
        shape: ModelShape,
        *,
        dropout: float = 0.0,
        vocab_multiple: int = 1,
        flash: bool = True,
        seed: int = 1337,
        recompute: bool = False,
        loss_chunk: int = 0,
    ) -> None:
        super().__init__()
        self.shape, self.dropout, self.flash = shape, dropout, flash
        self.recompute, self.loss_chunk = recompute, loss_chunk
        rows = padded(shape.vocab_size, vocab_multiple)
        self.wte = Embedding(rows, shape.n_embd)
        self.wpe = Embedding(shape.block_size, shape.n_embd)
        self.h = nn.ModuleList(Block(shape, dropout) for _ in range(shape.n_layer))
        self.ln_f = nn.LayerNorm(shape.n_embd, eps=1e-5, bias=shape.bias)
        self.lm_head = None if shape.weight_tying else Linear(shape.n_embd, rows, bias=False)
        self.register_buffer("causal_mask", causal_mask(shape.block_size), persistent=False)
        self.register_buffer("padding_bias", padding_bias(shape.vocab_size, rows), persistent=False)
        self._draw_weights(torch.Generator().manual_seed(seed))

    @property
    def params(self) -> int:
        """Parameters without the padding of the vocabulary: `shape.params`."""
        rows = self.wte.num_embeddings - self.shape.vocab_size
        padding = rows * self.shape.n_embd * (1 if self.lm_head is None else 2)
        return sum(parameter.numel() for parameter in self.parameters()) - padding

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Return (logits, None), or with targets (None, loss): the mean cross-entropy in 32 bits, in nats.

        idx, targets: tokens, (B, T), T at most the block size.  logits: (B, T, V), V without padding.
        """
        x = self._stream(idx)  # (B, T, E)
        if targets is None:
            return functional.linear(x, self.head)[..., : self.shape.vocab_size], None
        rows, labels = x.view(-1, x.shape[-1]), targets.reshape(-1)
        if chunk := self._chunk_rows(x):
            return None, chunked_cross_entropy(rows, self.head, self.padding_bias, labels, chunk)
        logits = functional.linear(rows, self.head, self.padding_bias)  # (B T, V padded)
        return None, functional.cross_entropy(logits.float(), labels)

    @torch.no_grad()
    def extend(self, idx: Tensor, cache: Cache, first: int = 0) -> Tensor:
        """Return the logits after the last of new tokens (B, Q) of the cache's rows first..first + B: (B, V).

        The model must be in evaluation mode. Raises ValueError where a row gets longer than the context.
        """
        layers = cache.turn(first, *idx.shape)
        x = self.wte(idx) + self.wpe(layers[0].positions)  # (B, Q, E)
        for block, past in zip(self.h, layers, strict=True):
            x = block(x, "sdpa", self.causal_mask, past)
        logits: Tensor = functional.linear(self.ln_f(x[:, -1]), self.head)
        return logits[:, : self.shape.vocab_size].float()

    @property
    def head(self) -> Tensor:
        """The weights of the output layer: (V padded, E)."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def _stream(self, idx: Tensor) -> Tensor:
        """Return the residual stream after the last layer norm: (B, T, E)."""
        t = idx.shape[1]
        if t > self.shape.block_size:
            raise ValueError(f"{t} tokens in a sequence, but the model's context is {self.shape.block_size}")
        device = idx.device.type
        dtype = "bf16" if torch.is_autocast_enabled(device) else "fp32"
        dropping = self.training and self.dropout > 0
        fused = self.flash and not (device == "cpu" and dropping)  # SDPA with dropout has no fused form on the CPU
        path = attention_path(device, dtype, t, fused)
        x = self.wte(idx) + self.wpe.weight[:t]  # (B, T, E)
        x = functional.dropout(x, self.dropout) if dropping else x
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        for block in self.h:
            arguments = (x, path, self.causal_mask)
            x = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
        normed: Tensor = self.ln_f(x)
        return normed

    def _chunk_rows(self, x: Tensor) -> int:
        """Return how many rows have logits at once, 0 for all: as asked, or where chunks are faster on a CPU."""
        narrow = x.shape[-1] <= CPU_CHUNK_MAX_WIDTH and self.shape.vocab_size >= CPU_CHUNK_MIN_VOCAB
        faster = narrow and x.device.type == "cpu" and torch.is_grad_enabled()
        return self.loss_chunk or (CHUNK_ROWS if faster else 0)

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        """Draw N(0, 0.02), into the residual stream N(0, 0.02 / sqrt(2 layers)); biases 0; padding 0."""
        vocab = self.shape.vocab_size
        residual = 0.02 / math.sqrt(2 * self.shape.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif name in ("wte.weight", "lm_head.weight"):
                parameter[:vocab].normal_(0.0, 0.02, generator=generator)
                parameter[vocab:].zero_()
            elif parameter.ndim == 2:
                deviation = residual if name.endswith("c_proj.weight") else 0.02
                parameter.normal_(0.0, deviation, generator=generator)


# CONFIG_GPT2_ARCH_X is the entry x; docs/models.md tells how to add one.
MODELS: dict[str, type[GPT]] = {"gpt2": GPT}
