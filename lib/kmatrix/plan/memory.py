"""Forecast the memory per rank of a run from its configuration.

The activations are counted from gpt2/model/; tests compare the sum with measured and published peaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import ModelShape, loss_rows, owners, padded

LOGIT_COPIES = 3  # 32-bit: log-probabilities, their gradient, the gradient of the logits
# Bytes per logit with torch.compile, which fuses the loss: it keeps the logits in the dtype of the activations, and on
# GPUs the gradient takes their place. With 2.5 instead of 2 bytes the peaks in tests/fixtures/published.toml are at
# most 15 % above the plan. The rest of GPT-2 takes as much memory as without it.
COMPILED_LOGIT = {"bf16": 2.5, "fp32": 5.0}
BYTES = 4  # weights, gradients and optimizer states are 32-bit
# Numbers per parameter that an optimizer stores: of matrices in blocks, of other parameters. Those that are not here
# store two, as Adam does.
STATES = {
    "sgd": (1, 1),
    "adamwadv": (3, 3),
    "muon": (1, 2),
    "muon_nanochat": (1, 2),  # and a value per row or column
    "muon_nanochat2025": (1, 2),
    "adafactor": (0, 0),
    "lion": (1, 1),
}
CUDA_GRAPHS = ("reduce_overhead", "max_autotune")  # modes with gradients from the start (gpt2.model.compiled)
SOAP_WIDEST = 10_000  # a dimension above this has no preconditioner


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Memory of one rank, in bytes."""

    weights: float
    gradients: float
    states: float  # this rank's optimizer states, and pruning masks
    copies: float  # 16-bit copies of the weights
    activations: float  # stored by the layers for the backward pass
    block: float  # extra for the backward pass of one block; the whole block with activation checkpointing
    logits: float
    head: float  # gradient of the output layer, the first to exist
    tied: float  # gradient of the token embedding before it is added to `head`; 0 if the two are separate weights
    norms: float = 0.0  # a copy of the weights and the update of a layer, at the end of a logged step (LOG_NORMS)
    early: bool  # gradients exist before the backward pass (accumulation, or DDP buckets)
    twice: bool = False  # the compiled backward pass returns its gradients together, next to the accumulated ones

    @property
    def total(self) -> float:
        """The peak: at the start of the backward pass, or at the end of the step with all gradients."""
        # Two candidates: the start of the backward pass, with all activations and the logits, and its end, with all
        # gradients and the last block, or the gradient of the embedding, or the copies of LOG_NORMS. Without
        # accumulation and DDP, gradients do not exist yet at the start. The backward pass of a layer frees its 16-bit
        # copies.
        kept = self.weights + self.states
        there = self.gradients if self.early else 0.0
        begins = self.copies + self.activations + max(self.logits + there, self.block + (there or self.head))
        ends = self.gradients * (2 if self.twice else 1) + max(self.block, self.tied, self.norms)
        return kept + max(begins, ends)

    @property
    def least(self) -> float:
        """Weights, gradients and optimizer states: a device with less memory can never train the model."""
        return self.weights + self.gradients + self.states


def memory(train: TrainConfig) -> MemoryNeed:
    """Return the memory per rank on a GPU. On the CPU only `least` holds: attention and allocator differ."""
    shape = train.shape
    wide = replace(shape, vocab_size=padded(shape.vocab_size, train.vocab_multiple))
    half = train.dtype == "bf16"
    ranks = train.num_gpus
    tokens = train.batch_size * shape.block_size
    chunk = _chunk(wide, train, tokens)
    graphs = train.compile and train.compile_mode in CUDA_GRAPHS
    copies = 2 * (wide.params - shape.block_size * shape.n_embd) if half else 0  # 16-bit copies of the weights
    return MemoryNeed(
        weights=BYTES * wide.params,
        gradients=BYTES * wide.params,
        states=BYTES * (states_per_rank(wide, train) + masks(wide, train)),
        copies=copies,
        activations=_activations(wide, train, tokens),
        block=tokens * _way_back(wide, train),
        logits=_logits(wide, train, tokens, chunk),
        head=BYTES * wide.vocab_size * wide.n_embd,
        tied=BYTES * wide.vocab_size * wide.n_embd if shape.weight_tying and not shape.is_nanochat else 0.0,
        norms=_norms(wide) if train.log_norms else 0.0,
        early=ranks > 1 or train.gradient_accumulation > 1 or graphs,
        twice=train.compile and (train.gradient_accumulation > 1 or graphs),
    )


