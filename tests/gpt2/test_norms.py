"""Norms per layer are those of the logged step, computed by hand, and do not change training."""

from __future__ import annotations

import pytest
import torch

from checkpoints import final_of
from factories import make_run
from gpt2.checkpoint import load_checkpoint
from gpt2.model.gpt2 import GPT
from gpt2.norms import LayerNorms
from gpt2.optim.builders import build_optimizers
from optim_factory import SHAPE, Settings, loss_of
from recordings import read_jsonl
from training import train_here


def test_the_norms_of_a_step_are_those_of_its_gradients_weights_and_update():
    model = GPT(SHAPE)
    optimizers, norms = build_optimizers(Settings(), model), LayerNorms(model, every=5, last=7)
    before = [parameter.detach().clone() for parameter in model.h[1].parameters()]
    loss_of(model).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.h[1].parameters()])
    norms.begin(5)
    optimizers.step()
    norms.end(5)

    found = norms.of(5)

    after = list(model.h[1].parameters())
    weights = torch.cat([parameter.detach().flatten() for parameter in after])
    change = torch.cat([(now - was).detach().flatten() for now, was in zip(after, before, strict=True)])
    assert found["grad_norm/h.1"] == pytest.approx(gradients.norm().item(), rel=1e-5)
    assert found["weight_norm/h.1"] == pytest.approx(weights.norm().item(), rel=1e-5)
    assert found["update_rms/h.1"] == pytest.approx(change.square().mean().sqrt().item(), rel=1e-5)
    assert {key.partition("/")[2] for key in found} == {"wte", "wpe", "h.0", "h.1", "ln_f"}


def test_only_logged_steps_are_measured_and_copies_are_released():
    model = GPT(SHAPE)
    norms = LayerNorms(model, every=5, last=7)
    loss_of(model).backward()
    for step in range(8):
        norms.begin(step)
        norms.end(step)

    assert [bool(norms.of(step)) for step in range(8)] == [True, False, False, False, False, True, False, True]
    assert not norms._before


def test_a_run_logs_the_norms_and_trains_as_without_them(tmp_path):
    runs = [make_run(tmp_path / str(norms), max_iters=4, log_norms=norms) for norms in (True, False)]
    assert [train_here(run).returncode for run in runs] == [0, 0]
    logged, plain = ([line for line in read_jsonl(run.metrics) if "train/loss" in line] for run in runs)
    assert len(logged) == 4
    assert all(line["update_rms/h.0"] > 0 and line["grad_norm/wte"] > 0 for line in logged)
    assert not any("update_rms/h.0" in line for line in plain)
    weights = [load_checkpoint(final_of(run.path))["model"] for run in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
