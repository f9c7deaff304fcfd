"""The models of nanochat equal the public code, by stored numbers of it, and transformers' NanoChat."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import nanochat_numbers as public
from gpt2.inference.nanochat_layout import nanochat_config, nanochat_to_hugging_face
from gpt2.model.attention import window_mask
from gpt2.model.cache import Cache
from gpt2.model.gpt2 import GPT
from gpt2.model.nanochat import NanoChat
from gpt2.optim.builders import BUILDERS, build_optimizers
from gpt2.optim.muon import Muon
from gpt2.optim.nanochat import NanochatMuon, parameters_by_kind
from kmatrix.depth_rule import EMBEDDING, HEAD, SCALES, SMEAR, START_SCALES, VALUES
from kmatrix.shapes import ModelShape, by_depth
from models import _one_thread_and_default_precision  # noqa: F401  (a fixture for all)
from optim_factory import SHAPE, Settings

# Models of depth 4 take seconds each: they are checked with the slow tests.
NAMES = (*public.VARIANTS, *public.EXACT_ROTARY)
VARIANTS = [pytest.param(name, marks=pytest.mark.nightly) if name.endswith("d4") else name for name in NAMES]
TOLERANCE = 1e-5  # of losses and logits, relative to max(1, |x|); of gradients, relative to their largest entry


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_logits_and_gradients_equal_the_public_code(name, products, monkeypatch):
    monkeypatch.setattr("gpt2.model.attention.by_products", lambda q: products and q.shape[2] <= 256)
    numbers = public.read(name)
    model = public.model_of(numbers)
    idx, targets = public.batch(0, numbers)

    logits = model(idx)[0]
    loss = model(idx, targets)[1]
    loss.backward()

    assert abs(loss.item() - numbers["loss"]) < TOLERANCE * max(1, abs(numbers["loss"]))
    expected = numbers["logits"]
    for position, row in zip(expected["positions"], expected["values"], strict=True):
        for token, value in zip(expected["tokens"], row, strict=True):
            assert abs(logits[0, position, token].item() - value) < TOLERANCE * max(1, abs(value))
    found = {public.public_name(n): p.grad for n, p in model.named_parameters()}
    assert set(found) == set(numbers["gradients"])
    for parameter, wanted in numbers["gradients"].items():
        gradient = found[parameter].reshape(-1)
        # A single number is a sum of 70,000 terms that cancel. The public one is up to 3.8e-5 from its value in 64
        # bits, ours up to 1.1e-4, and both depend on the CPU (measured).
        tolerance = 20 * TOLERANCE if gradient.numel() == 1 else TOLERANCE
        for place, value in zip(wanted["at"], wanted["values"], strict=True):
            assert abs(gradient[place].item() - value) < tolerance * wanted["max"], parameter
        assert gradient.double().norm().item() == pytest.approx(wanted["l2"], rel=tolerance)


def test_a_window_has_one_key_more_than_its_length():
    """The query itself and `window` keys before it: nanochat's short window of 128 lets 129 keys pass."""
    mask = window_mask(128)

    assert (mask == 0).sum(dim=1).tolist() == [129] * len(mask)


