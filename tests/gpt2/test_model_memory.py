"""Recomputed blocks and a chunked loss use less memory and give the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.model import loss
from gpt2.model.gpt2 import GPT
from gpt2.model.precision import autocast
from models import SHAPE, _one_thread_and_default_precision, enlarge_weights, random_tokens  # noqa: F401  (a fixture for all)


def gradients(model, dtype="fp32", seed=3):
    torch.manual_seed(seed)
    idx, targets = random_tokens()
    with autocast("cpu", dtype):
        loss = model(idx, targets)[1]
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


class LargestOutput(TorchDispatchMode):
    """Record the largest number of rows of vocabulary width in the output of any operation."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kmatrix":  # look into our own operators, too
            with self:
                out = getattr(loss, func.overloadpacket.__name__)._init_fn(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (SHAPE.vocab_size,):
                self.rows = max(self.rows, tensor.numel() // SHAPE.vocab_size)
        return out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_recomputed_block_gives_the_same_loss_and_gradients_bit_for_bit(dtype, dropout):
    plain, recompute_model = (
        enlarge_weights(GPT(SHAPE, dropout=dropout, recompute=recompute)) for recompute in (False, True)
    )
    (loss, grads), (loss_again, recomputed) = gradients(plain, dtype), gradients(recompute_model, dtype)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(a, b) for a, b in zip(grads, recomputed, strict=True))


def test_a_recomputed_block_stores_less_for_the_backward_pass():
    def stored_numbers(model):
        sizes = []
        idx, targets = random_tokens()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(idx, targets)
        return sum(sizes)

    parameters = sum(p.numel() for p in GPT(SHAPE).parameters())
    usual, less = stored_numbers(GPT(SHAPE)), stored_numbers(GPT(SHAPE, recompute=True))
    assert less < (usual - parameters) / 2


def test_blocks_are_computed_once_in_evaluation_and_twice_in_training():
    model = GPT(SHAPE, recompute=True)
    calls = []
    model.h[1].register_forward_pre_hook(lambda *_: calls.append(1))
    idx, targets = random_tokens()
    with torch.no_grad():
        model(idx, targets)
    assert len(calls) == 1
    model.eval()
    model(idx, targets)[1].backward()
    assert len(calls) == 2
    model.train()
    model(idx, targets)[1].backward()
    assert len(calls) == 4


@pytest.mark.parametrize("training", [True, False])
def test_with_a_loss_chunk_the_complete_logits_are_never_materialized(training):
    idx, targets = random_tokens(batch=8)
    chunked = GPT(SHAPE, loss_chunk=16)
    unchunked = GPT(SHAPE)
    rows = []
    for each in (unchunked, chunked):
        with torch.set_grad_enabled(training), LargestOutput() as largest:
            each(idx, targets)
        rows.append(largest.rows)
    assert rows == [idx.numel(), 16]


@pytest.mark.parametrize("rows", [1, 5, 72, 1000])
def test_a_loss_chunk_of_any_size_gives_the_same_loss_with_and_without_gradients(rows):
    idx, targets = random_tokens()
    expected = enlarge_weights(GPT(SHAPE))(idx, targets)[1].item()
    model = enlarge_weights(GPT(SHAPE, loss_chunk=rows))
    assert model(idx, targets)[1].item() == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        assert model(idx, targets)[1].item() == pytest.approx(expected, rel=1e-6)


def test_both_options_together_give_the_same_model():
    loss, grads = gradients(enlarge_weights(GPT(SHAPE, vocab_multiple=64)))
    both_loss, both = gradients(enlarge_weights(GPT(SHAPE, vocab_multiple=64, recompute=True, loss_chunk=10)))
    assert both_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for a, b in zip(grads, both, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"recompute": True}, "aot_eager"),  # what breaks a graph breaks it here too, without 30 s of C++ compiler
        ({"loss_chunk": 10}, "aot_eager"),
        ({"recompute": True, "loss_chunk": 10}, "inductor"),
    ],
)
def test_a_compiled_model_supports_both_options(options, backend):
    loss, expected_grads = gradients(enlarge_weights(GPT(SHAPE)))
    compiled = torch.compile(enlarge_weights(GPT(SHAPE, **options)), backend=backend)
    compiled_loss, grads = gradients(compiled)
    assert compiled_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for a, b in zip(expected_grads, grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6)
