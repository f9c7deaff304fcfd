"""Adafactor without waits computes what PyTorch's does, from the same states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpt2.model.gpt2 import GPT
from gpt2.optim import adafactor
from gpt2.optim.adafactor import Adafactor
from optim_factory import SHAPE, loss_of

# Square, wide, tall, with a dimension of 1, a vector, a single number, a matrix whose update is clipped.
SHAPES = ((12, 12), (5, 33), (33, 5), (1, 7), (7, 1), (13,), (1,), (64, 32))


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def groups(parameters, decay):
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim == 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def take_steps(optimizer, parameters, steps):
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.3 / (step + 1)  # above and below 1 / sqrt(step)
        for parameter, grad in zip(parameters, drawn(step + 1), strict=True):
            parameter.grad = grad * (50 if step % 7 == 6 else 1)  # spikes, which are clipped
        optimizer.step()


def two(decay=0.0, **options):
    """Return the parameters and optimizers of PyTorch's form and of ours."""
    found = []
    for kind in (torch.optim.Adafactor, Adafactor):
        parameters = [nn.Parameter(tensor) for tensor in drawn(0)]
        found.append((parameters, kind(groups(parameters, decay), **options)))
    return found


def assert_near(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.allclose(a, b, rtol=2e-5, atol=2e-6 * float(b.detach().abs().max()))


@pytest.mark.parametrize("options", [{}, {"d": 3.0, "beta2_decay": -0.5}, {"eps": (1e-4, 0.5)}])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weights_and_states_after_50_steps_are_pytorchs_up_to_rounding(decay, options):
    (their_weights, theirs), (our_weights, ours) = two(decay, **options)

    for parameters, optimizer in ((their_weights, theirs), (our_weights, ours)):
        take_steps(optimizer, parameters, range(50))

    assert_near(our_weights, their_weights)
    for our, their in zip(our_weights, their_weights, strict=True):
        assert ours.state[our].keys() == theirs.state[their].keys()
        assert_near(ours.state[our].values(), theirs.state[their].values())


def test_the_bound_on_memory_divides_a_step_without_another_result(monkeypatch):
    found = []
    for bound in (1, 1000, 1 << 27):  # bytes: each tensor on its own, some together, all
        monkeypatch.setattr(adafactor, "BATCH", bound)
        model = GPT(SHAPE)
        optimizer = Adafactor(model.parameters())
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
        found.append([parameter.detach() for parameter in model.parameters()])

    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
