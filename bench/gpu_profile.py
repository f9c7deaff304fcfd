"""Divide the time of profiled steps among products, attention, loss, optimizer, elementwise kernels and gaps."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The first pattern that a name contains decides. nvjet, cutlass, xmma: cuBLAS; sdpa: cuDNN; fmha, flash: torch.
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention|mha_"),
    ("products", r"nvjet|gemm|cutlass|xmma|cublas|splitkreduce|^aten::(?:mm|addmm|bmm|baddbmm|linear|matmul)\b|_mm\b"),
    ("loss", r"log_softmax|nll_loss|cross_entropy"),
    ("optimizer", r"multi_tensor|adam|foreach|muon|lpnorm|clip|optimizer"),
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|broadcast"),
    ("copies", r"^mem(?:cpy|set)|^aten::(?:copy_|_to_copy|to)\b"),
)
WAITS = re.compile(r"cuda(?:Stream|Device|Event)Synchronize|hip(?:Stream|Device|Event)Synchronize")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ELEMENTWISE = "elementwise"  # all other kernels


class Event(NamedTuple):
    """A kernel, or an operator on the CPU. start, duration: microseconds."""

    name: str
    start: float
    duration: float


def load(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace in Chrome's format."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def kind_of(name: str) -> str:
    """Return the kind of a kernel from its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), ELEMENTWISE)


def shares(events: Iterable[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return the share of each kind in the time of the profiled steps, the number of kernels and of waits per step.

    Without kernels, as on the CPU, the own time of operators takes their place.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = _events(complete, ON_DEVICE) or _events(complete, ("cpu_op",))
    if not kernels:
        return {"shares": {}, "kernels": 0.0, "waits": 0.0, "span_ms": 0.0}
    span = max(event.start + event.duration for event in kernels) - min(event.start for event in kernels)
    times: Counter[str] = Counter()
    for event in own(kernels):
        times[kind_of(event.name)] += event.duration  # type: ignore[assignment]  # microseconds
    found = {kind: time / span for kind, time in times.most_common()}
    found["gaps"] = 1.0 - busy(kernels) / span
    waits = sum(1 for event in complete if WAITS.search(str(event.get("name"))))
    return {"shares": found, "kernels": len(kernels) / steps, "waits": waits / steps, "span_ms": span / 1e3 / steps}


def _events(events: Iterable[dict[str, Any]], categories: Sequence[str]) -> list[Event]:
    found = (event for event in events if event.get("cat") in categories)
    return sorted(
        (Event(str(e["name"]), float(e["ts"]), float(e.get("dur", 0))) for e in found),
        key=lambda e: (e.start, -e.duration),
    )


def own(events: Sequence[Event]) -> list[Event]:
    """Return the events with the time that no event within them takes. events: in order of their start."""
    found = [list(event) for event in events]
    inside: list[int] = []  # the events that contain the next one, the innermost last
    for number, event in enumerate(events):
        while inside and events[inside[-1]].start + events[inside[-1]].duration <= event.start:
            inside.pop()
        if inside:
            found[inside[-1]][2] -= event.duration  # type: ignore[operator]  # a duration
        inside.append(number)
    return [Event(*values) for values in found]


def busy(events: Sequence[Event]) -> float:
    """Return the microseconds in which at least one event runs. events: in order of their start."""
    total, end = 0.0, float("-inf")
    for event in events:
        until = event.start + event.duration
        total += max(0.0, until - max(event.start, end))
        end = max(end, until)
    return total