@pytest.mark.parametrize("name", ["now-tiny", "now-gqa", "classic-tiny", "classic-gqa", "classic-rope32-gqa"])
@pytest.mark.parametrize("chunk", [9, 4])
def test_greedy_generation_equals_the_public_code_with_the_prompt_in_chunks(name, chunk):
    numbers = public.read(name)
    model, wanted = public.model_of(numbers).eval(), numbers["generation"]
    cache = Cache(model.shape)
    for start in range(0, len(wanted["prompt"]), chunk):
        logits = model.extend(torch.tensor([wanted["prompt"][start : start + chunk]]), cache)
    found, tops = [], []
    for _ in wanted["tokens"]:
        found.append(int(logits.argmax()))
        tops.append(float(logits.max()))
        logits = model.extend(torch.tensor([[found[-1]]]), cache)

    assert found == wanted["tokens"]
    assert tops == pytest.approx(wanted["top_logit"], rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("chunks", [(200,), (1, 199), (130, 1, 69), (64, 64, 64, 8)])
def test_cached_logits_equal_the_full_forward_beyond_the_window_in_any_chunks(chunks):
    """nanochat's own cache loses the smear at the first token of each chunk."""
    model = public.model_of(public.read("now-gqa")).eval()
    idx = public.tokens("cache", (1, sum(chunks)), model.shape.vocab_size)
    with torch.no_grad():
        full = model(idx)[0]
    cache, start = Cache(model.shape), 0
    for size in chunks:
        logits = model.extend(idx[:, start : start + size], cache)
        start += size
        assert torch.allclose(logits, full[:, start - 1], rtol=0, atol=1e-4)


def test_a_cache_that_is_used_again_has_no_smear_from_its_former_text():
    model = public.model_of(public.read("now-tiny")).eval()
    first, second = public.tokens("a", (1, 7), 250), public.tokens("b", (1, 5), 250)
    cache = Cache(model.shape)
    model.extend(first, cache)
    cache.length = 0

    assert torch.allclose(model.extend(second, cache), model(second)[0][:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["now", "classic"])
def test_the_optimizers_equal_the_public_ones_on_given_gradients(variant, monkeypatch):
    numbers = public.read(f"{variant}-optimizer")
    monkeypatch.setattr(Muon, "dtype", torch.float32)  # the stored numbers are of iterations in 32 bits
    parameters = {
        name: nn.Parameter(public.tensor(f"opt:{name}", tuple(shape), 0.0, 0.3))
        for name, shape in numbers["shapes"].items()
    }
    matrices = [p for name, p in parameters.items() if name not in ("table", "vector")]
    adamw, muon = numbers["adamw"], numbers["muon"]
    adam = torch.optim.AdamW([parameters["table"], parameters["vector"]], **{**adamw, "betas": tuple(adamw["betas"])})
    if variant == "now":
        own = NanochatMuon(matrices, parts={}, lr=muon["lr"], weight_decay=0.28)
    else:
        own = Muon(matrices, parts={}, lr=muon["lr"], weight_decay=0.0, momentum=muon["momentum"])
    for step, after in enumerate(numbers["after"]):
        for name, parameter in parameters.items():
            parameter.grad = public.tensor(f"opt:{name}:{step}", tuple(parameter.shape), 0.01, 0.1)
        own.param_groups[0]["momentum"] = numbers["momentum"][step]
        own.step()
        adam.step()
        for name, wanted in after.items():
            flat = parameters[name].detach().reshape(-1)
            found = [float(flat[place]) for place in wanted["at"]]
            assert found == pytest.approx(wanted["values"], rel=1e-5, abs=2e-6), (name, step)
            assert float(flat.double().norm()) == pytest.approx(wanted["l2"], rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("now-gqa", "classic-gqa") else pytest.mark.nightly) for name in NAMES],
)
def test_losses_and_weights_after_steps_of_the_preset_equal_the_public_code(name, monkeypatch):
    numbers = public.read(name)
    training, now = numbers["training"], numbers["variant"] == "now"
    model = public.model_of(numbers)
    if not now:
        monkeypatch.setattr(Muon, "dtype", torch.float32)
    muon, adam = preset_with_rates(model, training["rates"], now=now)
    losses = []
    for step in range(len(training["losses"]) - 1):
        loss = model(*public.batch(step, numbers))[1]
        loss.backward()
        losses.append(loss.item())
        muon.param_groups[0]["momentum"] = 0.85 + 0.01 * step
        muon.step()
        adam.step()
        model.zero_grad()
    losses.append(model(*public.batch(len(losses), numbers))[1].item())

    assert losses == pytest.approx(training["losses"], rel=2e-4, abs=2e-4)
    for parameter, tensor in model.named_parameters():
        wanted = training["parameters"][public.public_name(parameter)]
        assert tensor.detach().double().norm().item() == pytest.approx(wanted["l2"], rel=2e-4, abs=2e-4), parameter


def preset_with_rates(model: NanoChat, rates: dict[str, float], *, now: bool) -> list[torch.optim.Optimizer]:
    """Return the preset with the rates of the stored numbers, a tenth of nanochat's."""
    a = (model.shape.n_embd / 768) ** -0.5
    optimizer = "muon_nanochat" if now else "muon_nanochat2025"
    config = SimpleNamespace(
        optimizer=optimizer,
        learning_rate=rates["matrix_lr"],
        weight_decay=rates["weight_decay"],
        shape=model.shape,
        tokens_per_step=2**19,
        max_iters=1000,
        schedule="constant",
        wsd_decay_fraction=None,
        dtype="fp32",
    )
    muon, adam = BUILDERS[optimizer](config, model)
    muon.param_groups[0]["weight_decay"] = rates["weight_decay"]
    scalar = rates.get("scalar_lr", 0.0)
    wanted = {
        HEAD: rates["unembedding_lr"] * a,
        EMBEDDING: rates["embedding_lr"] * a,
        VALUES: rates["embedding_lr"] * a * 0.5,
        SCALES: scalar * 0.01,
        START_SCALES: scalar,
        SMEAR: 0.2,
    }
    for kind, group in zip(parameters_by_kind(model), adam.param_groups, strict=True):
        group["lr"] = wanted[kind]
    return [muon, adam]


@pytest.mark.parametrize("variant", ["now", "classic"])
def test_parameters_and_flops_of_depth_4_to_32_equal_the_public_code(variant):
    for depth, wanted in public.read(f"{variant}-counts").items():
        if wanted is None:  # the public code refuses this depth
            continue
        now = variant == "now"
        shape = ModelShape(
            arch="nanochat" if now else "nanochat2025",
            n_layer=int(depth),
            n_head=wanted["heads"],
            n_embd=wanted["width"],
            block_size=2048,
            vocab_size=32768 if now else 65536,
            **(public.PARTS if now else {}),
        )
        assert (shape.params, shape.flops_per_token) == (wanted["total"], wanted["flops_per_token"]), depth
        if now:
            assert list(shape.windows) == wanted["windows"]
            assert shape.block_matrices == wanted["transformer_matrices"]
            assert shape.scaling_params == wanted["transformer_matrices"] + wanted["lm_head"]
            assert by_depth(int(depth), 64, 128) == (int(depth), wanted["heads"], wanted["width"])


