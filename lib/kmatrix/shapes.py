"""Parameters and FLOPs of models, and names and peak speeds of devices."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

GPT2_VOCAB = 50257  # 50,000 merges, 256 bytes and the end-of-document token
BYTE_VOCAB = 257  # 256 bytes and the end-of-document token
VOCABULARIES = {"byte": BYTE_VOCAB, "gpt2": GPT2_VOCAB}  # of char and bpe the dataset decides


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFields:
    """What decides the model: fields of ModelShape and of a run's configuration; all but the vocabulary are symbols.

    From `n_kv_head` on they belong to nanochat's architectures. None: the model has no such part.
    """

    arch: str = "gpt2"  # class in gpt2.model.registry.MODELS
    n_layer: int = 0
    n_head: int = 0
    n_embd: int = 0
    block_size: int = 0  # tokens of context
    vocab_size: int = 0  # tokens, without padding
    bias: bool = True
    weight_tying: bool = True  # the output layer shares the token embedding
    n_kv_head: int | None = None  # heads of keys and values; 0: as many as of queries
    value_embeddings: bool | None = None  # on every second layer, the last included
    smear: bool | None = None  # each token gets a share of the one before
    backout: bool | None = None  # the middle of the residual stream is subtracted at its end
    residual_scales: bool | None = None  # a factor of the residual stream and of its start before each layer
    window_pattern: str | None = None  # per layer, repeated: L whole context, S a quarter; the last layer: L
    qk_scale: float | None = None  # factor of normalized queries and keys
    rope_base: float | None = None  # of rotary positions
    logit_softcap: float | None = None  # bound of the logits; 0: none
    norm: str | None = None  # rms: without parameters; layer: layer norm with gains
    activation: str | None = None  # relu2 or gelu


MODEL_FIELDS = tuple(one.name for one in fields(ModelFields))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(ModelFields):
    """The dimensions and parts of a model."""

    def __post_init__(self) -> None:
        if not self.n_head or self.n_embd % self.n_head:
            raise ValueError(f"width {self.n_embd} is not divisible by {self.n_head} heads")
        if self.n_head % self.kv_heads:
            raise ValueError(f"{self.n_head} heads are not divisible by {self.kv_heads} heads of keys and values")

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def kv_width(self) -> int:
        """Channels of keys, and of values."""
        return self.kv_heads * self.head_dim

    @property
    def is_nanochat(self) -> bool:
        """Return whether the architecture is one of nanochat's."""
        return self.arch in NANOCHAT

    @property
    def windows(self) -> tuple[int, ...]:
        """Keys before its own that a query of each layer sees, at most: nanochat's rule (nanochat/gpt.py, 92d63d4).

        The short window is a quarter of the context, rounded up to a multiple of 128.
        """
        short = padded(-(-self.block_size // 4), 128)
        found = [self.block_size if self._kind(layer) == "L" else short for layer in range(self.n_layer)]
        return (*found[:-1], self.block_size)

    def _kind(self, layer: int) -> str:
        pattern = self.window_pattern or "L"
        return pattern[layer % len(pattern)]

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether a layer adds an embedding of the token to its values."""
        return bool(self.value_embeddings) and layer % 2 == (self.n_layer - 1) % 2

    @property
    def _value_embeddings(self) -> int:
        return sum(self.has_value_embedding(layer) for layer in range(self.n_layer))

    @property
    def tables(self) -> list[tuple[int, int]]:
        """The sides of the embeddings and the output layer, without vocabulary padding."""
        table = (self.vocab_size, self.n_embd)
        if not self.is_nanochat:
            return [table, (self.block_size, self.n_embd), *([] if self.weight_tying else [table])]
        return [table, table] + [(self.vocab_size, self.kv_width)] * self._value_embeddings

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The sides of the matrices in all blocks."""
        d, kv = self.n_embd, self.kv_width
        layer = [(d, d), (kv, d), (kv, d), (d, d)] if self.is_nanochat else [(3 * d, d), (d, d)]
        layer += [(4 * d, d), (d, 4 * d)]
        gates = [(self.kv_heads, GATE_CHANNELS)] * self._value_embeddings
        return layer * self.n_layer + gates

    @property
    def small_params(self) -> int:
        """The parameters outside of tables and matrices in blocks: gains, biases, and nanochat's factors and smear."""
        d, layers = self.n_embd, self.n_layer
        if not self.is_nanochat:
            gains = (2 * layers + 1) * d
            return gains + (gains + layers * (3 * d + d + 4 * d + d) if self.bias else 0)
        factors = bool(self.backout) + 2 * layers * bool(self.residual_scales)
        return factors + (SMEAR_CHANNELS + 1) * bool(self.smear) + (2 * layers + 2) * d * (self.norm == "layer")

    @property
    def block_matrices(self) -> int:
        """Return the parameters of the matrices in blocks."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def scaling_params(self) -> int:
        """Return the parameters that nanochat's rules count: matrices in blocks and the output layer."""
        return self.block_matrices + self.vocab_size * self.n_embd

    @property
    def budget_params(self) -> int:
        """Return the parameters that TOKENS_PER_PARAM counts: all, or those of the rule of nanochat in 2026."""
        return self.scaling_params if self.arch == "nanochat" else self.params

    @property
    def params(self) -> int:
        """Return all parameters, with position embeddings and without vocabulary padding."""
        return sum(rows * columns for rows, columns in self.tables) + self.block_matrices + self.small_params

    @property
    def flops_per_token(self) -> float:
        """Return the FLOPs of a forward and backward pass per token: 6 N + 12 L T d.

        N counts the parameters in matrix products: position embeddings are excluded, and token embeddings too
        unless they are tied to the output layer, because they are only looked up.
        Source: Chowdhery et al., PaLM, appendix B (arXiv:2204.02311); with windows, T is at most the window of a layer,
        as in nanochat (nanochat/gpt.py, 92d63d4).
        """
        if self.is_nanochat:
            products = self.scaling_params + bool(self.smear) * SMEAR_CHANNELS
            keys = sum(min(window, self.block_size) for window in self.windows)
            return 6.0 * products + 12.0 * self.n_embd * keys
        looked_up = self.block_size + (0 if self.weight_tying else self.vocab_size)
        n = self.params - looked_up * self.n_embd
        return 6.0 * n + 12.0 * self.n_layer * self.block_size * self.n_embd


NANOCHAT = ("nanochat", "nanochat2025")  # architectures of https://github.com/karpathy/nanochat
WINDOWS = re.compile("[LS]+")  # a window pattern
GATE_CHANNELS = 12  # of a layer's input, which the gate of its value embedding reads
ROPE_BASE = 10_000.0  # of rotary positions, if the model names none
SMEAR_CHANNELS = 24  # of a token, which the gate of the smear reads

NAMED = {  # layers, heads, width: Radford et al. 2019, table 2
    "124m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "774m": (36, 20, 1280),
    "1558m": (48, 25, 1600),
    "tiny": (4, 4, 128),
}


def by_depth(depth: int, aspect_ratio: int, head_dim: int) -> tuple[int, int, int]:
    """Return layers, heads and width. The width is depth x aspect ratio, rounded up to a multiple of head_dim."""
    heads = -(-depth * aspect_ratio // head_dim)  # rounded up, in integers
    return depth, heads, heads * head_dim


def padded(vocab_size: int, multiple: int) -> int:
    """Return the vocabulary size, rounded up to a multiple."""
    return -(-vocab_size // multiple) * multiple


UPDATED_BY_ALL = 1024  # tensors with fewer entries are updated by every rank: nothing to send


def owners(sizes: Sequence[int], ranks: int) -> list[int | None]:
    """Return the rank that has the optimizer states of each tensor (ZERO_STAGE=1); None: every rank has them.

    sizes: entries of each tensor. The largest are placed first, each on the rank with the fewest entries so far.
    """
    load = [0] * ranks
    found: list[int | None] = [None] * len(sizes)
    large = [index for index, size in enumerate(sizes) if size >= UPDATED_BY_ALL]
    for index in sorted(large, key=lambda index: -sizes[index]):  # a stable sort: alike on all ranks
        rank = load.index(min(load))
        found[index] = rank
        load[rank] += sizes[index]
    return found


# When the loss is computed in chunks of rows by default (LOSS_CHUNK=0).
# On the CPU for narrow models, for which it is faster: docs/decisions/0003-attention-and-precision-on-the-cpu.md.
CPU_CHUNK = 128  # rows: 128 x 50304 logits take 26 MB; malloc returns blocks above 32 MB to the system on every free
CPU_CHUNK_MAX_WIDTH, CPU_CHUNK_MIN_VOCAB = 128, 32768
# On GPUs without torch.compile, which writes three 32-bit copies of the logits, where those would take more than this.
GPU_CHUNK = 8192  # rows: products of this size have the speed of larger ones
GPU_WHOLE_LOGITS = 16 * 2**30  # bytes
EAGER_LOGIT = 12  # bytes per logit: log-probabilities, their gradient, the gradient of the logits


def loss_rows(asked: int, *, tokens: int, width: int, vocab_size: int, cpu: bool, compiled: bool) -> int:
    """Return how many rows of logits are computed at once, 0 for all.

    asked: GPT2_LOSS_CHUNK: rows, 0 for the default, -1 for all.  tokens: rows in all.
    """
    if asked:
        return max(asked, 0)
    if cpu:
        return CPU_CHUNK if width <= CPU_CHUNK_MAX_WIDTH and vocab_size >= CPU_CHUNK_MIN_VOCAB else 0
    return GPU_CHUNK if not compiled and EAGER_LOGIT * tokens * vocab_size > GPU_WHOLE_LOGITS else 0


class Device(NamedTuple):
    """A GPU model. Speeds are dense peaks in TFLOP/s, without sparsity, from the vendors' data sheets."""

    name: str
    bf16: float  # of GeForce and RTX PRO with sums in 32 bits
    fp32: float  # TF32 on NVIDIA's tensor cores, because runs allow it; on AMD's GPUs IEEE 32-bit
    memory: float | None = None  # bytes
    watts: float | None = None  # maximum power, None if the manufacturer does not publish it


GB, GIB = 1e9, 2.0**30
# The memory of H100 and A100 is what PyTorch reports (8 have 633.6 and 634.0 GiB in reports of nanochat), that of
# an RTX 5090 is from nanochat's reports; drivers report as much as the others, or a few percent more. The power is that
# of the SXM version if there are two; GH200 shares it with a CPU, and AWS does not publish that of the A10G.
# The first name that is a word of the device's name applies.
DEVICES = (
    Device("GB300", 2500, 1250),  # GB300 NVL72 data sheet, a GPU
    Device("B300", 2250, 1125),  # HGX B300 data sheet
    Device("GB200", 2500, 1250),  # GB200 NVL72 data sheet, a GPU
    Device("B200", 2250, 1125, 180 * GB, 1000),  # Blackwell data sheet
    Device("GH200", 989.4, 494.7, 96 * GB),  # GH200 data sheet
    Device("H200 NVL", 835.5, 417.5),  # H200 data sheet
    Device("H200", 989.4, 494.7, 141 * GB, 700),  # H200 data sheet, SXM
    Device("H100 PCIe", 756, 378, 79.2 * GIB, 350),  # H100 data sheet
    Device("H100 NVL", 835, 417.5, 94 * GB, 400),  # H100 NVL brief
    Device("H100", 989.4, 494.7, 79.2 * GIB, 700),  # H100 data sheet, SXM
    Device("A100 40GB", 312, 156, 40 * GB, 400),
    Device("A100", 312, 156, 79.25 * GIB, 400),  # A100 data sheet
    Device("A10G", 70, 35, 24 * GB),  # A10G: AWS g5 product page
    Device("A10", 125, 62.5, 24 * GB, 150),  # A10 data sheet
    Device("A30", 165, 82, 24 * GB, 165),  # A30 data sheet
    Device("A40", 149.7, 74.8, 48 * GB, 300),  # A40 data sheet
    Device("L40S", 362, 183, 48 * GB, 350),  # L40S data sheet
    Device("L40", 181, 90.5, 48 * GB, 300),  # L40 data sheet
    Device("L4", 121, 60, 24 * GB, 72),  # L4 data sheet
    Device("RTX 3090", 71, 35.6, 24 * GB, 350),  # GA102 white paper
    Device("RTX 5090", 209.5, 104.8, 31.8 * GIB, 575),  # RTX Blackwell white paper
    # RTX PRO Blackwell white paper. The Max-Q and Server Editions have lower clocks.
    Device("RTX PRO 6000 Blackwell Workstation", 503.8, 251.9),
    Device("RTX 4090", 165.2, 82.6, 24 * GB, 450),  # Ada white paper
    Device("MI300X", 1307.4, 163.4),  # AMD MI300X data sheet
    Device("MI300A", 980.6, 122.6),  # AMD MI300A data sheet
    Device("MI325X", 1307.4, 163.4),  # AMD MI325X data sheet
    Device("MI350X", 2306.9, 144.2),  # AMD MI350X data sheet
    Device("MI355X", 2516.6, 157.3),  # AMD MI355X data sheet
)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of one device in TFLOP/s, or None if the device is unknown.

    dtype: "bf16" or "fp32".
    """
    for device in DEVICES:
        # A word boundary: an RTX A1000 is not an A100.
        if re.search(rf"\b{device.name}\b", device_name, re.IGNORECASE):
            return {"bf16": device.bf16, "fp32": device.fp32}.get(dtype)
    return None


def cpu_name() -> str:
    """Return the model name of the processor of this machine."""
    found = re.search(r"^model name\s*: (.*)$", cpu_info(), re.MULTILINE)
    return found[1].strip() if found else os.uname().machine


def cpu_info() -> str:
    """Return what Linux says about the processor of this machine, "" if nothing."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text("utf-8")
    return ""


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int) -> float | None:
    """Return the model FLOPs utilization, 0 to 1: FLOP/s as a share of the dense peak; None without a peak."""
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * 1e12 * devices)
