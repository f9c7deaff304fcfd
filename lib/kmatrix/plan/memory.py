"""How much memory each rank of a run needs, from its shape alone.

What the backward pass keeps was counted from gpt2/model.py; tests hold the sum against measured peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kmatrix.plan import BYTES, masks, states
from kmatrix.shapes import ModelShape, padded

MATMUL_TOKENS = 512  # on the CPU contexts up to this keep attention's probabilities (gpt2.model.attention_path)
MATMUL_ROWS = 256  # query rows taken at once there: keys after the last of them are never multiplied
NARROW, MANY = 128, 32768  # width and vocabulary where the loss is in chunks by itself on the CPU (gpt2.model)
CPU_CHUNK = 128
LOGIT_COPIES = 3  # 32-bit: log-probabilities, the gradient by them, the gradient by the logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank. states: of the optimizer, and masks; None where the optimizer is not known.

    copies: 16-bit ones of the weights.  activations: what the layers keep for the way back.
    block: what the way back through one block needs on top; all of the block where it is computed again.
    head: the gradient of the output layer, which is there first.
    early: gradients exist before the way back (accumulation, or the buckets of data-parallel training).
    """

    weights: float
    gradients: float
    states: float | None
    copies: float
    activations: float
    block: float
    logits: float
    head: float
    early: bool

    @property
    def total(self) -> float | None:
        """The peak: where the way back begins, or where it ends and all gradients are there."""
        if self.states is None:
            return None
        kept = self.weights + self.states + self.copies
        there = self.gradients if self.early else 0.0
        begins = self.activations + max(self.logits + there, self.block + (there or self.head))
        return kept + max(begins, self.gradients + self.block)


def memory(shape: ModelShape, fields: Mapping[str, Any]) -> Memory:
    """Return what a run needs on each rank. fields: the trainer's, by their names."""
    wide = replace(shape, vocab_size=padded(shape.vocab_size, fields.get("vocab_multiple") or 1))
    half = fields["dtype"] == "bf16"
    ranks = int(fields["num_gpus"])
    tokens = int(fields["batch_size"]) * shape.block_size
    chunk = _chunk(wide, fields, tokens)
    kept = states(wide, fields)
    copies = 2 * (wide.params - shape.block_size * shape.n_embd) if half else 0  # 16-bit copies of the weights
    return Memory(
        weights=BYTES * wide.params,
        gradients=BYTES * wide.params,
        states=None if kept is None else BYTES * (kept + masks(wide, fields)),
        copies=copies,
        activations=_activations(wide, fields, tokens),
        block=tokens * _way_back(wide, fields),
        logits=_logits(wide, half, tokens, chunk),
        head=BYTES * wide.vocab_size * wide.n_embd,
        early=ranks > 1 or int(fields["gradient_accumulation"]) > 1,
    )


def of_layer(shape: ModelShape, fields: Mapping[str, Any]) -> float:
    """Return the bytes for each token that one block keeps for the way back.

    In widths: the stream twice (32-bit), and at the width of the activations the two norms, queries, keys and values,
    the attention's result, and the MLP's hidden layer twice (before and after GELU).
    """
    half = fields["dtype"] == "bf16"
    size = 2 if half else 4
    per_token: float = shape.n_embd * (2 * 4 + 14 * size)
    if fields["dropout"]:
        per_token += shape.n_embd * 2 * (size if fields["device"] == "cpu" else 1)
    if _probabilities(shape, fields):
        keys = _keys(shape.block_size)
        each = (4 + size if half and fields["device"] != "cpu" else size) + (2 * size if fields["dropout"] else 0)
        per_token += shape.n_head * keys * each
    return per_token


def _way_back(shape: ModelShape, fields: Mapping[str, Any]) -> float:
    """Return bytes for each token: gradients of the stream and of the hidden layer, and what is computed again."""
    size = 2 if fields["dtype"] == "bf16" else 4
    return shape.n_embd * (4 + 4 * size) + (of_layer(shape, fields) if fields["recompute"] else 0)


def _activations(shape: ModelShape, fields: Mapping[str, Any], tokens: int) -> float:
    size = 2 if fields["dtype"] == "bf16" else 4
    ends = shape.n_embd * (4 + size)  # the last layer norm: its input and its result
    layer: float = shape.n_embd * 4 if fields["recompute"] else of_layer(shape, fields)  # recomputed: its input alone
    return tokens * (shape.n_layer * layer + ends)


def _logits(shape: ModelShape, half: bool, tokens: int, chunk: int) -> float:
    """Return the bytes of the output layer's way back, whole or in chunks of rows."""
    rows = min(chunk, tokens) if chunk else tokens
    whole = LOGIT_COPIES * 4.0 * rows * shape.vocab_size
    if not chunk:
        return whole
    size = 2 if half else 4
    return whole + shape.vocab_size * shape.n_embd * (4 + (2 if half else 0)) + tokens * shape.n_embd * size


def _chunk(shape: ModelShape, fields: Mapping[str, Any], tokens: int) -> int:
    """Return the rows of logits that exist at once, 0 for all."""
    narrow = shape.n_embd <= NARROW and shape.vocab_size >= MANY and fields["device"] == "cpu"
    return min(tokens, int(fields["loss_chunk"] or 0) or (CPU_CHUNK if narrow else 0))


def _probabilities(shape: ModelShape, fields: Mapping[str, Any]) -> bool:
    """Return whether attention keeps a number for each pair of tokens: plain products, no fused attention."""
    if not fields["flash_attention"]:
        return True
    return fields["device"] == "cpu" and (bool(fields["dropout"]) or shape.block_size <= MATMUL_TOKENS)


def _keys(block_size: int) -> float:
    """Return the keys that a query meets, on average, where rows are taken some at a time."""
    starts = range(0, block_size, MATMUL_ROWS)
    pairs = sum(min(MATMUL_ROWS, block_size - start) * min(start + MATMUL_ROWS, block_size) for start in starts)
    return pairs / block_size
