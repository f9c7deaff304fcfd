"""Profile some steps of a run, and divide their time among kinds of kernels and the gaps between them.

    python bench/profile.py MODEL=124m BATCH_SIZE=32 DEVICE=cuda COMPILE=y [--first 20] [--steps 3] [--trace FILE]

NAME=VALUE: settings of the run, which is made and trained as in step.py. --first: the first step that is profiled;
compilation, allocation and the warm-up of clocks should be over. The profiler slows down the host, so the gaps are an
upper bound. On the CPU, the own time of operators takes the place of kernels. --trace: keeps the trace, for
ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, machine, options, table
from step import make, settings_of, start

# The first pattern that a name contains decides. nvjet, cutlass, xmma: cuBLAS; sdpa: cuDNN; fmha, flash: torch.
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention|mha_"),
    ("products", r"nvjet|gemm|cutlass|xmma|cublas|splitkreduce|^aten::(?:mm|addmm|bmm|baddbmm|linear|matmul)\b|_mm\b"),
    ("loss", r"log_softmax|nll_loss|cross_entropy|kmatrix.*loss"),
    ("optimizer", r"multi_tensor|adam|foreach|muon|lpnorm|clip|optimizer"),
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|broadcast"),
    ("copies", r"^mem(?:cpy|set)|^aten::(?:copy_|_to_copy|to)\b"),
)
WAITS = re.compile(r"cuda(?:Stream|Device|Event)Synchronize|hip(?:Stream|Device|Event)Synchronize")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LISTED = 12  # kernels, the longest first


class Event(NamedTuple):
    """A kernel, or an operator on the CPU. start, duration: microseconds."""

    name: str
    start: float
    duration: float


def main() -> None:
    args = options(__doc__, "settings", steps=3, first=20, threads=1, trace=Path)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        run_dir = profiled(Path(name), args)
        text = (run_dir / "profile.json").read_text(encoding="utf-8")
    if args.trace:
        args.trace.write_text(text, encoding="utf-8")
    events = json.loads(text)["traceEvents"]
    found = shares(events, args.steps)
    print(machine(), " ".join(args.settings), sep="; ")
    print(f"{found['ms']:.2f} ms per step, {found['kernels']:.0f} kernels, {found['waits']:.1f} waits for the GPU\n")
    rows = [[kind, f"{share:.1%}", f"{share * found['ms']:.2f}"] for kind, share in found["shares"].items()]
    print(table(["part", "share", "ms per step"], rows))
    print("\n" + table(["kernel", "calls per step", "ms per step"], longest(events, args.steps)[:LISTED]))


def profiled(folder: Path, args: argparse.Namespace) -> Path:
    """Train a run with a profile, and return its directory."""
    symbols = settings_of(args.settings, folder, args.threads)
    last = args.first + args.steps
    symbols |= {"MAX_ITERS": str(last + 2), "PROFILE": f"{args.first}:{last}"}
    run_dir = make(ROOT, symbols)
    start(ROOT, run_dir, device=symbols["DEVICE"], threads=args.threads, ranks=int(symbols["NUM_GPUS"]))
    return run_dir


def kind_of(name: str) -> str:
    """Return the kind of a kernel from its name: elementwise if no pattern matches."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "elementwise")


def shares(events: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return the shares of the kinds and of gaps in the time of the steps; kernels, waits and ms per step."""
    kernels = kernels_of(events)
    span = max(event.start + event.duration for event in kernels) - min(event.start for event in kernels)
    times: Counter[str] = Counter()
    for event in own(kernels):
        times[kind_of(event.name)] += event.duration  # type: ignore[assignment]  # microseconds
    found = {kind: time / span for kind, time in times.most_common()} | {"gaps": 1.0 - busy(kernels) / span}
    waits = sum(1 for event in events if WAITS.search(str(event.get("name"))))
    return {"shares": found, "kernels": len(kernels) / steps, "waits": waits / steps, "ms": span / 1e3 / steps}


def longest(events: Sequence[dict[str, Any]], steps: int) -> list[list[str]]:
    """Return name, calls and ms per step of each kernel, the longest first."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in own(kernels_of(events)):
        times[event.name] += event.duration  # type: ignore[assignment]  # microseconds
        calls[event.name] += 1
    return [
        [name[:90], f"{calls[name] / steps:.1f}", f"{time / 1e3 / steps:.3f}"] for name, time in times.most_common()
    ]


def kernels_of(events: Sequence[dict[str, Any]]) -> list[Event]:
    """Return the kernels in order of their start; without any, the operators on the CPU."""
    for categories in (ON_DEVICE, ("cpu_op",)):
        found = [
            Event(str(e["name"]), float(e["ts"]), float(e.get("dur", 0))) for e in events if e.get("cat") in categories
        ]
        if found:
            return sorted(found, key=lambda event: (event.start, -event.duration))
    raise SystemExit("the profile has no kernels and no operators")


def own(events: Sequence[Event]) -> list[Event]:
    """Return the events with the time that no event within them takes. events: in order of their start."""
    found = [list(event) for event in events]
    inside: list[int] = []  # the events that contain the next one, the innermost last
    for at, event in enumerate(events):
        while inside and events[inside[-1]].start + events[inside[-1]].duration <= event.start:
            inside.pop()
        if inside:
            found[inside[-1]][2] -= event.duration  # type: ignore[operator]  # a duration
        inside.append(at)
    return [Event(*values) for values in found]


def busy(events: Sequence[Event]) -> float:
    """Return the microseconds in which at least one event runs. events: in order of their start."""
    total, end = 0.0, float("-inf")
    for event in events:
        until = event.start + event.duration
        total += max(0.0, until - max(event.start, end))
        end = max(end, until)
    return total


if __name__ == "__main__":
    main()
