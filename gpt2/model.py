"""GPT-2 with its loss and key-value cache, numerically equal to the published model, fast on CPUs and GPUs.

Dimensions in comments: B sequences, T tokens, E width, H heads, D = E / H, V vocabulary; Q new tokens, K all tokens.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kmatrix.shapes import ModelShape, padded

# Measurements for the CPU thresholds below: docs/decisions/0003-attention-and-precision-on-the-cpu.md
CPU_MATMUL_MAX_TOKENS = 512  # for longer contexts SDPA is as fast and does not store probabilities

# Query rows per block of plain attention; keys after the last row are skipped. 128 rows measured the same (0003).
ROWS = 256
CPU_CHUNK_MAX_WIDTH, CPU_CHUNK_MIN_VOCAB = 128, 32768  # chunked loss is faster on the CPU within these bounds
CHUNK_ROWS = 128  # 128 x 50304 logits take 26 MB; malloc returns blocks above 32 MB to the system on every free
FIRST_CAPACITY = 64  # tokens per row that are allocated first; doubled when a text grows


def configure_precision(device: str, dtype: str, *, tf32: bool) -> str:
    """Set the precision of 32-bit matrix products in this process, and return a line for the log.

    On the CPU "medium" uses oneDNN, which is faster than the default. It is set only if its results are as accurate,
    and never on CPUs with AMX, where oneDNN would round the factors to bfloat16.
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


