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

pytestmark = pytest.mark.gpuless

NANOCHAT = {
    **{"bias": False, "weight_tying": False, "logit_softcap": 15.0, "value_embeddings": True, "smear": True},
    **{"backout": True, "residual_scales": True, "window_pattern": "SL"},
}
SMALL = {"layers": 2, "batch": 8}
LARGER = {"layers": 2, "batch": 16}
REQUESTS: dict[str, dict[str, Any]] = {
    "124m": {},
    "gpt2": LARGER,
    "nanochat": {**SMALL, "arch": "nanochat", "context": 2048, "parts": NANOCHAT},
    "nanochat2025": {
        **{**SMALL, "arch": "nanochat2025"},
        "parts": {"bias": False, "weight_tying": False, "logit_softcap": 15.0},
    },
    "dropout": {**SMALL, "layers": 1, "dropout": 0.1},
    "32 bits": {**SMALL, "layers": 1, "dtype": "fp32"},
    "chunks": {**SMALL, "layers": 1, "loss_chunk": 4096},
    "bf16 stream": {**LARGER, "bf16_stream": True},
    "fp8": {**LARGER, "fp8": True},
    "fp8 and bf16 stream": {**LARGER, "fp8": True, "bf16_stream": True},
    "recomputed blocks": {**LARGER, "recompute": "blocks"},
    "recomputed elementwise": {**LARGER, "recompute": "elementwise"},
    "recomputed dropout": {**SMALL, "layers": 1, "dropout": 0.1, "recompute": "elementwise"},
}
POINTS = json.loads((ROOT / "tests" / "fixtures" / "gpu_memory.json").read_text(encoding="utf-8"))["compiled"]
PEAKS = {  # GiB, of other graphs
    **{"gpt2": 3.17, "bf16 stream": 3.06, "fp8": 2.86, "fp8 and bf16 stream": 2.75},
    **{"recomputed blocks": 2.35, "recomputed elementwise": 2.79},
}
COMPARED = ("layers", "width", "batch", "context", "vocab", "arch", "parts", "bf16_stream", "fp8")  # with a request
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


def backward(report):
    (found,) = [part for part in report["graphs"] if part["kind"] == "backward"]
    return found


def launches(rows):
    """Return the number of products of rows that end with it."""
    return sum(count for *_, count in rows)


def peak(report):
    """Return the peak of a step in GiB."""
    return report["peak"]["total"] / 2**30


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


@pytest.mark.parametrize("name", ["124m", "nanochat", "fp8 and bf16 stream"])
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


@pytest.mark.parametrize("name", ["124m", "nanochat", "nanochat2025"])
def test_the_stored_peak_is_that_of_the_graph(name, graph):
    request = graph(name)["request"]
    (stored_gib,) = [
        point["gib"]
        for point in POINTS
        if {key: {"parts": {}, "bf16_stream": False, "fp8": False, **point}[key] for key in COMPARED}
        == {key: request[key] for key in COMPARED}
    ]
    assert peak(graph(name)) == pytest.approx(stored_gib, rel=0.02)


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_the_one_that_was_traced_before(name, graph):
    assert peak(graph(name)) == pytest.approx(PEAKS[name], rel=0.02)


@pytest.mark.parametrize(("name", "report"), [("124m", "124m-32"), ("gpt2", "2-layers-16"), ("fp8", "2-layers-16-fp8")])
def test_the_graph_moves_no_more_bytes_than_the_stored_one(name, report, graph):
    """Otherwise the prediction in docs/performance.md is too good: bench/roofline.py --trace writes a new report."""
    now, before = work_of(graph(name)), stored(report)
    assert now.bytes_moved <= MORE * before.bytes_moved
    assert now.launches <= MORE * before.launches
    assert now.flops == pytest.approx(before.flops, rel=0.001)


def test_the_logits_of_a_compiled_step_exist_in_16_bits_only(graph):
    folder = graph("124m")["folder"]
    made = re.findall(r"empty_strided_cuda\(\((32768, 50304)\), \([\d, ]*\), (torch\.\w+)\)", sources(folder))
    assert made
    assert {dtype for _, dtype in made} == {"torch.bfloat16"}


def test_a_bf16_stream_moves_less_between_the_products(graph):
    """10.6 % less with two layers; the products and the loss are the same."""
    plain, narrow = (work_of(graph(name)) for name in ("gpt2", "bf16 stream"))
    assert narrow.bytes_moved < 0.9 * plain.bytes_moved
    assert narrow.bytes_of("loss") == plain.bytes_of("loss")
    assert narrow.products == plain.products


@pytest.mark.parametrize("name", ["fp8", "fp8 and bf16 stream"])
def test_with_fp8_only_the_products_of_the_output_layer_are_in_16_bits(name, graph):
    """A layer has four products and their two gradients each."""
    of_blocks = {"forward": 4, "backward": 8}
    for part in graph(name)["graphs"]:
        assert launches(part["products_in_fp8"]) == of_blocks[part["kind"]] * LARGER["layers"]
        assert all(50304 in sides for *sides, _ in part["products"])
    plain = work_of(graph("gpt2")).flops
    in_fp8 = sum(
        2.0 * m * n * k * count for part in graph(name)["graphs"] for m, n, k, count in part["products_in_fp8"]
    )
    assert work_of(graph(name)).flops + in_fp8 == plain


def test_recomputed_blocks_run_their_products_and_attention_again(graph):
    """The result of a block's last product is in the input of the next block, which is kept; not so in the last one."""
    again, once = (launches(backward(graph(name))["products"]) for name in ("recomputed blocks", "gpt2"))
    assert again - once == 4 * LARGER["layers"] - (LARGER["layers"] - 1)
    passes = {kind: count for kind, *_, count in backward(graph("recomputed blocks"))["attention"]}
    assert passes == {"forward": LARGER["layers"], "backward": LARGER["layers"]}


def test_elementwise_recomputation_keeps_products_and_attention(graph):
    for part in ("products", "attention"):
        assert backward(graph("recomputed elementwise"))[part] == backward(graph("gpt2"))[part]


def sources(folder):
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
