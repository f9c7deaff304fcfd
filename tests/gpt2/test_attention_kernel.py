"""Which attention kernel runs: chosen on GPUs, recorded everywhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

import forked
import gpt2.model.attention_kernel as kernels
from factories import environment, make_run, train_config, trainer
from gpt2.model.gpt2 import GPT
from gpt2.model.registry import build_model
from kmatrix.errors import ConfigError
from kmatrix.records.files import read_json

CUDA = torch.device("cuda")


class Chosen:
    """Stands in for torch.nn.attention.sdpa_kernel."""

    def __init__(self, backends, set_priority=False):
        self.order, self.set_priority = backends, set_priority
        Chosen.newest = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise AssertionError("a choice holds for the whole process")


def test_the_configured_kernel_comes_first_and_the_others_stay_allowed(monkeypatch):
    monkeypatch.setattr(kernels, "sdpa_kernel", Chosen)
    kernels.choose_kernel(train_config(attention_kernel="cudnn"), CUDA)
    assert Chosen.newest.set_priority
    assert Chosen.newest.order[0] is SDPBackend.CUDNN_ATTENTION
    assert set(Chosen.newest.order) == set(kernels.NAMES)
    kernels._CHOSEN.pop_all()


@pytest.mark.parametrize(("wanted", "device"), [("auto", "cuda"), ("cudnn", "cpu")])
def test_without_a_choice_and_on_the_cpu_pytorch_decides(monkeypatch, wanted, device):
    monkeypatch.setattr(kernels, "sdpa_kernel", None)  # would raise
    kernels.choose_kernel(train_config(attention_kernel=wanted), torch.device(device))


def test_a_kernel_whose_package_is_missing_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="attention kernel flash3 cannot be used") as refused:
        kernels.choose_kernel(train_config(attention_kernel="flash3"), CUDA)
    assert "install" in refused.value.hint


def test_a_kernel_that_cannot_compute_the_model_is_refused(monkeypatch):
    config = train_config(attention_kernel="cudnn")
    model = build_model(config)
    monkeypatch.setattr(kernels, "_chosen", lambda *_, **__: "math")
    # Sizes alone count here: the tensors may be on any device.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options | {"device": "cpu"}))
    monkeypatch.setattr(GPT, "attention_path", lambda *_: "sdpa")
    monkeypatch.setattr(kernels, "autocast", lambda *_: torch.no_grad())
    with pytest.raises(ConfigError, match="cudnn cannot compute this model"):
        kernels.kernels_of(model, config, CUDA)
    assert kernels.kernels_of(model, train_config(), CUDA) == {"causal": "math"}


@pytest.mark.process
def test_a_run_records_the_kernel_of_each_kind_of_attention(tmp_path):
    for block_size, expected in ((32, "matmul"), (1024, "flash")):
        run_dir = make_run(
            tmp_path,
            str(block_size),
            block_size=block_size,
            max_iters=1,
            eval_samples=1,
            batch_size=1,
        )
        output = "".join(forked.start(trainer(run_dir), environment()).communicate())
        assert read_json(run_dir.run_used)["attention"] == {"causal": expected}, output


def test_windows_are_recorded_on_their_own():
    parts = {"n_kv_head": 1, "value_embeddings": False, "smear": False, "backout": False, "residual_scales": False}
    more = {"window_pattern": "SL", "qk_scale": 1.0, "rope_base": 1e4, "logit_softcap": 0.0, "norm": "rms"}
    config = train_config(
        **{"arch": "nanochat", "block_size": 1024, "bias": False, "weight_tying": False, "activation": "relu2"},
        **{**parts, **more},
    )
    found = kernels.kernels_of(build_model(config), config, torch.device("cpu"))
    assert set(found) == {"causal", "window"}
