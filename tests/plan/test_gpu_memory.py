"""The planned memory on GPUs compared with traced peaks (tests/fixtures/gpu_memory.json; no GPU was used)."""

from __future__ import annotations

import json

import pytest

from factories import ROOT, train_config
from kmatrix.plan.memory import memory
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape

POINTS = json.loads((ROOT / "tests" / "fixtures" / "gpu_memory.json").read_text(encoding="utf-8"))
WITHIN = 0.10


def gib(shape, batch, **changes):
    """Return the planned peak on one GPU in GiB."""
    train = train_config(batch_size=batch, dtype="bf16", device="cuda", vocab_multiple=64, **changes)
    return memory(shape, train).total / 2**30


def named(name):
    layers, heads, width = NAMED[name]
    return ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=GPT2_VOCAB)


def label(point):
    words = [point.get("model", point.get("arch")), point.get("micro_batch", point.get("batch"))]
    extra = {"vocab": "vocabulary"}
    return "-".join(map(str, words + [f"{text}{point[name]}" for name, text in extra.items() if name in point]))


@pytest.mark.parametrize("point", POINTS["eager"], ids=label)
def test_the_planned_peak_is_within_10_percent_of_the_traced_one(point):
    planned = gib(named(point["model"]), point["micro_batch"], loss_chunk=-1)  # traced with all logits at once
    assert planned == pytest.approx(point["gib"], rel=WITHIN)


@pytest.mark.parametrize("point", POINTS["compiled"], ids=label)
def test_the_planned_peak_of_a_compiled_model_is_within_10_percent_of_the_traced_one(point):
    shape = ModelShape(
        arch=point["arch"],
        n_layer=point["layers"],
        n_head=point["heads"],
        n_embd=point["width"],
        block_size=point["context"],
        vocab_size=point["vocab"],
        **point.get("parts", {}),
    )
    precision = {name: point.get(name, False) for name in ("bf16_stream", "fp8")}
    planned = gib(shape, point["batch"], compile=True, **precision)
    assert planned == pytest.approx(point["gib"], rel=WITHIN)


def test_the_backward_pass_frees_the_16_bit_copies_before_all_gradients_exist():
    """With one sequence, the end of the backward pass is the peak of a model with many weights."""
    shape = named("1558m")
    need = memory(shape, train_config(batch_size=1, dtype="bf16", device="cuda", vocab_multiple=64))
    assert need.weights + need.states + need.gradients < need.total
    assert need.total < need.weights + need.states + need.gradients + need.copies


def test_accumulated_gradients_coexist_with_those_of_a_compiled_backward_pass():
    """AOTAutograd returns the gradients of all parameters together, and they are added afterwards."""
    shape = named("1558m")
    for changes in ({"gradient_accumulation": 2}, {"compile_mode": "reduce_overhead"}):
        need = memory(shape, train_config(batch_size=1, dtype="bf16", device="cuda", compile=True, **changes))
        assert need.total >= need.weights + need.states + 2 * need.gradients


def test_without_the_compiler_the_loss_of_large_micro_batches_is_computed_in_chunks():
    """The 8 x H100 defconfig would need 59 GiB without COMPILE, most of it logits."""
    whole, chunked = (gib(named("124m"), 64, loss_chunk=rows) for rows in (-1, 0))
    assert whole > 55
    assert chunked < 30
    assert gib(named("124m"), 64, loss_chunk=8192) == chunked
    small = [gib(named("124m"), 16, loss_chunk=rows) for rows in (-1, 0)]
    assert small[0] == small[1]
    compiled = [gib(named("124m"), 64, loss_chunk=rows, compile=True) for rows in (-1, 0)]
    assert compiled[0] == compiled[1]


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({"bf16_stream": True}, 0.80, 0.92),  # two of seven numbers per layer have half the size
        ({"fp8": True}, 0.6, 0.75),  # the inputs of products are quantized again, not kept
        ({"recompute": True, "recompute_scope": "elementwise"}, 0.6, 0.85),
        ({"recompute": True, "recompute_scope": "blocks"}, 0.1, 0.2),
    ],
)
def test_an_option_saves_its_share_of_the_activations(changes, least, most):
    config = {"batch_size": 8, "dtype": "bf16", "device": "cuda", "compile": True}
    usual, less = (memory(named("350m"), train_config(**config, **more)).activations for more in ({}, changes))
    assert least < less / usual < most
