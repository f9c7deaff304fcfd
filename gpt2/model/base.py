"""What all models have in common: the output layer, the loss, and the interface of training and generation.

Dimensions in comments: B sequences, T tokens, E width, V vocabulary; Q new tokens.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpt2.model import fp8
from gpt2.model.cache import Cache
from gpt2.model.loss import capped, chunked_cross_entropy, cross_entropy, padding_bias, soft_cap
from kmatrix.shapes import ModelShape, loss_rows, padded


class Linear(nn.Linear):
    """A linear layer without initialization: each model initializes all weights from its own generator."""

    fp8 = False  # products in 8-bit floats, under autocast in training

    # torch would draw weights here that the model overwrites: seconds for a large one, and global random numbers.
    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        # An evaluation is in bfloat16, as nanochat's: losses with and without FP8 are measured alike.
        if self.fp8 and self.training and torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):  # every dtype is chosen there
                return fp8.linear(x, self.weight, self.bias)
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding without initialization: each model initializes all weights from its own generator."""

    def reset_parameters(self) -> None:
        pass


class LanguageModel(nn.Module):
    """A decoder-only language model: token embedding `wte`, blocks `h`, and an output layer.

    dropout: probability.  vocab_multiple: pads the vocabulary to a multiple of this; padding tokens have probability 0,
    so the loss equals that of the unpadded model.
    recompute: activation checkpointing (Chen et al. 2016, arXiv:1604.06174).
    loss_chunk: rows of logits computed at once (kmatrix.shapes.loss_rows); 0: the default, -1: all.
    bf16_stream: the residual stream is bfloat16 under autocast, not 32-bit.
    fp8: the products of the blocks' layers are in 8-bit floats under autocast in training.
    """

    padding_bias: Tensor | None

    def __init__(
        self,
        shape: ModelShape,
        *,
        seed: int = 1337,  # noqa: ARG002  (for the weights, which subclasses draw)
        dropout: float = 0.0,
        vocab_multiple: int = 1,
        recompute: bool = False,
        loss_chunk: int = 0,
        bf16_stream: bool = False,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.recompute, self.loss_chunk = recompute, loss_chunk
        self.bf16_stream, self.fp8 = bf16_stream, fp8
        rows = padded(shape.vocab_size, vocab_multiple)  # V padded: GPUs prefer 50304 to 50257 (nanoGPT)
        self.wte = Embedding(rows, shape.n_embd)
        # Not persistent: constants do not belong into checkpoints, and would tie them to the size of the blocks.
        self.register_buffer("padding_bias", padding_bias(shape.vocab_size, rows), persistent=False)

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """Weights of the output layer: (padded V, E)."""

    @abstractmethod
    def residual_stream(self, idx: Tensor) -> Tensor:
        """Return the residual stream after the last norm, for tokens (B, T): (B, T, E)."""

    @abstractmethod
    def extend(self, idx: Tensor, cache: Cache) -> Tensor:
        """Process new tokens (B, Q), and return the last logits: (B, V).

        The model must be in evaluation mode. Raises ValueError if a sequence outgrows the context.
        """

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Return (logits, None), or with targets (losses, loss): the mean cross-entropy in fp32, in nats.

        idx, targets: tokens, (B, T), T at most the block size.  logits: (B, T, V), V without padding.
        losses: of each target, (B T,), or None if gradients are computed.
        """
        x = self.residual_stream(idx)  # (B, T, E)
        if targets is None:
            return self.logits(x), None
        cap = self.shape.logit_softcap or 0.0
        rows, labels = x.view(-1, x.shape[-1]), targets.reshape(-1)  # (B T, E) and (B T,)
        if chunk := self._chunk_rows(x):
            return chunked_cross_entropy(rows, self.head, self.padding_bias, labels, chunk, cap)
        if cap:  # a slice of the capped logits would get a gradient in 32 bits of its own, the largest tensor of all
            return cross_entropy(capped(functional.linear(rows, self.head), self.padding_bias, cap), labels)
        # A bias of -inf instead of a slice: slicing the logits would copy the largest tensor of the step.
        # 32 bits also under autocast: bfloat16 has 8 significant bits, too few for a sum over the vocabulary.
        return cross_entropy(functional.linear(rows, self.head, self.padding_bias).float(), labels)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) after the residual stream (..., E); in fp32 if they are capped."""
        logits = functional.linear(x, self.head)[..., : self.shape.vocab_size]
        return soft_cap(logits.float(), self.shape.logit_softcap) if self.shape.logit_softcap else logits

    def stream(self, x: Tensor) -> Tensor:
        """Return the start of the residual stream (B, T, E) in its precision: the blocks keep it."""
        return x.to(torch.bfloat16) if self.bf16_stream and torch.is_autocast_enabled(x.device.type) else x

    def select_fp8(self) -> None:
        """Compute the suitable layers of the blocks in 8-bit floats, if the model is to. Subclasses call it at last."""
        for name, layer in self.named_modules():
            if self.fp8 and "h" in name.split(".") and isinstance(layer, Linear):
                layer.fp8 = fp8.suits(layer)

    def run_block(self, block: nn.Module, *arguments: object) -> Tensor:
        """Return the output of a block, which is recomputed in the backward pass with activation checkpointing."""
        if self.recompute and self.training and torch.is_grad_enabled():
            # use_reentrant=False, as torch recommends. Recomputed dropout masks are the same.
            output: Tensor = checkpoint(block, *arguments, use_reentrant=False)
        else:
            output = block(*arguments)
        return output

    def _chunk_rows(self, x: Tensor) -> int:
        """Return how many rows of logits to compute at once, 0 for all: as configured, or the default."""
        cpu = x.device.type == "cpu"
        if cpu and not self.loss_chunk and not torch.is_grad_enabled():
            return 0  # the default on the CPU is for its speed in training
        return loss_rows(
            self.loss_chunk,
            tokens=x.shape[0] * x.shape[1],
            width=x.shape[-1],
            vocab_size=self.shape.vocab_size,
            cpu=cpu,
            compiled=torch.compiler.is_compiling(),
        )
