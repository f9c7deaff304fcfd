"""Norms per layer for the log: of the gradients, of the weights, and the root mean square of an update."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

KEPT = 4  # steps that are kept, because the log reads them one step late
KINDS = ("grad_norm", "weight_norm", "update_rms")


class LayerNorms:
    """Measures the norms of logged steps. Call `begin` before the clipping of a step, and `end` after its update.

    A layer is a transformer block (h.0, h.1, ...), or a part outside the blocks (wte, wpe, ln_f, lm_head).
    Weights are copied for one step, which takes the memory of the model; other steps cost nothing.
    """

    def __init__(self, model: nn.Module, every: int, last: int) -> None:
        self.every, self.last = every, last  # steps: the interval of the log, and the last step of the run
        self.layers: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            self.layers.setdefault(layer_of(name), []).append(parameter)
        self._before: list[list[torch.Tensor]] = []
        self._gradients: list[torch.Tensor] = []
        # Values stay on the device until the log reads them, a step later: reading at once would wait for the GPU.
        self._measured: deque[tuple[int, torch.Tensor]] = deque(maxlen=KEPT)

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Measure the gradients of a logged step, and copy its weights; nothing for other steps."""
        self._before = []
        if step % self.every and step != self.last:
            return
        self._before = [[parameter.detach().clone() for parameter in layer] for layer in self.layers.values()]
        self._gradients = [
            norm_of([parameter.grad for parameter in layer if parameter.grad is not None])
            for layer in self.layers.values()
        ]

    @torch.no_grad()
    def end(self, step: int) -> None:
        """Measure the weights and the update of a step that `begin` has measured."""
        if not self._before:
            return
        values = []
        layers = zip(self.layers.values(), self._before, self._gradients, strict=True)
        for layer, before, gradient in layers:
            changes = [now - was for now, was in zip(layer, before, strict=True)]
            count = sum(change.numel() for change in changes)
            values += [gradient, norm_of(list(layer)), norm_of(changes) / count**0.5]
        self._before = []
        self._measured.append((step, torch.stack([value.float() for value in values])))

    def of(self, step: int) -> dict[str, float]:
        """Return the values of a step by key, such as update_rms/h.0; none if it was not measured."""
        values = next((values.tolist() for at, values in self._measured if at == step), [])
        keys = [f"{kind}/{layer}" for layer in self.layers for kind in KINDS]
        return dict(zip(keys, values, strict=False))


def layer_of(name: str) -> str:
    """Return the layer of a parameter by its name: "h.3" or the first part."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "h" else parts[0]


def norm_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all tensors together."""
    return nn.utils.get_total_norm(tensors)