def of_layer(shape: ModelShape, train: TrainConfig) -> float:
    """Return the bytes per token that one block stores for the backward pass.

    In units of n_embd: the residual stream twice (32-bit), and in the dtype of the activations 14 more: two norms,
    queries, keys, values, the attention output, and the MLP's hidden layer twice (before and after GELU).
    """
    half = train.dtype == "bf16"
    size = 2 if half else 4
    kept = 14.0 * size
    if train.fp8:  # the inputs of the four products have 8 bits; attention keeps its own output
        # Compiled for a GPU, they are quantized again from what is kept: norms, attention and the hidden layer.
        kept = 8.0 * size + (0 if train.compile else 7)
    per_token: float = shape.n_embd * (2 * _stream(train) + kept)
    if train.dropout:  # two masks per block, a byte per element
        per_token += shape.n_embd * 2
    if shape.is_nanochat and not train.compile:  # inductor's backward pass computes norms and scales again
        per_token += shape.n_embd * _parts(shape, half=half)
    return per_token


def _stream(train: TrainConfig) -> int:
    """Return the bytes of a number of the residual stream."""
    return 2 if train.bf16_stream else 4


def _parts(shape: ModelShape, *, half: bool) -> float:
    """Return the bytes per token and channel that a block of nanochat stores in addition.

    Queries and keys before and after their norm; the input of the residual scales; the embeddings of values.
    Fewer heads of keys and values take less. Measured on the CPU (tests/plan/test_memory.py).
    """
    size, shared = 2 if half else 4, shape.kv_heads / shape.n_head
    values = sum(shape.has_value_embedding(layer) for layer in range(shape.n_layer)) / shape.n_layer
    norms = (12 if half else 8) * (1 + shared) / 2
    return norms + 4 * bool(shape.residual_scales) + 4 * values * shared - 2 * size * (1 - shared)


def _way_back(shape: ModelShape, train: TrainConfig) -> float:
    """Return bytes per token: gradients of the residual stream and the hidden layer, and recomputed activations."""
    size = 2 if train.dtype == "bf16" else 4
    return shape.n_embd * (_stream(train) + 4 * size) + (of_layer(shape, train) if train.recompute else 0)


def _activations(shape: ModelShape, train: TrainConfig, tokens: int) -> float:
    """Return the bytes that the forward pass keeps for the backward pass."""
    size = 2 if train.dtype == "bf16" else 4
    ends = shape.n_embd * (_stream(train) + size)  # the last layer norm: input and output
    if shape.is_nanochat and not train.compile:
        # the embedded tokens before and after their norm, and the start of the stream
        ends += shape.n_embd * 3 * _stream(train)
    # Recomputation keeps only the input of each block.
    layer = shape.n_embd * _stream(train) if train.recompute else of_layer(shape, train)
    return tokens * (shape.n_layer * layer + ends)


