"""The trainer with a compiler that only counts: one line per compiled graph in the file GRAPHS (and the rank).

It compiles nothing, so it needs no C++ compiler and no time; Dynamo and AOTAutograd, which decide how many graphs there
are and which sizes are symbolic, are the real ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from gpt2.model import compiled

FILE = os.environ.get("GRAPHS", "")


def counting(pass_: str, lines: list[dict[str, Any]] | None = None) -> Any:
    """Return a compiler that records each graph of a pass, in a list or in the file."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        symbolic = [str(value) for value in inputs if isinstance(value, torch.SymInt)]
        shapes = (value.shape for value in inputs if isinstance(value, torch.Tensor))
        symbolic += [str(size) for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
        operators = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        line = {"pass": pass_, "symbolic": symbolic, "operators": len(operators)}
        line |= {"names": sorted({name for name in operators if name.startswith("kmatrix.")})}
        if lines is None:
            with Path(f"{FILE}.{os.environ.get('RANK', '0')}").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        else:
            lines.append(line)
        return make_boxed_func(graph.forward)

    return compile_graph


def backend(lines: list[dict[str, Any]] | None = None) -> Any:
    """Return a backend of torch.compile that counts."""
    return aot_autograd(
        fw_compiler=counting("forward", lines),
        bw_compiler=counting("backward", lines),
        inference_compiler=counting("evaluation", lines),
    )


if __name__ == "__main__":
    from gpt2 import train

    compiled.BACKEND = backend()
    train.main()
