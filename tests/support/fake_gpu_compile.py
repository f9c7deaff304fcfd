"""Compile the project's model for an H100 that is not there, and report its graphs as one JSON object.

    python tests/support/fake_gpu_compile.py '{"layers": 12, "heads": 12, "width": 768, "batch": 32}' [FOLDER]

The model goes through Dynamo, AOTAutograd and inductor, as with COMPILE=y; no kernel is run. FOLDER gets the sources of
the wrappers and kernels.
"""

from __future__ import annotations

import collections
import json
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor import async_compile
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses import FakeTensorMode

import fake_cuda
import inductor_wrapper
from gpt2.model import compiled as project_compiler
from gpt2.model.compiled import compile_model
from gpt2.model.precision import autocast
from gpt2.model.registry import MODELS
from kmatrix.shapes import GPT2_VOCAB, ModelShape, padded

OPTIONS: dict[str, Any] = {
    "compile_threads": 1,
    "fx_graph_cache": False,  # a cached graph has no source
    "triton.autotune_at_compile_time": False,
    "max_autotune": False,
    "profile_bandwidth": True,  # states the bytes of each kernel in its source
    "joint_graph_constant_folding": False,  # computes constants on the device
    "shape_padding": False,  # measures products on the device
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model and the step that is compiled."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    batch: int = 32  # sequences
    context: int = 1024  # tokens
    vocab: int = GPT2_VOCAB
    arch: str = "gpt2"
    parts: dict[str, Any] = field(default_factory=dict)  # more fields of ModelShape
    dtype: str = "bf16"
    dropout: float = 0.0
    recompute: bool = False
    loss_chunk: int = 0
    bf16_stream: bool = False
    fp8: bool = False
    evaluate_first: int = 0  # sequences of an evaluation before the step; 0: none

    @property
    def shape(self) -> ModelShape:
        sizes = {"n_layer": self.layers, "n_head": self.heads, "n_embd": self.width}
        return ModelShape(arch=self.arch, block_size=self.context, vocab_size=self.vocab, **sizes, **self.parts)


class Kernel:
    """What a wrapper gets in place of a compiled Triton kernel."""

    def run(self, *_: object, **__: object) -> None:
        raise AssertionError("a kernel was run")


class Compiler:
    """A backend of torch.compile that lets inductor write its code, keeps the code, and returns empty results."""

    def __init__(self) -> None:
        self.kernels: dict[str, str] = {}
        self.wrappers: list[tuple[str, str, str]] = []  # kind, source, readable graph
        self.graphs: list[dict[str, Any]] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        return compile_fx(graph, example_inputs, inner_compile=self.inner)

    def triton(self, name: str, source: str) -> Kernel:
        self.kernels[name] = source
        return Kernel()

    def inner(self, graph: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        kind = "backward" if options.get("is_backward") else "forward"
        if options.get("is_inference"):
            kind = "evaluation"
        source = str(getattr(compile_fx_inner(graph, example_inputs, **options), "source_code", ""))
        self.wrappers.append((kind, source, graph.print_readable(print_output=False)))
        self.graphs.append({"kind": kind, **self._described(graph, source)})
        results = next(node for node in graph.graph.nodes if node.op == "output").args[0]

        def call(values: list[Any]) -> tuple[Any, ...]:
            values.clear()
            return tuple(_empty(node) for node in results)

        call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
        return call

    def _described(self, graph: fx.GraphModule, source: str) -> dict[str, Any]:
        """Return matrix products, attention, kernels and symbolic inputs of a graph."""
        products: collections.Counter[tuple[int, ...]] = collections.Counter()
        attention: collections.Counter[tuple[Any, ...]] = collections.Counter()
        for node in graph.graph.nodes:
            name = str(node.target)
            if name in ("aten.mm.default", "aten.addmm.default"):
                a, b = (argument.meta["val"] for argument in node.args[-2:])
                products[int(a.shape[0]), int(b.shape[1]), int(a.shape[1])] += 1
            elif "scaled_dot_product" in name:
                # The first tensor of the backward operator is a gradient, of the shape of the queries.
                queries = next(a for a in node.args if isinstance(a, fx.Node)).meta["val"]
                attention["backward" if "backward" in name else "forward", *map(int, queries.shape)] += 1
        held = [node for node in graph.graph.nodes if node.op == "placeholder"]
        kernels = inductor_wrapper.launches(source)
        return {
            "products": [[*shape, count] for shape, count in products.items()],  # rows, columns, inner, launches
            "attention": [[*shape, count] for shape, count in attention.items()],  # pass, B, H, T, D, launches
            "kernels": [  # name, bytes per launch, launches
                [name, round(inductor_wrapper.bytes_moved(self.kernels[name])), count]
                for name, count in kernels.items()
            ],
            "extern": len(re.findall(r"^\s+extern_kernels\.\w+\(", source, re.MULTILINE)),
            "symbolic": [node.name for node in held if isinstance(node.meta.get("val"), torch.SymInt)],
        }


def _empty(node: Any) -> Any:
    """Return an empty tensor of the shape of a graph's result."""
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    if isinstance(value, torch.SymInt):
        return int(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = [int(n) for n in value.shape], [int(n) for n in value.stride()]
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def compiled(request: Request) -> tuple[dict[str, Any], Compiler]:
    """Compile forward and backward of one micro-batch; return the report and the compiler with its sources."""
    compiler, started = Compiler(), time.perf_counter()
    with (
        fake_cuda.fake_h100(compiler=True),
        FakeTensorMode(allow_non_fake_inputs=True),
        inductor_config.patch(OPTIONS),
        functorch_config.patch(enable_autograd_cache=False),
        mock.patch.object(
            async_compile.AsyncCompile, "triton", lambda _, name, source, **__: compiler.triton(name, source)
        ),
        mock.patch.object(project_compiler, "BACKEND", compiler),
    ):
        options = {"dropout": request.dropout, "recompute": request.recompute, "loss_chunk": request.loss_chunk}
        options |= {"bf16_stream": request.bf16_stream, "fp8": request.fp8}
        model = fake_cuda.to_gpu(MODELS[request.arch](request.shape, vocab_multiple=64, **options))
        function = compile_model(model, SimpleNamespace(ddp_overlap=False, compile_mode=None))
        if request.evaluate_first:
            model.eval()
            with torch.no_grad(), autocast("cuda", request.dtype):
                function(*fake_cuda.tokens(request.evaluate_first, request.context))
            model.train()
        with autocast("cuda", request.dtype):
            _, loss = function(*fake_cuda.tokens(request.batch, request.context))
        loss.backward()
        missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    counters = torch._dynamo.utils.counters
    return {
        "torch": torch.__version__,
        "request": asdict(request),
        "seconds": round(time.perf_counter() - started, 1),
        "graph_breaks": sum(counters["graph_break"].values()),
        "unique_graphs": counters["stats"].get("unique_graphs"),
        "without_gradient": missing,
        "graphs": compiler.graphs,
        "peak": _peak(request, compiler),
    }, compiler


def _peak(request: Request, compiler: Compiler) -> dict[str, Any]:
    """Return the peak of a step with AdamW in bytes: weights and states, and the buffers of the larger pass."""
    sources = {kind: (source, graph) for kind, source, graph in compiler.wrappers if kind != "evaluation"}
    forward = inductor_wrapper.peak(sources["forward"][0])
    source, graph = sources["backward"]
    # Weights are inputs too, and are counted below; so is the gradient of the loss, a single number.
    saved = {k: v for k, v in inductor_wrapper.inputs(graph).items() if not k.startswith(("primals_", "tangents_"))}
    backward = inductor_wrapper.peak(source, saved)
    weights = 4 * _padded(request).params
    return {
        "total": 3 * weights + max(forward.size, backward.size),
        "forward": forward.size,
        "backward": backward.size,
        "saved": sum(saved.values()),
        "gradients": backward.results,
        "line": max(forward, backward, key=lambda peak: peak.size).line,
    }


def _padded(request: Request) -> ModelShape:
    return replace(request.shape, vocab_size=padded(request.vocab, 64))


def main(argv: list[str]) -> dict[str, Any]:
    report, compiler = compiled(Request(**json.loads(argv[0]) if argv else {}))
    if len(argv) > 1:
        folder = Path(argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.json").write_text(json.dumps(compiler.kernels), encoding="utf-8")
        for number, (kind, source, graph) in enumerate(compiler.wrappers):
            (folder / f"{number}-{kind}.py").write_text(source, encoding="utf-8")
            (folder / f"{number}-{kind}.fx").write_text(graph, encoding="utf-8")
    return report


if __name__ == "__main__":
    fake_cuda.run_program(main)
