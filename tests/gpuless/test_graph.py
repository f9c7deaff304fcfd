"""The model compiled for an H100: one graph, kernels without spills, and the traffic of the stored report."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from factories import ROOT
from gpuless import answer

sys.path.insert(0, str(ROOT / "bench"))
from roofline import stored, work_of

# One process of xdist has them all, because they share the graphs.
pytestmark = [pytest.mark.gpuless, pytest.mark.xdist_group("graphs")]

NANOCHAT = {
    **{"bias": False, "weight_tying": False, "logit_softcap": 15.0, "value_embeddings": True, "smear": True},
    **{"backout": True, "residual_scales": True, "window_pattern": "SL"},
}
SMALL = {"layers": 2, "batch": 8}
REQUESTS: dict[str, dict[str, Any]] = {
    "124m": {},
    "gpt2": {**SMALL, "batch": 16},
    "nanochat": {**SMALL, "arch": "nanochat", "context": 2048, "parts": NANOCHAT},
    "nanochat2025": {
        **{**SMALL, "arch": "nanochat2025"},
        "parts": {"bias": False, "weight_tying": False, "logit_softcap": 15.0},
    },
    "dropout": {**SMALL, "layers": 1, "dropout": 0.1},
    "32 bits": {**SMALL, "layers": 1, "dtype": "fp32"},
    "chunks": {**SMALL, "layers": 1, "loss_chunk": 4096},
}
POINTS = json.loads((ROOT / "tests" / "fixtures" / "gpu_memory.json").read_text(encoding="utf-8"))["compiled"]
MORE = 1.01  # the traffic that a change may add without a new report


@pytest.fixture(scope="session")
def graph(tmp_path_factory):
    """Return a function from the name of a request to its report, which is made once."""
    known: dict[str, Any] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in known:
            folder = tmp_path_factory.mktemp("graph")
            known[name] = {**answer("fake_gpu_compile.py", REQUESTS[name], folder), "folder": folder}
        return known[name]

    return of


def kinds(report):
    return [part["kind"] for part in report["graphs"]]


def test_every_architecture_is_compiled():
    from gpt2.model.registry import MODELS

    assert set(MODELS) <= set(REQUESTS)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_model_is_one_graph_without_breaks_or_symbolic_sizes(name, graph):
    report = graph(name)
    assert report["unique_graphs"] == 1
    assert report["graph_breaks"] == 0
    assert kinds(report) == ["forward", "backward"]
    assert not any(part["symbolic"] for part in report["graphs"])
    assert report["without_gradient"] == []


@pytest.mark.parametrize("name", ["124m", "nanochat"])
def test_every_kernel_builds_for_the_device_without_spills(name, graph):
    """A spilled register is a trip to memory in the innermost loop."""
    built = answer("cubins.py", graph(name)["folder"] / "kernels.json")
    assert built["failed"] == {}
    assert len(built["kernels"]) > 30
    assert [kernel for kernel in built["kernels"] if kernel["spills"] != 0] == []


def test_an_evaluation_of_another_size_leaves_the_sizes_of_training_constant():
    """By default, torch.compile takes the second size of an input for one of many, and makes general kernels."""
    report = answer("fake_gpu_compile.py", {**SMALL, "layers": 1, "evaluate_first": 12})
    assert kinds(report) == ["evaluation", "forward", "backward"]
    assert not any(part["symbolic"] for part in report["graphs"])


@pytest.mark.parametrize(
    ("name", "point"), [("124m", 0), ("nanochat", 4), ("nanochat2025", 6)], ids=["124m", "nanochat", "nanochat2025"]
)
def test_the_stored_peak_is_that_of_the_graph(name, point, graph):
    assert graph(name)["peak"]["total"] / 2**30 == pytest.approx(POINTS[point]["gib"], rel=0.02)


def test_the_graph_moves_no_more_bytes_than_the_stored_one(graph):
    """Otherwise the prediction in docs/performance.md is too good: bench/roofline.py --trace writes a new report."""
    now, before = work_of(graph("124m")), stored("124m-32")
    assert now.bytes_moved <= MORE * before.bytes_moved
    assert now.launches <= MORE * before.launches
    assert now.flops == pytest.approx(before.flops, rel=0.001)


def test_the_logits_of_a_compiled_step_exist_in_16_bits_only(graph):
    folder = graph("124m")["folder"]
    made = re.findall(r"empty_strided_cuda\(\((32768, 50304)\), \([\d, ]*\), (torch\.\w+)\)", sources(folder))
    assert made
    assert {dtype for _, dtype in made} == {"torch.bfloat16"}


def sources(folder):
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