@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 2}, {"norm": "layer"}, {"smear": False}, {"vocab_size": 251}])
@pytest.mark.parametrize("name", ["now-tiny", "classic-tiny"])
def test_the_model_has_the_parameters_that_its_shape_counts(name, changes):
    shape = replace(public.shape_of(public.read(name)), **changes)

    assert sum(p.numel() for p in NanoChat(shape).parameters()) == shape.params


def test_at_first_the_blocks_add_nothing_and_the_loss_is_that_of_a_uniform_guess():
    shape = public.shape_of(public.read("classic-tiny"))
    model = NanoChat(shape, vocab_multiple=64)
    idx, targets = public.batch(0, public.read("classic-tiny"))

    assert model(idx, targets)[1].item() == pytest.approx(math.log(250), rel=1e-6)
    assert all(not block.mlp.c_proj.weight.any() for block in model.h)


def test_initial_weights_follow_the_rules_of_their_commit():
    now = NanoChat(replace(public.shape_of(public.read("now-d4")), n_layer=6), vocab_multiple=64)
    classic = NanoChat(public.shape_of(public.read("classic-d4")), vocab_multiple=64)
    width = now.shape.n_embd

    assert now.wte.weight.std().item() == pytest.approx(0.8, rel=0.01)
    assert now.lm_head.weight.std().item() == pytest.approx(0.001, rel=0.01)
    assert now.h[0].attn.c_q.weight.std().item() == pytest.approx(width**-0.5, rel=0.02)
    assert now.h[0].mlp.c_fc.weight.abs().max().item() == pytest.approx(0.4 * (3 / width) ** 0.5, rel=0.01)
    assert now.value_embeds["1"].weight.std().item() == pytest.approx(width**-0.5, rel=0.01)
    assert 0 <= now.h[1].attn.ve_gate.weight.min().item() <= now.h[1].attn.ve_gate.weight.max().item() <= 0.02
    assert now.resid_lambdas.tolist() == pytest.approx([1.15, 1.13, 1.11, 1.09, 1.07, 1.05])
    assert now.x0_lambdas.tolist() == pytest.approx([0.20, 0.17, 0.14, 0.11, 0.08, 0.05])
    assert (now.smear_lambda.item(), now.backout_lambda.item()) == (0.0, pytest.approx(0.2))
    assert classic.wte.weight.std().item() == pytest.approx(1.0, rel=0.01)
    assert not classic.lm_head.weight.any()
    assert classic.h[0].attn.c_q.weight.std().item() == pytest.approx(width**-0.5, rel=0.02)
    assert classic.h[0].mlp.c_fc.weight.std().item() == pytest.approx(width**-0.5, rel=0.02)


def test_initial_weights_depend_on_the_seed_and_not_on_the_padding():
    shape = public.shape_of(public.read("now-tiny"))
    plain, padded, other = (NanoChat(shape, **o) for o in ({}, {"vocab_multiple": 64}, {"seed": 2}))

    for (name, a), b in zip(plain.state_dict().items(), padded.state_dict().values(), strict=True):
        assert torch.equal(a, b[: len(a)]), name
    assert not torch.equal(plain.wte.weight, other.wte.weight)


@pytest.mark.parametrize("grouped", [False, True])
def test_logits_loss_and_gradients_equal_those_of_transformers(grouped):
    numbers = public.read("classic-rope32-gqa" if grouped else "classic-rope32-tiny")
    model, twin = public.model_of(numbers), hf_nanochat(public.shape_of(numbers))
    weights = nanochat_to_hugging_face(model.state_dict(), model.shape.vocab_size)
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == ([], [])
    idx, targets = public.batch(0, numbers)
    expected = twin(idx).logits
    loss = model(idx, targets)[1]
    expected_loss = functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    loss.backward()
    expected_loss.backward()

    assert torch.allclose(model(idx)[0], expected, rtol=0, atol=2e-5)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    theirs = dict(twin.named_parameters())
    ours = nanochat_to_hugging_face({n: p.grad for n, p in model.named_parameters()}, model.shape.vocab_size)
    for name, gradient in ours.items():
        wanted = theirs[name].grad
        assert torch.allclose(gradient, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())), name


def hf_nanochat(shape):
    """Return transformers' NanoChatForCausalLM of the same sizes."""
    import transformers

    return transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**nanochat_config(shape)))


def test_the_schedule_of_a_preset_sets_momentum_and_decay_by_the_step():
    optimizers = build_optimizers(Settings(optimizer="muon_nanochat", max_iters=100), GPT(SHAPE))
    muon = optimizers.optimizers[0].param_groups[0]
    first = muon["weight_decay"]
    optimizers.set_scale(0.5, 50)

    assert muon["momentum"] == pytest.approx(0.85 + 0.12 * 50 / 400)
    assert muon["weight_decay"] == pytest.approx(0.5 * first)
    assert optimizers.lr == pytest.approx(0.005)
