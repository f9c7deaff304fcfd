"""The planned memory compared with the measured peak of tensors in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from factories import train_config, with_shape
from gpt2.model.precision import autocast
from gpt2.model.registry import MODELS
from gpt2.norms import LayerNorms
from kmatrix.plan.memory import MemoryNeed, memory
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fields(batch, dtype="fp32", dropout=0.0, **changes):
    return train_config(**{"batch_size": batch, "dtype": dtype, "dropout": dropout} | changes)


def peak_of_a_step(shape, train) -> int:
    """Return the peak of tensor bytes above weights and states in the second step: allocations minus frees."""
    options = {"recompute": train.recompute, "loss_chunk": train.loss_chunk}
    model = MODELS[shape.arch](shape, dropout=train.dropout, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    norms = LayerNorms(model, 1, 1) if train.log_norms else None
    idx, targets = torch.randint(shape.vocab_size, (2, train.batch_size, shape.block_size))

    def step():
        with autocast("cpu", train.dtype):
            loss = model(idx, targets)[1]
        loss.backward()
        if norms:
            norms.begin(0)
        optimizer.step()
        if norms:
            norms.end(0)
        optimizer.zero_grad(set_to_none=True)

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def nanochat(layers, width, block, vocab, arch="nanochat2025", **parts):
    shape = replace(sizes(layers, width, block, vocab), arch=arch, bias=False, weight_tying=False, logit_softcap=15.0)
    return replace(shape, **parts)


ALL_PARTS = {
    "value_embeddings": True,
    "smear": True,
    "backout": True,
    "residual_scales": True,
    "window_pattern": "SSSL",
}


def sizes(layers, width, block, vocab):
    heads = max(1, width // 64)
    return ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=block, vocab_size=vocab)


def above_weights(planned: MemoryNeed) -> float:
    return planned.total - planned.weights - planned.states


STEPS = {
    "short": (sizes(4, 256, 256, 1024), fields(8), 0.02),
    "long": (sizes(4, 256, 1024, 1024), fields(2), 0.02),
    "long-bf16": (sizes(4, 256, 1024, 1024), fields(2, "bf16"), 0.02),
    "recompute": (sizes(4, 256, 1024, 1024), fields(2, recompute=True), 0.08),
    "chunks": (sizes(3, 256, 256, 8192), fields(4, loss_chunk=128), 0.08),
    "both": (sizes(3, 256, 256, 8192), fields(4, recompute=True, loss_chunk=128), 0.08),
    "norms": (sizes(4, 256, 64, 8192), fields(1, log_norms=True), 0.02),
    "nanochat2025": (nanochat(4, 256, 256, 512), fields(8), 0.05),
    "nanochat2025-long": (nanochat(4, 256, 1024, 512), fields(2), 0.05),
    "nanochat2025-grouped": (nanochat(4, 256, 1024, 512, n_kv_head=1), fields(2), 0.05),
    "nanochat": (nanochat(4, 256, 256, 512, "nanochat", **ALL_PARTS), fields(8), 0.08),
    "nanochat-recompute": (nanochat(4, 256, 256, 512, "nanochat", **ALL_PARTS), fields(8, recompute=True), 0.25),
    "nanochat-vocabulary": (nanochat(2, 128, 256, 16384, "nanochat", **ALL_PARTS), fields(4), 0.08),
}

GATE = ("short", "both", "norms", "nanochat-vocabulary")  # one of each kind of model and saving; the others nightly


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in GATE else pytest.mark.nightly) for n in STEPS])
def test_the_planned_peak_equals_the_measured_peak(name, monkeypatch):
    """With attention as on GPUs."""
    monkeypatch.setattr("gpt2.model.attention.by_products", lambda _: False)
    shape, train, error = STEPS[name]
    assert above_weights(memory(with_shape(train, shape))) == pytest.approx(peak_of_a_step(shape, train), rel=error)


def test_early_gradients_coexist_with_the_activations():
    """With gradient accumulation, and in the buckets of data-parallel training."""
    shape = sizes(4, 256, 256, 1024)
    single = memory(with_shape(fields(8), shape)).total
    for changes in ({"gradient_accumulation": 2}, {"num_gpus": 2}):
        assert memory(with_shape(fields(8, **changes), shape)).total == single + 4 * shape.params


def on_gpu(model, batch, **changes):
    """Return the planned memory of a named model on one GPU."""
    layers, heads, width = NAMED[model]
    shape = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=GPT2_VOCAB)
    train = train_config(batch_size=batch, dtype="bf16", device="cuda", vocab_multiple=64, **changes)
    return memory(with_shape(train, shape))


@pytest.mark.parametrize(("changes", "measured"), [({}, 15.1), ({"bf16_stream": True}, 14.4)])
def test_the_planned_peak_of_a_compiled_model_is_that_of_an_h200(changes, measured):
    """GiB: docs/performance.md, "On an H200"."""
    assert on_gpu("124m", 32, compile=True, **changes).total / 2**30 == pytest.approx(measured, rel=0.06)


def test_the_backward_pass_frees_the_16_bit_copies_before_all_gradients_exist():
    """With one sequence, the end of the backward pass is the peak of a model with many weights."""
    need = on_gpu("1558m", 1)
    least = need.weights + need.states + need.gradients
    assert least < need.total < least + need.copies


def test_accumulated_gradients_coexist_with_those_of_a_compiled_backward_pass():
    """AOTAutograd returns the gradients of all parameters together, and they are added afterwards."""
    for changes in ({"gradient_accumulation": 2}, {"compile_mode": "reduce_overhead"}):
        need = on_gpu("1558m", 1, compile=True, **changes)
        assert need.total >= need.weights + need.states + 2 * need.gradients


def test_without_the_compiler_the_loss_of_large_micro_batches_is_computed_in_chunks():
    """The 8 x H100 defconfig would need 59 GiB without COMPILE, most of it logits."""
    whole, chunked = (on_gpu("124m", 64, loss_chunk=rows).total / 2**30 for rows in (-1, 0))
    assert (whole > 55, chunked < 30) == (True, True)
    for batch, compiled in ((16, False), (64, True)):
        assert len({on_gpu("124m", batch, loss_chunk=rows, compile=compiled).total for rows in (-1, 0)}) == 1


def test_fp8_and_recomputation_save_their_share_of_the_activations():
    usual = on_gpu("350m", 8, compile=True).activations
    assert 0.6 < on_gpu("350m", 8, compile=True, fp8=True).activations / usual < 0.75
    assert 0.1 < on_gpu("350m", 8, compile=True, recompute=True).activations / usual < 0.2
