"""Read the programs that inductor writes for a GPU: kernel launches, the bytes that they move, and the peak of memory.

Inductor compiles a graph to Triton kernels and a wrapper, a Python function that makes buffers, launches the kernels
in order and deletes each buffer after its last use. The wrapper thus says how much memory a call takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

BLOCK = 512  # bytes: the caching allocator rounds each tensor up to a multiple
SIZES = {  # bytes per element, by the names in wrappers and in graphs
    **{"torch.float64": 8, "torch.int64": 8, "torch.uint64": 8, "torch.float32": 4, "torch.int32": 4},
    **{"torch.bfloat16": 2, "torch.float16": 2, "torch.bool": 1, "torch.uint8": 1, "torch.int8": 1},
    **{"f64": 8, "i64": 8, "u64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "b8": 1, "u8": 1, "i8": 1},
    **{"torch.float8_e4m3fn": 1, "torch.float8_e5m2": 1, "f8e4m3fn": 1, "f8e5m2": 1},
}
MADE = re.compile(r"(\w+) = empty_strided_cuda\(\(([\d, ]*)\), \(([\d, ]*)\), (torch\.\w+)\)")
REUSED = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)\b.*; del (\w+)\s+# reuse")
TAKEN = re.compile(r"(\w+) = (\w+)\[\d+\]$")  # a result of an operator of ATen; the next line states its shape
STATED = re.compile(r"assert_size_stride\((\w+), \(([\d, ]*)\), \(([\d, ]*)\), 'torch\.ops")
LAUNCH = re.compile(r"^\s+(triton_\w+)\.run\(", re.MULTILINE)
MOVED = re.compile(r"'kernel_num_gb': ([\d.e-]+)")  # written with config.profile_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most memory that buffers of one call take."""

    size: int  # bytes
    line: str  # of the wrapper, after which it is taken
    results: int  # bytes of the buffers that the call returns


def launches(wrapper: str) -> dict[str, int]:
    """Return how often each Triton kernel is launched."""
    names = LAUNCH.findall(wrapper)
    return {name: names.count(name) for name in dict.fromkeys(names)}


def bytes_moved(kernel: str) -> float:
    """Return the bytes that one launch reads and writes, from the source of a kernel.

    Raises ValueError if the source does not state them.
    """
    found = MOVED.search(kernel)
    if found is None:
        raise ValueError("the kernel does not state its bytes: compile with profile_bandwidth")
    return float(found[1]) * 1e9


def inputs(graph: str) -> dict[str, int]:
    """Return the bytes of each input of a graph, from its readable form."""
    signature = graph[graph.index("def forward(") :].split("\n", 1)[0]
    shapes = re.findall(r'(\w+): "(\w+)\[([\d, ]*)\]', signature)
    return {name: _rounded(math.prod(_numbers(shape) or [1]) * SIZES[dtype]) for name, dtype, shape in shapes}


def peak(wrapper: str, kept: Mapping[str, int] | None = None) -> Peak:
    """Return the peak of the buffers in one call.

    kept: bytes of inputs that the call may free, such as saved activations.
    """
    live = dict(kept or {})
    most, line, results = sum(live.values()), "start", 0
    stated_next: set[str] = set()
    for text in _body(wrapper):
        if made := MADE.match(text):
            live[made[1]] = _strided(made[2], made[3], SIZES[made[4]])
        elif (reused := REUSED.match(text)) and reused[3] in live:
            live[reused[1]] = live.pop(reused[3])
        elif taken := TAKEN.match(text):
            stated_next.add(taken[1])
        elif (stated := STATED.match(text)) and stated[1] in stated_next:
            # Attention is the only such operator: its output has 4 dimensions and 16 bits, its statistics 3 and 32.
            live[stated[1]] = _strided(stated[2], stated[3], 4 if stated[2].count(",") < 3 else 2)
        elif text.startswith("del "):
            for name in re.findall(r"\w+", text[4:]):
                live.pop(name, None)
        elif text.startswith("return ("):
            results = sum(live[name] for name in set(re.findall(r"\w+", text)) if name in live)
        if (now := sum(live.values())) > most:
            most, line = now, text
    return Peak(size=most, line=line[:100], results=results)


def _body(wrapper: str) -> list[str]:
    """Return the lines of the function that launches the kernels."""
    start = max(wrapper.rfind("def call(self, args):"), wrapper.rfind("def call(args):"))
    if start < 0:
        raise ValueError("this is not a wrapper of inductor: it has no function `call`")
    return [line.strip() for line in wrapper[start:].splitlines()]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _strided(shape: str, stride: str, size: int) -> int:
    extent = 1 + sum((n - 1) * step for n, step in zip(_numbers(shape), _numbers(stride), strict=True))
    return _rounded(extent * size)


def _rounded(size: int) -> int:
    return math.ceil(max(size, 1) / BLOCK) * BLOCK
