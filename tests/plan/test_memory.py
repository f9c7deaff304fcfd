"""The planned memory compared with the measured peak of tensors in a step."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from factories import train_config
from gpt2 import model
from gpt2.model import GPT, autocast
from kmatrix.plan.memory import MemoryNeed, memory
from kmatrix.shapes import ModelShape


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
    model = GPT(shape, dropout=train.dropout, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    idx, targets = torch.randint(shape.vocab_size, (2, train.batch_size, shape.block_size))

    def step():
        with autocast("cpu", train.dtype):
            loss = model(idx, targets)[1]
        loss.backward()
        optimizer.step()
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


def sizes(layers, width, block, vocab):
    heads = max(1, width // 64)
    return ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=block, vocab_size=vocab)


def above_weights(planned: MemoryNeed) -> float:
    return planned.total - planned.weights - planned.states


@pytest.mark.parametrize(
    ("shape", "train", "error"),
    [
        (sizes(4, 256, 256, 1024), fields(8), 0.02),
        (sizes(4, 256, 1024, 1024), fields(2), 0.02),
        (sizes(4, 256, 1024, 1024), fields(2, "bf16"), 0.02),
        (sizes(4, 256, 256, 16384), fields(4, "bf16"), 0.02),
        (sizes(4, 256, 256, 1024), fields(4, dropout=0.1), 0.02),
        (sizes(4, 256, 1024, 1024), fields(2, recompute=True), 0.08),
        (sizes(3, 256, 256, 8192), fields(4, "bf16", loss_chunk=128), 0.08),
        (sizes(3, 256, 256, 8192), fields(4, recompute=True, loss_chunk=128), 0.08),
    ],
    ids=["matmul", "flash", "flash-bf16", "wide-vocabulary-bf16", "dropout", "recompute", "chunks", "both"],
)
def test_the_planned_peak_equals_the_measured_peak(shape, train, error, monkeypatch):
    # With AMX, attention is always fused and stores less than planned: the same test on every machine.
    monkeypatch.setattr(model, "_has_amx", lambda: False)
    assert above_weights(memory(shape, train)) == pytest.approx(peak_of_a_step(shape, train), rel=error)


def test_early_gradients_coexist_with_the_activations():
    """With gradient accumulation, and in the buckets of data-parallel training."""
    shape = sizes(4, 256, 256, 1024)
    single = memory(shape, fields(8)).total
    for changes in ({"gradient_accumulation": 2}, {"num_gpus": 2}):
        assert memory(shape, fields(8, **changes)).total == single + 4 * shape.params


def test_a_custom_optimizer_leaves_the_peak_unknown():
    assert memory(sizes(2, 64, 32, 300), fields(1, optimizer="signsgd")).total is None


def test_the_padding_of_the_vocabulary_takes_memory():
    shape = sizes(2, 64, 32, 300)
    assert memory(shape, fields(1, vocab_multiple=128)).weights - memory(shape, fields(1)).weights == 4 * 84 * 64
