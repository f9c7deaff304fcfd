"""The model equals GPT-2 to the last digit in every way of computing it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import gpt2.model.attention
import gpt2.model.base
import gpt2.model.precision
from gpt2.model.attention import by_products
from gpt2.model.gpt2 import GPT
from gpt2.model.precision import autocast, configure_precision
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape
from models import SHAPE, _one_thread_and_default_precision, enlarge_weights, hf_twin, random_tokens, to_hf  # noqa: F401  (a fixture for all)


@pytest.fixture(params=["products", "sdpa"])
def forced_path(request, monkeypatch):
    """Force each of the two ways to compute attention, whatever the rule would select."""
    monkeypatch.setattr(gpt2.model.attention, "by_products", lambda _: request.param == "products")


@pytest.mark.parametrize("tying", [True, False])
def test_logits_loss_and_gradients_match_transformers(forced_path, tying):
    shape = replace(SHAPE, weight_tying=tying)
    model = enlarge_weights(GPT(shape))
    hf_model = hf_twin(model, shape)
    idx, targets = random_tokens()
    expected = hf_model(idx).logits
    assert expected.std() > 0.3
    assert torch.allclose(model(idx)[0], expected, rtol=0, atol=1e-5)

    loss = model(idx, targets)[1]
    expected_loss = functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    loss.backward()
    expected_loss.backward()
    assert abs(loss.item() - expected_loss.item()) < 1e-5
    twins = dict(hf_model.named_parameters())
    for name, parameter in model.named_parameters():
        expected_grad = twins[to_hf(name, parameter)[0]].grad
        assert torch.allclose(to_hf(name, parameter.grad)[1], expected_grad, rtol=0, atol=1e-5), name
        assert parameter.grad.abs().max() > 1e-4, name


def test_the_activation_is_the_tanh_approximation_of_gelu():
    model = enlarge_weights(GPT(SHAPE))
    x = torch.linspace(-3, 3, 4 * SHAPE.n_embd)[None]
    mlp = model.h[0].mlp
    hidden = mlp.c_fc(x[:, : SHAPE.n_embd])
    tanh = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    assert torch.allclose(mlp(x[:, : SHAPE.n_embd]), mlp.c_proj(tanh), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "count"), [("124m", 124439808), ("350m", 354823168), ("774m", 774030080), ("1558m", 1557611200)]
)
def test_the_named_sizes_have_the_published_number_of_parameters(name, count):
    layers, heads, width = NAMED[name]
    shape = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=GPT2_VOCAB)
    with torch.device("meta"):
        model = GPT(shape, vocab_multiple=64)
    assert sum(p.numel() for p in model.parameters()) - 47 * width == shape.params == count
    assert len(model.wte.weight) == 50304


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tying", [True, False])
def test_the_parameter_count_follows_bias_and_tying(bias, tying):
    shape = replace(SHAPE, bias=bias, weight_tying=tying)
    model = GPT(shape, vocab_multiple=16)
    padding = 3 * SHAPE.n_embd * (1 if tying else 2)
    assert shape.params == sum(p.numel() for p in model.parameters()) - padding
    assert any(name.endswith("bias") for name, _ in model.named_parameters()) == bias


@pytest.mark.parametrize("tying", [True, False])
@pytest.mark.parametrize("multiple", [2, 64, 100])
def test_padding_the_vocabulary_changes_nothing(multiple, tying):
    shape = replace(SHAPE, weight_tying=tying)
    plain, padded = GPT(shape), GPT(shape, vocab_multiple=multiple)
    assert len(padded.wte.weight) % multiple == 0
    for (name, a), b in zip(plain.state_dict().items(), padded.state_dict().values(), strict=True):
        assert torch.equal(a, b[: len(a)]), name
    enlarge_weights(plain), enlarge_weights(padded)
    idx, targets = random_tokens()
    assert padded(idx)[0].shape == (*idx.shape, SHAPE.vocab_size)
    assert torch.allclose(plain(idx)[0], padded(idx)[0], atol=1e-6)
    losses = [model(idx, targets)[1] for model in (plain, padded)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(plain.named_parameters(), padded.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad[: len(a)], atol=1e-6), name
        assert not b.grad[len(a) :].any(), name


def test_the_initial_weights_depend_only_on_the_seed():
    torch.manual_seed(1)
    first = GPT(SHAPE, seed=7)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    same_seed, other_seed = GPT(SHAPE, seed=7, dropout=0.1), GPT(SHAPE, seed=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same_seed.parameters(), strict=True))
    assert not torch.equal(first.wte.weight, other_seed.wte.weight)


def test_the_initial_weights_have_the_distribution_of_gpt2():
    shape = replace(SHAPE, n_embd=128, n_layer=2, vocab_size=2000, block_size=256, weight_tying=False)
    for name, parameter in GPT(shape).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif ".ln_" in f".{name}":
            assert (parameter == 1).all(), name
        else:
            expected = 0.02 / 2 if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.001, name


def test_the_initial_loss_is_that_of_a_uniform_guess():
    idx, targets = random_tokens(batch=16)
    assert GPT(SHAPE)(idx, targets)[1].item() == pytest.approx(math.log(SHAPE.vocab_size), abs=0.05)


def test_attention_is_causal(forced_path):
    model = enlarge_weights(GPT(SHAPE))
    idx, _ = random_tokens()
    changed = idx.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % SHAPE.vocab_size
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])


def test_the_logits_of_a_prefix_are_a_prefix_of_the_logits(forced_path):
    model = enlarge_weights(GPT(SHAPE))
    idx, _ = random_tokens()
    assert torch.allclose(model(idx[:, :7])[0], model(idx)[0][:, :7], atol=1e-5)


def test_with_targets_forward_returns_a_loss_without_them_logits():
    model = GPT(SHAPE)
    idx, targets = random_tokens()
    logits, loss = model(idx, targets)
    assert logits is None
    assert loss.shape == ()
    logits, loss = model(idx)
    assert loss is None
    assert logits.shape == (*idx.shape, SHAPE.vocab_size)


def test_dropout_is_active_only_in_training_and_follows_the_global_seed(forced_path):
    idx, targets = random_tokens()
    plain, dropping = enlarge_weights(GPT(SHAPE)), enlarge_weights(GPT(SHAPE, dropout=0.3))

    def loss_from(seed):
        torch.manual_seed(seed)
        return dropping(idx, targets)[1].item()

    assert loss_from(1) == loss_from(1) != loss_from(2)
    dropping.eval()
    assert dropping(idx, targets)[1].item() == plain(idx, targets)[1].item()


def test_dropout_keeps_the_expected_loss(forced_path):
    idx, targets = random_tokens()
    plain, dropping = enlarge_weights(GPT(SHAPE)), enlarge_weights(GPT(SHAPE, dropout=0.02))
    mean = sum(dropping(idx, targets)[1].item() for _ in range(40)) / 40
    assert mean == pytest.approx(plain(idx, targets)[1].item(), rel=0.02)


def test_bfloat16_is_close_to_fp32_and_its_loss_is_fp32(forced_path):
    model = enlarge_weights(GPT(SHAPE, vocab_multiple=64))
    idx, targets = random_tokens()
    exact = model(idx, targets)[1]
    with autocast("cpu", "bf16"):
        rounded = model(idx, targets)[1]
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=5e-3)
    assert rounded.item() != exact.item()
    rounded.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    with autocast("cpu", "fp32"):
        assert model(idx, targets)[1].item() == exact.item()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_head_is_chunked_if_the_vocabulary_is_much_larger_than_the_width(monkeypatch, dtype):
    shape = replace(SHAPE, vocab_size=40000)
    calls = []
    original = gpt2.model.base.chunked_cross_entropy
    monkeypatch.setattr(gpt2.model.base, "chunked_cross_entropy", lambda *a: calls.append(1) or original(*a))
    model, small = GPT(shape), GPT(SHAPE)
    with autocast("cpu", dtype):
        small(*random_tokens())
        assert not calls
        chunked = model(*random_tokens(shape))[1]
        with torch.no_grad():  # evaluation needs no gradients and computes none
            complete = model(*random_tokens(shape))[1]
    assert calls == [1]
    assert chunked.item() == pytest.approx(complete.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "tokens", "expected"),
    [
        ("cpu", torch.bfloat16, 256, True),
        ("cpu", torch.bfloat16, 257, False),
        ("cpu", torch.float32, 128, True),
        ("meta", torch.bfloat16, 128, False),
    ],
)
def test_products_compute_attention_of_short_texts_on_the_cpu(device, dtype, tokens, expected):
    assert by_products(torch.empty(1, 1, tokens, 2, device=device, dtype=dtype)) == expected


@pytest.mark.parametrize(
    ("device", "has_amx", "expected"), [("cpu", False, "medium"), ("cpu", True, "highest"), ("cuda", False, "high")]
)
def test_products_of_32_bits_are_exact_on_the_cpu_and_tf32_on_gpus(device, has_amx, expected, monkeypatch):
    monkeypatch.setattr("gpt2.model.precision.cpu_info", lambda: "flags : avx512_bf16 amx_bf16" if has_amx else "")
    configure_precision(device)
    assert torch.get_float32_matmul_precision() == expected
