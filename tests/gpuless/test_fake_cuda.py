"""The double of CUDA: what it says of a torch that it was not written for, and that its parts still fit this one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fake_cuda
from gpuless import ROOT, SUPPORT

pytestmark = pytest.mark.gpuless


def test_another_version_of_torch_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.0+cu999")
    assert "written for torch" in fake_cuda.unsuitable()
    assert "hint: set TESTED" in fake_cuda.unsuitable()
    assert "docs/developing.md" in fake_cuda.unsuitable()


def test_the_cpu_build_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "has no CUDA" in fake_cuda.unsuitable()
    assert "hint: run `make check-gpuless`" in fake_cuda.unsuitable()


def test_this_torch_is_suitable():
    assert fake_cuda.unsuitable() is None


def test_the_version_is_the_pinned_one():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntorch=={fake_cuda.TESTED} " in pins


def test_the_replaced_function_is_found_in_the_headers_of_torch():
    assert fake_cuda.position_of("isBuilt") == 2
    with pytest.raises(RuntimeError, match="has changed"):
        fake_cuda.position_of("noSuchFunction")


def test_a_backward_pass_runs_on_the_double():
    """If this alone fails after an upgrade, the question that autograd asks has changed."""
    program = (
        "import fake_cuda, torch\n"
        "from torch._subclasses import FakeTensorMode\n"
        "with fake_cuda.fake_h100(), FakeTensorMode():\n"
        "    x = torch.ones(2, 2, device='cuda:0', requires_grad=True)\n"
        "    (x @ x).sum().backward()\n"
        "    print(x.grad.device)\n"
        "fake_cuda.leave()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SUPPORT)}, check=False)
    assert done.stdout == "cuda:0\n", done.stderr
