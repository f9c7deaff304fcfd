"""Which attention kernel a GPU takes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

import gpt2.model.attention_kernel as kernels
from factories import train_config
from kmatrix.errors import ConfigError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def chosen(monkeypatch):
    """What is set for the whole process, on a GPU whose kernels can compute the model."""
    found = []
    monkeypatch.setattr(kernels, "sdpa_kernel", lambda order, set_priority: found.append((order, set_priority)))
    monkeypatch.setattr(kernels._CHOSEN, "enter_context", lambda _: None)
    monkeypatch.setattr(kernels, "try_kernel", lambda *_: None)
    return found


def test_the_configured_kernel_comes_first_and_the_others_stay_allowed(chosen):
    kernels.choose_kernel(train_config(attention_kernel="cudnn"), CUDA)
    ((order, has_priority),) = chosen
    assert has_priority
    assert order[0] is SDPBackend.CUDNN_ATTENTION
    assert set(order) == set(kernels.OTHERS)


@pytest.mark.parametrize(("wanted", "device"), [("auto", CUDA), ("cudnn", CPU)])
def test_without_a_choice_and_on_the_cpu_pytorch_decides(chosen, wanted, device):
    kernels.choose_kernel(train_config(attention_kernel=wanted), device)
    assert not chosen


def test_a_kernel_whose_package_is_missing_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="attention kernel flash3 cannot be used") as refused:
        kernels.choose_kernel(train_config(attention_kernel="flash3"), CUDA)
    assert "install" in refused.value.hint


def test_a_kernel_that_cannot_compute_the_model_is_found_out_before_training():
    kernels.try_kernel(SDPBackend.FLASH_ATTENTION, train_config(), CPU)
    with pytest.raises(RuntimeError, match="No viable backend"):
        kernels.try_kernel(SDPBackend.CUDNN_ATTENTION, train_config(), CPU)
