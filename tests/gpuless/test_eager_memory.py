"""The stored peaks of eager steps are those that the double of an H100 traces now, and chunks are planned right."""

from __future__ import annotations

import json

import pytest

from factories import ROOT, train_config
from gpuless import answer
from kmatrix.plan.memory import memory
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape

pytestmark = pytest.mark.gpuless

POINTS = json.loads((ROOT / "tests" / "fixtures" / "gpu_memory.json").read_text(encoding="utf-8"))["eager"]
TRACED = [("124m", 8), ("124m", 32), ("350m", 4), ("350m", 16), ("774m", 4), ("1558m", 1)]


@pytest.mark.parametrize(("name", "batch"), TRACED)
def test_the_stored_peak_is_traced_again(name, batch):
    (stored,) = [point["gib"] for point in POINTS if (point["model"], point["micro_batch"]) == (name, batch)]
    (traced,) = answer("fake_gpu_memory.py", [[name, batch]])
    assert traced["peak"] / 2**30 == pytest.approx(stored, rel=0.01)


@pytest.mark.parametrize(("name", "batch", "chunk"), [("124m", 32, 8192), ("124m", 64, 8192), ("124m", 32, 1024)])
def test_the_planned_peak_with_a_loss_in_chunks_is_near_the_traced_one(name, batch, chunk):
    layers, heads, width = NAMED[name]
    shape = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=GPT2_VOCAB)
    train = train_config(batch_size=batch, dtype="bf16", device="cuda", vocab_multiple=64, loss_chunk=chunk)
    (traced,) = answer("fake_gpu_memory.py", [[name, batch, chunk]])
    assert memory(shape, train).total == pytest.approx(traced["peak"], rel=0.10)