def _logits(shape: ModelShape, train: TrainConfig, tokens: int, chunk: int) -> float:
    """Return the bytes of the loss: logits and their gradients, of all rows or of one chunk."""
    half = train.dtype == "bf16"
    rows = min(chunk, tokens) if chunk else tokens
    # A soft-cap stores its tanh, unless the loss is fused with it.
    copies = LOGIT_COPIES + (1 if shape.logit_softcap else 0)
    each = COMPILED_LOGIT[train.dtype] if train.compile and not chunk else copies * 4.0
    if chunk and train.compile:
        each = 2.0 * (2 if half else 4)  # the product and its gradient: the rest is fused
    whole = each * rows * shape.vocab_size
    if not chunk:
        return whole
    # In chunks, the gradients of the output layer and of its input exist from the forward pass on.
    size = 2 if half else 4
    return whole + shape.vocab_size * shape.n_embd * (4 + (2 if half else 0)) + tokens * shape.n_embd * size


def _chunk(shape: ModelShape, train: TrainConfig, tokens: int) -> int:
    """Return the rows of logits that are computed at once, 0 for all."""
    sizes = {"tokens": tokens, "width": shape.n_embd, "vocab_size": shape.vocab_size}
    return min(tokens, loss_rows(train.loss_chunk, **sizes, cpu=False, compiled=train.compile))


def _norms(shape: ModelShape) -> float:
    """Return the bytes of LOG_NORMS (gpt2.norms): a copy of all weights, and the update of the largest layer."""
    largest = max(shape.block_matrices // shape.n_layer, shape.vocab_size * shape.n_embd)
    return BYTES * (shape.params + largest)


def states(shape: ModelShape, train: TrainConfig) -> float:
    """Return how many 32-bit numbers the optimizer stores.

    Muon stores one number per parameter of the matrices in blocks and two for the rest (AdamW).
    Adafactor stores one row and one column per matrix, which is negligible.
    SOAP stores two square matrices and their eigenvectors per matrix.
    """
    in_blocks = shape.block_matrices
    matrix, other = _states_each(train)
    squares = _squares_of([*shape.tables, *shape.matrices]) if train.optimizer == "soap" else 0
    return in_blocks * matrix + (shape.params - in_blocks) * other + squares


def _states_each(train: TrainConfig) -> tuple[int, int]:
    """Return the numbers per parameter: of matrices in blocks, of other parameters."""
    # AMSGrad stores the largest mean square so far. adamwadv has it in STATES; as a base of adamwprune it is added.
    largest = bool(train.amsgrad) or (train.optimizer == "adamwprune" and train.adamwprune_base == "adamwadv")
    matrix, other = STATES.get(train.optimizer, (2, 2))
    return matrix + largest, other + largest


def states_per_rank(shape: ModelShape, train: TrainConfig) -> float:
    """Return how many 32-bit numbers the optimizer stores on the rank with the most.

    With ZERO_STAGE=1 each large tensor has one owner (gpt2.optim.sharded).
    """
    everything = states(shape, train)
    if not train.zero_stage or train.num_gpus == 1:
        return everything
    matrix, other = _states_each(train)
    tensors = [(a, b, other) for a, b in shape.tables] + [(a, b, matrix) for a, b in shape.matrices]
    held = [a * b * each for a, b, each in tensors]
    if train.optimizer == "soap":
        held = [size + _squares_of([(a, b)]) for size, (a, b, _) in zip(held, tensors, strict=True)]
    load = [everything - sum(held)] * train.num_gpus  # biases and gains; wide models divide these few as well
    ranks = owners([a * b for a, b, _ in tensors], train.num_gpus)
    for rank, size in zip(ranks, held, strict=True):
        for holder in range(train.num_gpus) if rank is None else (rank,):
            load[holder] += size
    return max(load)


def masks(shape: ModelShape, train: TrainConfig) -> float:
    """Return the size of masks and movement scores in 32-bit numbers.

    A mask has a byte per block weight, the scores one number each.
    """
    kept = {"none": 0.0, "movement": 1.25}.get(train.pruning, 0.25)
    return shape.block_matrices * kept


def _squares_of(matrices: Iterable[tuple[int, int]]) -> int:
    """Return how many numbers SOAP's preconditioners and their eigenvectors have."""
    return 2 * sum(side * side for sides in matrices for side in sides if side <= SOAP_WIDEST)
