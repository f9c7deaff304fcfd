"""Copies of a state: equal tensors in memory of their size, reused, and written as tensors of their own."""

from __future__ import annotations

import io
import mmap

import pytest
import torch

from gpt2.checkpoint.copies import CopyBuffers, buffers
from gpt2.model.gpt2 import GPT
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape


class Pinned:
    """Records the memory that would be registered with CUDA."""

    def __init__(self):
        self.calls = []

    def __call__(self, address, size):
        self.calls.append((address, size))


def state():
    """Return a state with every kind of tensor that a checkpoint has."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {"a": torch.randn(5, 7, generator=generator), "b": torch.randn(3).bfloat16()},
        "lists": [torch.arange(4), (torch.randn(6, 4, generator=generator).T, torch.tensor(3.0))],
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "gaps": torch.randn(4, 4, generator=generator)[:, ::2],
        "step": 7,
    }


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [leaf for item in items for leaf in leaves(item)]


def test_copies_are_equal_and_have_the_order_of_memory_of_their_originals():
    value = state()

    copied = CopyBuffers().of(value)

    assert copied["step"] == 7
    assert isinstance(copied["lists"][1], tuple)
    for copy, original in zip(leaves(copied), leaves(value), strict=True):
        assert torch.equal(copy, original)
        assert copy.dtype == original.dtype
        assert copy.stride() == torch.empty_like(original).stride()
        assert not copy.numel() or copy.data_ptr() != original.data_ptr()


def test_the_next_copy_overwrites_the_memory_of_the_last_and_new_tensors_get_memory():
    copies, value = CopyBuffers(), state()
    first = leaves(copies.of(value))
    value["model"]["a"] += 1
    value["new"] = torch.ones(5, 7)

    second = leaves(copies.of(value))

    assert [tensor.data_ptr() for tensor in second[:-1]] == [tensor.data_ptr() for tensor in first]
    assert torch.equal(second[0], value["model"]["a"])
    assert torch.equal(second[-1], torch.ones(5, 7))


def test_two_tensors_of_one_shape_do_not_share_memory():
    first, second = CopyBuffers().of([torch.zeros(64), torch.ones(64)])

    assert float(first.sum()) == 0
    assert float(second.sum()) == 64


def test_a_copy_is_written_without_the_others_in_its_memory():
    copied = CopyBuffers().of([torch.zeros(100_000), torch.arange(3)])
    file = io.BytesIO()

    torch.save(copied[1], file)

    assert len(file.getvalue()) < 5000  # bytes
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), torch.arange(3))


def test_memory_is_registered_once_as_a_whole():
    pinned = Pinned()

    found = buffers([torch.empty(100), torch.empty(3, 5), torch.empty(7, dtype=torch.uint8)], pinned)

    ((address, size),) = pinned.calls
    assert address % mmap.PAGESIZE == 0
    assert size == 448 + 64 + 64
    assert [tensor.data_ptr() - address for tensor in found] == [0, 448, 512]


def test_a_run_on_the_cpu_registers_nothing():
    pinned = Pinned()

    CopyBuffers(pinned).of(state())

    assert not pinned.calls


@pytest.mark.parametrize("size", ["124m", "350m", "774m", "1558m"])
def test_the_memory_of_a_state_with_adamw_exceeds_its_tensors_by_less_than_a_thousandth(size, monkeypatch):
    layers, heads, width = NAMED[size]
    shape = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=GPT2_VOCAB)
    with torch.device("meta"):
        weights = list(GPT(shape).parameters())
    tensors = [tensor for weight in weights for tensor in (weight, weight, weight, torch.tensor(0.0))]
    sizes = []

    def allocate(_, length):
        sizes.append(length)
        raise MemoryError

    monkeypatch.setattr("gpt2.checkpoint.copies.mmap.mmap", allocate)
    with pytest.raises(MemoryError):
        buffers(tensors, None)

    exact = sum(tensor.nbytes for tensor in tensors)
    assert exact <= sizes[0] < 1.001 * exact
