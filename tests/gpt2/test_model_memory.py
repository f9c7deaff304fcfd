"""Recomputed blocks and a chunked loss use less memory and give the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanochat_numbers as public
from gpt2.model import loss
from gpt2.model.gpt2 import GPT
from gpt2.model.precision import autocast
from models import SHAPE, _one_thread_and_default_precision, enlarge_weights, random_tokens  # noqa: F401  (a fixture for all)

MODELS = {
    "gpt2": lambda **options: enlarge_weights(GPT(SHAPE, vocab_multiple=64, **options)),
    "dropout": lambda **options: enlarge_weights(GPT(SHAPE, dropout=0.2, **options)),
    "nanochat": lambda **options: public.model_of(public.read("now-gqa"), **options),
    "nanochat2025": lambda **options: public.model_of(public.read("classic-gqa"), **options),
}


def results(model, dtype="fp32"):
    """Return the loss without gradients, and the loss and the gradients of the parameters."""
    idx, targets = random_tokens()
    with autocast("cpu", dtype):
        torch.manual_seed(3)  # of dropout
        with torch.no_grad():
            evaluated = model(idx, targets)[1]
        torch.manual_seed(3)
        loss = model(idx, targets)[1]
    loss.backward()
    return evaluated.item(), loss.item(), [parameter.grad for parameter in model.parameters()]


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


@pytest.mark.parametrize(
    "options",
    [{"recompute": True}, *({"loss_chunk": rows} for rows in (1, 7, 1000)), {"recompute": True, "loss_chunk": 10}],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_what_saves_memory_changes_neither_loss_nor_gradients(name, dtype, options):
    *losses, grads = results(MODELS[name](), dtype)
    *found, others = results(MODELS[name](**options), dtype)
    if "loss_chunk" not in options:
        assert found == losses
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
        return
    assert found == pytest.approx(losses, rel=1e-6 if dtype == "fp32" else 1e-5)
    tolerance = 1e-5 if dtype == "fp32" else 1e-2  # bfloat16 has 8 bits of mantissa in each gradient of the logits
    assert all((a - b).norm() <= tolerance * a.norm() for a, b in zip(grads, others, strict=True))


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
    _, loss, expected_grads = results(enlarge_weights(GPT(SHAPE)))
    compiled = torch.compile(enlarge_weights(GPT(SHAPE, **options)), backend=backend)
    _, compiled_loss, grads = results(compiled)
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    for a, b in zip(expected_grads, grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6)