@functools.cache
def _has_amx() -> bool:
    """Return whether the CPU has AMX tiles, which "medium" would use for bfloat16. PyTorch reports it since 2.12."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities:
        return bool(capabilities.get("amx_bf16", False) or capabilities.get("amx_tile", False))
    try:  # older versions of PyTorch
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  (no path of ours)
            return any("amx_tile" in line.split() for line in file if line.startswith("flags"))
    except OSError:  # not Linux: the measurement of `_medium_is_exact` detects the rounding as well
        return False


def _medium_is_exact() -> bool:
    """Return whether "medium" keeps 32-bit accuracy on this CPU; bfloat16 factors would err by about 2e-3."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        generator = torch.Generator().manual_seed(0)  # its own: training must not depend on whether this ran
        a, b = (torch.randn(8, 256, 256, generator=generator) for _ in range(2))  # each (8, 256, 256)
        exact = a.double() @ b.double()
        # A batched and a plain product, because PyTorch has separate code for them.
        errors = ((a @ b - exact).norm() / exact.norm(), (a[0] @ b[0] - exact[0]).norm() / exact[0].norm())
        # 32-bit products err by 4e-7, bfloat16 factors by 2e-3: 1e-5 separates them on any CPU.
        return max(float(error) for error in errors) < 1e-5
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(device: str, dtype: str) -> AbstractContextManager[object]:
    """Return the context for a forward pass: bfloat16 autocast, or a null context for fp32."""
    return torch.autocast(device, torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


def attention_path(device: str, dtype: str, block_size: int, flash: bool, *, amx: bool = False) -> str:
    """Return the faster attention: "sdpa" (PyTorch's fused attention) or "matmul" (plain matrix products).

    dtype: "fp32" or "bf16".  block_size: tokens per sequence.  amx: the CPU has AMX tiles, so 32-bit products are not
    computed by oneDNN, which slows SDPA down.
    """
    if not flash:
        return "matmul"
    if device == "cpu" and dtype == "fp32" and amx:
        return "sdpa"
    # SDPA never stores the T x T probabilities, so its memory decides once the two are equally fast.
    if device == "cpu" and dtype in ("fp32", "bf16"):
        return "matmul" if block_size <= CPU_MATMUL_MAX_TOKENS else "sdpa"
    return "sdpa"


class Linear(nn.Linear):
    """A linear layer without initialization: GPT initializes all weights from its own generator."""

    # torch would draw weights here that GPT overwrites: seconds for a large model, and global random numbers.
    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """An embedding without initialization: GPT initializes all weights from its own generator."""

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
        b, t, e = x.shape  # (B, T, E)
        # One product for all three, in the order of the published c_attn: queries, keys, values.
        qkv = self.c_attn(x).view(b, t, 3, self.n_head, e // self.n_head)  # (B, T, 3, H, D)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        if past:
            # Not is_causal: it aligns the first query with the first key, and new queries are the last of K tokens.
            y = functional.scaled_dot_product_attention(q, *past.extend(k, v), attn_mask=past.mask)
        elif path == "sdpa":
            # is_causal instead of a mask, because the flash kernels on GPUs do not take one.
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            y = plain_attention(q, k, v, mask, dropout)
        # y: (B, H, T, D)
        y = self.c_proj(y.transpose(1, 2).reshape(b, t, e))  # (B, T, E)
        return functional.dropout(y, dropout) if dropout else y


def causal_mask(block_size: int) -> Tensor:
    """Return the causal mask for ROWS query rows, to be added to scores: (ROWS, ceil(block_size / ROWS) x ROWS).

    The last ROWS columns are a causal triangle (0 and -inf); all others are 0.
    """
    rows = min(ROWS, block_size)
    triangle = torch.full((rows, rows), -math.inf).triu(1)
    # The triangle is at the right end, so every block of query rows is a slice of this one buffer.
    return torch.cat([torch.zeros(rows, padded(block_size, rows) - rows), triangle], dim=1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Return causal softmax(q k' / sqrt(D)) v for q, k, v of (B, H, T, D), computed in blocks of query rows.

    Rows start..stop only need keys 0..stop, which saves up to half of the work. `mask`: see causal_mask.
    """
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))  # (B H, T, D), because bmm takes one batch dimension
    rows, width = mask.shape
    if t <= rows:  # one block: slicing would cost a copy in the backward pass
        return _attend(q, k, v, mask[:t, width - rows : width - rows + t], dropout).view(b, h, t, d)
    out = []
    for start in range(0, t, rows):
        stop = min(start + rows, t)
        first = width - rows - start  # column of `mask` for key 0
        causal = mask[: stop - start, first : first + stop]
        out.append(_attend(q[:, start:stop], k[:, :stop], v[:, :stop], causal, dropout))
    return torch.cat(out, dim=1).view(b, h, t, d)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: Tensor, dropout: float) -> Tensor:
    """Return softmax(q k' / sqrt(D) + causal) v for q (B H, rows, D), k and v (B H, keys, D)."""
    # One kernel for product, scale and mask, instead of three passes over the scores, the largest tensor here.
    scores = torch.baddbmm(causal.to(q.dtype), q, k.transpose(1, 2), alpha=1 / math.sqrt(q.shape[-1]))
    weights = functional.softmax(scores, dim=-1)  # (B H, rows, keys), like scores
    weights = functional.dropout(weights, dropout) if dropout else weights
    return torch.bmm(weights.to(v.dtype), v)  # (B H, rows, D); on GPUs, autocast computes the softmax in fp32


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

    def forward(self, x: Tensor, path: str, mask: Tensor, past: Layer | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), path, mask, past)  # (B, T, E)
        added: Tensor = self.mlp(self.ln_2(x))
        return x + added


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019). Parameter names are those of the published checkpoints.

    dropout: probability.  vocab_multiple: pads the vocabulary to a multiple of this; padding tokens have probability 0,
    so the loss equals that of the unpadded model.  flash: use fused attention if it is faster.
    seed: decides the initial weights, which are the same on every device and for every vocab_multiple.
    recompute: activation checkpointing (Chen et al. 2016, arXiv:1604.06174); only the input of each block is kept.
    loss_chunk: rows of logits computed at once; 0: all rows, except for narrow models on the CPU.
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
        self.amx = _has_amx()  # here, because the forward pass may be compiled
        self.recompute, self.loss_chunk = recompute, loss_chunk
        rows = padded(shape.vocab_size, vocab_multiple)  # V padded: GPUs prefer 50304 to 50257 (nanoGPT)
        self.wte = Embedding(rows, shape.n_embd)
        self.wpe = Embedding(shape.block_size, shape.n_embd)
        self.h = nn.ModuleList(Block(shape, dropout) for _ in range(shape.n_layer))
        self.ln_f = nn.LayerNorm(shape.n_embd, eps=1e-5, bias=shape.bias)
        # Tied to the token embedding in GPT-2 (Press and Wolf 2017, arXiv:1608.05859)
        self.lm_head = None if shape.weight_tying else Linear(shape.n_embd, rows, bias=False)
        # Not persistent: constants do not belong into checkpoints, and would tie them to ROWS.
        self.register_buffer("causal_mask", causal_mask(shape.block_size), persistent=False)
        self.register_buffer("padding_bias", padding_bias(shape.vocab_size, rows), persistent=False)
        self._draw_weights(torch.Generator().manual_seed(seed))

    @property
    def params(self) -> int:
        """Number of parameters without vocabulary padding; equals `shape.params`."""
        rows = self.wte.num_embeddings - self.shape.vocab_size
        padding = rows * self.shape.n_embd * (1 if self.lm_head is None else 2)  # an untied output layer is padded too
        return sum(parameter.numel() for parameter in self.parameters()) - padding

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Return (logits, None), or with targets (None, loss): the mean cross-entropy in fp32, in nats.

        idx, targets: tokens, (B, T), T at most the block size.  logits: (B, T, V), V without padding.
        """
        x = self._residual_stream(idx)  # (B, T, E)
        if targets is None:
            return functional.linear(x, self.head)[..., : self.shape.vocab_size], None  # (B, T, V)
        rows, labels = x.view(-1, x.shape[-1]), targets.reshape(-1)  # (B T, E) and (B T,)
        if chunk := self._chunk_rows(x):
            return None, chunked_cross_entropy(rows, self.head, self.padding_bias, labels, chunk)
        # A bias of -inf instead of a slice: slicing the logits would copy the largest tensor of the step.
        logits = functional.linear(rows, self.head, self.padding_bias)  # (B T, V padded)
        # 32 bits also under autocast: bfloat16 has 8 significant bits, too few for a sum over the vocabulary.
        return None, functional.cross_entropy(logits.float(), labels)

    @torch.no_grad()
    def extend(self, idx: Tensor, cache: Cache, first: int = 0) -> Tensor:
        """Process new tokens (B, Q) of the cache's rows first..first + B, and return the last logits: (B, V).

        The model must be in evaluation mode. Raises ValueError if a row outgrows the context.
        """
        layers = cache.append(first, *idx.shape)
        x = self.wte(idx) + self.wpe(layers[0].positions)  # (B, Q, E)
        for block, past in zip(self.h, layers, strict=True):
            x = block(x, "sdpa", self.causal_mask, past)  # (B, Q, E)
        # Only the last token predicts something new: the output layer would dominate the time of a long prompt.
        logits: Tensor = functional.linear(self.ln_f(x[:, -1]), self.head)  # (B, V padded)
        return logits[:, : self.shape.vocab_size].float()

    @property
    def head(self) -> Tensor:
        """Weights of the output layer: (padded V, E)."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def _residual_stream(self, idx: Tensor) -> Tensor:
        """Return the residual stream after the last layer norm: (B, T, E)."""
        t = idx.shape[1]
        if t > self.shape.block_size:
            raise ValueError(f"{t} tokens in a sequence, but the model's context is {self.shape.block_size}")
        device = idx.device.type
        dtype = "bf16" if torch.is_autocast_enabled(device) else "fp32"
        has_dropout = self.training and self.dropout > 0
        fused = self.flash and not (device == "cpu" and has_dropout)  # on the CPU, SDPA with dropout is not fused
        path = attention_path(device, dtype, t, fused, amx=self.amx)
        x = self.wte(idx) + self.wpe.weight[:t]  # (B, T, E)
        x = functional.dropout(x, self.dropout) if has_dropout else x
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        for block in self.h:
            arguments = (x, path, self.causal_mask)
            # use_reentrant=False: the variant that torch recommends. It also restores the random state, so recomputed
            # dropout masks are the same.
            x = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
        normed: Tensor = self.ln_f(x)  # GPT-2 adds this norm after the last block (Radford et al. 2019, section 2.3)
        return normed

    def _chunk_rows(self, x: Tensor) -> int:
        """Return how many rows of logits to compute at once, 0 for all: as configured, or if faster on this CPU."""
        narrow = x.shape[-1] <= CPU_CHUNK_MAX_WIDTH and self.shape.vocab_size >= CPU_CHUNK_MIN_VOCAB
        faster = narrow and x.device.type == "cpu" and torch.is_grad_enabled()
        return self.loss_chunk or (CHUNK_ROWS if faster else 0)

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


# CONFIG_GPT2_ARCH_X is the entry x; how to add one: docs/developing.md, "A model of your own".
MODELS: dict[str, type[GPT]] = {"gpt2": GPT}


def padding_bias(vocab_size: int, rows: int) -> Tensor | None:
    """Return the bias added to the logits: 0 for tokens, -inf for padding; None without padding."""
    if rows == vocab_size:
        return None
    # exp(-inf) is 0: padding adds nothing to the softmax, and its rows of the embedding get a gradient of exactly 0.
    return torch.cat([torch.zeros(vocab_size), torch.full((rows - vocab_size,), -math.inf)])  # (V padded,)


def chunked_cross_entropy(
    x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int = CHUNK_ROWS
) -> Tensor:
    """Return the mean cross-entropy of softmax(x head' + bias) for x (N, E), head (V, E), labels (N,).

    rows: how many of the N rows have logits in memory at the same time.
    """
    device = x.device.type
    # Every dtype is chosen by hand: autocast would cast some of the operations below, but none with `out=`.
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled():
            loss: Tensor = ChunkedCrossEntropy.apply(x, head, bias, labels, rows)  # type: ignore[no-untyped-call]
            return loss
        # Evaluation: the same sums without gradients.
        w, added = head.to(x.dtype), None if bias is None else bias.to(x.dtype)
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), rows):
            logits = functional.linear(x[start : start + rows], w, added).float()  # (rows, V padded)
            total += functional.cross_entropy(logits, labels[start : start + rows], reduction="sum")
        return total / len(x)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradients chunk by chunk in the forward pass; backward only scales them.

    The logits of one chunk exist at a time, and never again: backward would have to recompute them. The idea is that
    of Liger Kernel's fused linear cross-entropy (https://github.com/linkedin/Liger-Kernel).
    """

    @staticmethod
    def forward(  # noqa: PLR0917  (the signature of autograd)
        ctx: Any, x: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, rows: int
    ) -> Tensor:
        """Return the mean loss. Products have the dtype of `x`, (N, E); sums and the gradient of `head` are fp32."""
        w, added = head.to(x.dtype), None if bias is None else bias.to(x.dtype)  # (V padded, E) and (V padded,)
        dx, dw = torch.empty_like(x), torch.zeros_like(head)  # dw in fp32: it sums over all chunks
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), rows):
            part, label = x[start : start + rows], labels[start : start + rows, None]
            log_probs = functional.log_softmax(functional.linear(part, w, added).float(), dim=-1)  # (rows, V padded)
            total -= log_probs.gather(1, label).sum()
            # Gradient of the logits: (softmax - one-hot) / N. In place, because a second buffer would double the peak.
            d = log_probs.exp_().scatter_add_(1, label, -torch.ones_like(label, dtype=torch.float32))
            d = d.div_(len(x)).to(x.dtype)  # (rows, V padded)
            torch.mm(d, w, out=dx[start : start + rows])  # (rows, E)
            dw += d.t() @ part  # (V padded, E)
        ctx.save_for_backward(dx, dw)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dx, dw = ctx.saved_tensors
        # The loss is a scalar, so the chain rule is one factor (1 / accumulation in training).
        return dx * grads[0], dw * grads[0], None, None, None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's view of the cache during a forward pass."""

    keys: Tensor  # (B, capacity, H, D), a view into the cache
    values: Tensor  # (B, capacity, H, D), a view into the cache
    positions: Tensor  # (B, Q), of the new tokens
    mask: Tensor  # (B, 1, Q, K), True if a query attends to a key

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, (B, H, Q, D), and return those of all tokens: (B, H, K, D)."""
        rows = torch.arange(len(k), device=k.device)[:, None]  # (B, 1)
        # Rows have different lengths, so each writes to its own positions.
        self.keys[rows, self.positions] = k.transpose(1, 2).to(self.keys.dtype)
        self.values[rows, self.positions] = v.transpose(1, 2).to(self.values.dtype)
        length = self.mask.shape[-1]  # K, of the longest row; the mask hides what shorter rows do not have
        return self.keys[:, :length].transpose(1, 2), self.values[:, :length].transpose(1, 2)


class Cache:
    """Key-value cache with one row per text. `lengths[row]` counts cached tokens; set it to 0 to reuse the row."""

    def __init__(
        self, shape: ModelShape, rows: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.block_size = shape.block_size
        self.lengths = [0] * rows  # cached tokens of each row
        head = (shape.n_head, shape.n_embd // shape.n_head)
        self._kv = torch.zeros((2, shape.n_layer, rows, 0, *head), device=device, dtype=dtype)  # (2, L, R, T, H, D)

    def append(self, first: int, rows: int, new: int) -> list[Layer]:
        """Append `new` tokens to each of the rows first..first + rows, and return the view of each layer.

        Raises ValueError if a row outgrows the context.
        """
        starts = self.lengths[first : first + rows]
        longest = max(starts) + new
        if longest > self.block_size:
            raise ValueError(f"{longest} tokens in a row, but the model's context is {self.block_size}")
        self._reserve(longest)
        device = self._kv.device
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)  # (B, Q)
        mask = torch.arange(longest, device=device) <= positions[..., None]  # (B, Q, K)
        for row in range(first, first + rows):
            self.lengths[row] += new
        keys, values = self._kv[:, :, first : first + rows]  # each (L, B, T, H, D)
        return [Layer(keys[i], values[i], positions, mask[:, None]) for i in range(len(keys))]

    def move(self, source: int, target: int) -> None:
        """Copy the text of one row into another."""
        length = self.lengths[source]
        self._kv[:, :, target, :length] = self._kv[:, :, source, :length]
        self.lengths[target] = length

    def _reserve(self, length: int) -> None:
        """Extend the cache to this many tokens per row, filled with zeros: masked values must still be finite."""
        kinds, layers, rows, capacity, *head = self._kv.shape
        if length <= capacity:
            return
        # Doubling copies each token about once in total, and a short text does not allocate the whole context.
        wanted = min(self.block_size, max(FIRST_CAPACITY, length, 2 * capacity))
        grown = self._kv.new_zeros((kinds, layers, rows, wanted, *head))
        grown[:, :, :, :capacity] = self._kv
        self._kv = grown
