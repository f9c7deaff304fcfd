"""Muon in batches: the updates of PyTorch's Muon, few operators, little memory, equal bits with sharded states."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gpt2.model.gpt2 import GPT
from gpt2.optim.builders import build_optimizers
from gpt2.optim.groups import block_matrices, projections
from gpt2.optim.muon import BATCH, Muon, _iterated, batches, iterated
from gpt2.optim.nanochat import POLAR_EXPRESS
from kmatrix.shapes import NAMED, ModelShape
from operators import Operators
from optim_factory import Settings

SHAPES = ((6, 6), (46, 46), (46, 184), (184, 46), (46, 46), (7, 13), (256, 64))


@pytest.fixture(params=[1, 2])
def threads(request):
    """Set the number of PyTorch's threads for a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def updated(kind, shapes, steps=3, **muon):
    """Return matrices after some steps, and their momentum."""
    matrices = [nn.Parameter(matrix) for matrix in drawn(shapes, seed=0)]
    optimizer = kind(matrices, lr=0.02, weight_decay=0.1, **muon)
    for step in range(steps):
        for matrix, grad in zip(matrices, drawn(shapes, seed=step + 1), strict=True):
            matrix.grad = grad
        optimizer.step()
    return [matrix.detach() for matrix in matrices], [optimizer.state[m]["momentum_buffer"] for m in matrices]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ratio", ["original", "match_rms_adamw"])
def test_without_parts_weights_and_momentum_on_the_cpu_are_pytorchs_bit_for_bit(threads, nesterov, ratio):
    options = {"nesterov": nesterov, "adjust_lr_fn": ratio}
    ours = updated(Muon, SHAPES, parts={}, **options)
    theirs = updated(torch.optim.Muon, SHAPES, **options)

    for kind, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kind, other, strict=True))


@pytest.mark.parametrize("ratio", ["original", "match_rms_adamw"])
def test_each_projection_is_updated_like_a_matrix_of_its_own_by_pytorch(threads, ratio):
    fused = nn.Parameter(torch.cat(drawn([(46, 46)] * 3, seed=0)))
    optimizer = Muon([fused], parts={fused: 3}, lr=0.02, weight_decay=0.1, adjust_lr_fn=ratio)
    for step in range(3):
        fused.grad = torch.cat(drawn([(46, 46)] * 3, seed=step + 1))
        optimizer.step()

    expected = updated(torch.optim.Muon, [(46, 46)] * 3, adjust_lr_fn=ratio)[0]
    assert torch.equal(fused.detach(), torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(6, 6), (64, 64), (64, 256), (100, 300)])
def test_the_bits_of_a_matrix_on_the_cpu_do_not_depend_on_the_others_in_its_batch(threads, shape, dtype):
    """With sharded states a rank has some of the matrices. In 32 bits and two threads, MKL rounds one differently."""
    x = torch.stack(drawn([shape] * 4, seed=0))
    x = (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)).to(dtype)

    together = iterated(x, POLAR_EXPRESS)

    for some in (slice(1), slice(1, 3), slice(3, 4)):
        assert torch.equal(iterated(x[some], POLAR_EXPRESS), together[some])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-5), (torch.float32, 1e-5)])
def test_the_batched_products_of_a_gpu_agree_with_single_ones_within_their_rounding(dtype, tolerance):
    x = torch.stack(drawn([(46, 184)] * 3, seed=0))
    x = (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)).to(dtype)

    batched = _iterated(x, POLAR_EXPRESS, torch.bmm, torch.baddbmm)

    assert (batched - iterated(x, POLAR_EXPRESS)).float().norm() < tolerance * batched.float().norm()


@pytest.mark.parametrize(("name", "most"), [("muon", 150), ("muon_nanochat2025", 150), ("muon_nanochat", 290)])
def test_the_operators_of_a_step_on_a_gpu_do_not_grow_with_the_number_of_layers(name, most):
    """Before batches they were 1,892 and 1,146 at 12 layers. Tensors without memory take the path of a GPU."""
    counts = []
    for layers in (2, 12):
        shape = ModelShape(n_layer=layers, n_head=2, n_embd=32, block_size=8, vocab_size=64)
        model = GPT(shape).to("meta")
        optimizer = build_optimizers(Settings(optimizer=name), model).optimizers[0]
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            with Operators() as operators:
                optimizer.step()
        counts.append(operators.total)
    assert counts[0] == counts[1] <= most


@pytest.mark.parametrize("size", ["124m", "1558m"])
def test_batches_hold_every_matrix_once_and_no_more_than_the_bound(size):
    layers, heads, width = NAMED[size]
    with torch.device("meta"):
        model = GPT(ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=8, vocab_size=64))
    matrices = block_matrices(model)
    for matrix in matrices:
        matrix.grad = torch.empty_like(matrix)

    found = list(batches(matrices, projections(model)))

    assert sorted(id(matrix) for batch, _ in found for matrix in batch) == sorted(map(id, matrices))
    assert all(4 * len(batch) * math.prod(batch[0].shape) <= BATCH for batch, _ in found)
    assert all(len({matrix.shape for matrix in batch}) == 1 for batch, _ in found)
    assert len(found) == (4 if size == "124m" else 48)
