"""Parameters, FLOPs and peak speeds of GPT-2 models, in plain arithmetic."""

from __future__ import annotations

import re
from dataclasses import dataclass

GPT2_VOCAB = 50257
BYTE_VOCAB = 257  # 256 bytes and the token that ends a document


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide everything else about a GPT-2 model.

    vocab_size: tokens that exist, without padding.  block_size: tokens of context.
    """

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    bias: bool = True
    weight_tying: bool = True

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"{self.n_head} heads do not divide a width of {self.n_embd}")

    @property
    def block_params(self) -> int:
        """Parameters of one transformer block: 12 d^2, and biases and gains."""
        d = self.n_embd
        matrices = 12 * d * d  # qkv 3, projection 1, MLP 4 + 4
        gains = 2 * d
        biases = (3 * d + d + 4 * d + d) + 2 * d if self.bias else 0
        return matrices + gains + biases

    @property
    def params(self) -> int:
        """All parameters, position embeddings included, vocabulary padding not."""
        head = 0 if self.weight_tying else self.vocab_size * self.n_embd
        final_norm = self.n_embd * (2 if self.bias else 1)
        embeddings = (self.vocab_size + self.block_size) * self.n_embd
        return embeddings + self.n_layer * self.block_params + final_norm + head

    @property
    def flops_per_token(self) -> float:
        """Forward and backward: 6 N + 12 L T d.

        N is the number of parameters that are multiplied: without position embeddings, and without a token
        embedding that is not the output layer too, since it is only looked up.
        Source: Chowdhery et al., PaLM, appendix B (arXiv:2204.02311).
        """
        looked_up = self.block_size + (0 if self.weight_tying else self.vocab_size)
        n = self.params - looked_up * self.n_embd
        return 6.0 * n + 12.0 * self.n_layer * self.block_size * self.n_embd


NAMED = {  # layers, heads, width: Radford et al. 2019, table 2
    "124m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "774m": (36, 20, 1280),
    "1558m": (48, 25, 1600),
    "tiny": (4, 4, 128),
}


def by_depth(depth: int, aspect_ratio: int, head_dim: int) -> tuple[int, int, int]:
    """Return layers, heads and width: depth x aspect ratio, rounded up to whole heads."""
    heads = -(-depth * aspect_ratio // head_dim)
    return depth, heads, heads * head_dim


def padded(vocab_size: int, multiple: int) -> int:
    """Return the vocabulary rounded up to a multiple."""
    return -(-vocab_size // multiple) * multiple


# Dense peak of one device in TFLOP/s, without sparsity, from the makers' data sheets.
# "fp32" on GPUs is TF32 on tensor cores where there are any, as in a run with TF32 allowed;
# "fp32-strict" is plain 32-bit. The first name that stands as a word in the device's name counts.
PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250, "fp32": 1125, "fp32-strict": 75}),  # NVIDIA Blackwell data sheet
    ("GH200", {"bf16": 989.4, "fp32": 494.7, "fp32-strict": 66.9}),  # NVIDIA GH200 data sheet
    ("H200", {"bf16": 989.4, "fp32": 494.7, "fp32-strict": 66.9}),  # NVIDIA H200 data sheet
    ("H100 PCIe", {"bf16": 756, "fp32": 378, "fp32-strict": 51.2}),  # NVIDIA H100 data sheet
    ("H100 NVL", {"bf16": 835, "fp32": 417.5, "fp32-strict": 60}),  # NVIDIA H100 NVL brief
    ("H100", {"bf16": 989.4, "fp32": 494.7, "fp32-strict": 66.9}),  # NVIDIA H100 data sheet, SXM
    ("A100", {"bf16": 312, "fp32": 156, "fp32-strict": 19.5}),  # NVIDIA A100 data sheet
    ("A10G", {"bf16": 70, "fp32": 35, "fp32-strict": 35}),  # NVIDIA A10G: AWS g5 product page
    ("A10", {"bf16": 125, "fp32": 62.5, "fp32-strict": 31.2}),  # NVIDIA A10 data sheet
    ("A30", {"bf16": 165, "fp32": 82, "fp32-strict": 10.3}),  # NVIDIA A30 data sheet
    ("A40", {"bf16": 149.7, "fp32": 74.8, "fp32-strict": 37.4}),  # NVIDIA A40 data sheet
    ("L40S", {"bf16": 362, "fp32": 183, "fp32-strict": 91.6}),  # NVIDIA L40S data sheet
    ("L40", {"bf16": 181, "fp32": 90.5, "fp32-strict": 90.5}),  # NVIDIA L40 data sheet
    ("L4", {"bf16": 121, "fp32": 60, "fp32-strict": 30.3}),  # NVIDIA L4 data sheet
    ("RTX 3090", {"bf16": 71, "fp32": 35.6, "fp32-strict": 35.6}),  # NVIDIA GA102 white paper
    ("RTX 4090", {"bf16": 165.2, "fp32": 82.6, "fp32-strict": 82.6}),  # NVIDIA Ada white paper
)


def peak_tflops(device_name: str, dtype: str, *, tf32: bool = True) -> float | None:
    """Return the dense peak of one device in TFLOP/s, or None where it is not known.

    dtype: "bf16" or "fp32".
    """
    column = "fp32-strict" if dtype == "fp32" and not tf32 else dtype
    for name, peaks in PEAK_TFLOPS:
        if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):  # an RTX A1000 is no A100
            return peaks.get(column)
    return None


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int) -> float | None:
    """Return model FLOPs utilization, 0 to 1: the share of the devices' dense peak that is used."""
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * 1e12 * devices)
