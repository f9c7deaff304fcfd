"""Predict step time and MFU on GPUs from compiled graphs, as a band.

    python bench/roofline.py                         # tables, from the reports in bench/graphs
    .venv-cuda/bin/python bench/roofline.py --trace  # writes the reports again (make check-gpuless makes .venv-cuda)

The time of a step is the sum of its parts: matrix products by their tiles, the bytes of all other kernels by the
bandwidth, attention by its FLOPs, the optimizer by its bytes, and a gap between two launches. The rates that a GPU
reaches are judgments, not measurements. DDP, the loader, the host and clocks under a power limit are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT)]

from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape, padded

GRAPHS = ROOT / "bench" / "graphs"
REPORTS: dict[str, dict[str, Any]] = {  # the graphs that are stored, as arguments of tests/support/fake_gpu_compile.py
    "124m-32": {},
    "2-layers-16": {"layers": 2, "batch": 16},
    "124m-32-bf16-stream": {"bf16_stream": True},
    "124m-32-fp8": {"fp8": True},
    "2-layers-16-fp8": {"layers": 2, "batch": 16, "fp8": True},
}
CONTEXT, MULTIPLE = 1024, 64  # tokens per sequence; the vocabulary is padded to a multiple
TILES = ((128, 256), (256, 128), (128, 128))  # rows and columns of a product that one SM computes at once
SMALL_TILE = 1.12  # time of the 128 x 128 tile per FLOP, relative to the larger ones
FILL = 192  # columns of the inner dimension that the start and the end of a tile cost
SPLITS, SHORTEST = (1, 2, 3, 4, 6, 8), 1024  # parts of the inner dimension, and columns that each must have
FP8_SPEED = 1.35  # of the products in blocks, assumed
OPTIMIZER_BYTES = 40  # per parameter: AdamW reads 4 numbers and writes 3, the norm reads 1, clipping reads and writes 1
OPTIMIZER_LAUNCHES = 20
LOGIT_BYTES = 6  # bytes that the loss moves per logit: bf16 is read forward, and read and written once backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, from its data sheet."""

    peak: float  # FLOP/s of dense bfloat16
    bandwidth: float  # bytes/s
    units: int  # SMs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a GPU reaches: judgments, which no measurement of this project supports."""

    products: float  # share of the peak, in the main loop of a large product
    bandwidth: float  # share of the bandwidth
    forward: float  # FLOP/s of causal attention; half of the square counts
    backward: float
    gap: float  # s between two kernels


DEVICES = {
    "H100": Device(peak=989.4e12, bandwidth=3.35e12, units=132),
    "H200": Device(peak=989.4e12, bandwidth=4.8e12, units=132),
    "A100": Device(peak=312e12, bandwidth=2.039e12, units=108),
}
# Attention on Hopper: FlashAttention-3 (arXiv:2407.08608), figure of head size 64, causal, 1k tokens: FA-2 229, cuDNN
# 288, FA-3 265 TFLOP/s forward. The backward rates are guesses.
HOPPER = (
    Rates(products=0.62, bandwidth=0.80, forward=260e12, backward=220e12, gap=2.5e-6),
    Rates(products=0.70, bandwidth=0.87, forward=290e12, backward=270e12, gap=2.0e-6),
    Rates(products=0.78, bandwidth=0.92, forward=320e12, backward=330e12, gap=1.2e-6),
)
AMPERE = (
    Rates(products=0.72, bandwidth=0.80, forward=120e12, backward=90e12, gap=2.5e-6),
    Rates(products=0.80, bandwidth=0.85, forward=135e12, backward=110e12, gap=2.0e-6),
    Rates(products=0.88, bandwidth=0.90, forward=150e12, backward=125e12, gap=1.2e-6),
)
BANDS = {"H100": HOPPER, "H200": HOPPER, "A100": AMPERE}  # low, mid, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the compiled graphs of one micro-batch do."""

    products: tuple[tuple[int, int, int, int], ...]  # rows, columns, inner dimension, launches
    attention: tuple[tuple[str, int, int, int, int, int], ...]  # pass, B, H, T, D, launches
    kernels: tuple[tuple[str, float, int], ...]  # name, bytes per launch, launches

    @property
    def launches(self) -> int:
        """Number of kernels; the backward pass of attention has three."""
        of_attention = sum(count * (3 if kind == "backward" else 1) for kind, *_, count in self.attention)
        return sum(count for *_, count in self.products) + of_attention + sum(count for *_, count in self.kernels)

    @property
    def bytes_moved(self) -> float:
        """Bytes that all kernels but products and attention read and write."""
        return sum(size * count for _, size, count in self.kernels)

    @property
    def flops(self) -> float:
        """FLOPs of the products."""
        return sum(2.0 * m * n * k * count for m, n, k, count in self.products)

    def bytes_of(self, part: str) -> float:
        """Return the bytes of one part: "loss", "casts" (of weights and gradients) or "elementwise"."""
        return sum(size * count for name, size, count in self.kernels if part_of(name) == part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """A change of the program that would make it faster."""

    fp8: bool = False  # the products in blocks are faster by FP8_SPEED, and their factors are quantized
    elementwise: float = 1.0  # share of the bytes between products that is left
    loss: float = 1.0  # share of the bytes of the loss that is left
    optimizer: float = 1.0  # bytes of the optimizer's step, relative to the fused one
    accumulation: int = 1  # micro-batches per step of the optimizer
    gap: float | None = None  # s between two kernels; None: that of the GPU
    attention: tuple[float, float] | None = None  # FLOP/s forward and backward; None: those of the GPU


AS_IT_IS = Means()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time of one micro-batch, with its share of the optimizer's step."""

    parts: Mapping[str, float]  # s
    mfu: float  # 0 to 1
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def part_of(kernel: str) -> str:
    """Return the part of a step to which a Triton kernel belongs, from the operators in its name."""
    if "log_softmax" in kernel:
        return "loss"
    is_cast = kernel.startswith("triton_poi_fused__to_copy_") and "view" not in kernel and "add" not in kernel
    return "casts" if is_cast else "elementwise"


def work_of(report: Mapping[str, Any]) -> Work:
    """Return the work of a report of tests/support/fake_gpu_compile.py."""
    parts = report["graphs"]
    return Work(
        products=tuple(tuple(entry) for part in parts for entry in part["products"]),
        attention=tuple(tuple(entry) for part in parts for entry in part["attention"]),
        kernels=tuple(tuple(entry) for part in parts for entry in part["kernels"]),
    )


def stored(name: str) -> Work:
    """Return the work of a stored report."""
    return work_of(json.loads((GRAPHS / f"{name}.json").read_text(encoding="utf-8")))


def product_seconds(m: int, n: int, k: int, device: Device, rates: Rates, *, speed: float = 1.0) -> float:
    """Return the time of one bfloat16 product (m, k) x (k, n): waves of tiles over the SMs.

    The inner dimension is split if that fills the SMs better, and partial sums then go through the memory in 32 bits.
    Never less than the time to read and write the matrices.  speed: factor of the rate.
    """
    bandwidth, best = device.bandwidth * rates.bandwidth, math.inf
    for rows, columns in TILES:
        for split in SPLITS:
            if split > 1 and k // split < SHORTEST:
                continue
            waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * split / device.units)
            flops = waves * device.units * 2.0 * rows * columns * (k / split + FILL)
            flops *= SMALL_TILE if rows == columns else 1.0
            sums = 0.0 if split == 1 else split * 2 * 4.0 * m * n / bandwidth
            best = min(best, flops / (device.peak * rates.products * speed) + sums)
    return max(best, 2.0 * (m * k + k * n + m * n) / bandwidth)


def predict(  # noqa: PLR0917  (the work, where it is done, and how)
    work: Work, shape: ModelShape, batch: int, device: Device, rates: Rates, means: Means = AS_IT_IS
) -> Prediction:
    """Return the prediction for one micro-batch of `batch` sequences."""
    rows = padded(shape.vocab_size, MULTIPLE)
    parameters = shape.params + (rows - shape.vocab_size) * shape.n_embd
    bandwidth = device.bandwidth * rates.bandwidth
    speed, quantized, launches = (FP8_SPEED, *quantization(shape, batch)) if means.fp8 else (1.0, 0.0, 0.0)
    head = blocks = 0.0
    for m, n, k, count in work.products:
        is_head = rows in (m, n, k)
        seconds = count * product_seconds(m, n, k, device, rates, speed=1.0 if is_head else speed)
        head, blocks = (head + seconds, blocks) if is_head else (head, blocks + seconds)
    forward, backward = means.attention or (rates.forward, rates.backward)
    attention = 0.0
    for kind, b, h, t, d, count in work.attention:
        causal = 2.0 * b * h * t * t * d  # FLOPs of the two products forward, half of the square; backward has five
        attention += count * (2.5 * causal / backward if kind == "backward" else causal / forward)
    gap = rates.gap if means.gap is None else means.gap
    parts = {
        "blocks' products": blocks,
        "head's products": head,
        "attention": attention,
        "loss": work.bytes_of("loss") * means.loss / bandwidth,
        "casts": work.bytes_of("casts") / bandwidth,
        "elementwise": work.bytes_of("elementwise") * means.elementwise / bandwidth,
        "quantization": quantized / bandwidth,
        "optimizer": OPTIMIZER_BYTES * parameters * means.optimizer / bandwidth / means.accumulation,
        "gaps": (work.launches + launches + OPTIMIZER_LAUNCHES / means.accumulation) * gap,
    }
    tokens = batch * shape.block_size
    seconds = sum(parts.values())
    mfu = shape.flops_per_token * tokens / seconds / device.peak
    return Prediction(parts=parts, mfu=mfu, tokens_per_second=tokens / seconds)


def named(name: str) -> ModelShape:
    layers, heads, width = NAMED[name]
    return ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=CONTEXT, vocab_size=GPT2_VOCAB)


def traffic(*, bf16_stream: bool = False) -> tuple[float, float]:
    """Return the bytes between products per token and channel: of a layer, and of the two ends of the model.

    Two stored graphs of different depth give both.
    """
    unit = CONTEXT * 768  # tokens x width per sequence
    deep = stored("124m-32").bytes_of("elementwise") / (32 * unit)
    shallow = stored("2-layers-16").bytes_of("elementwise") / (16 * unit)
    layer = (deep - shallow) / 10
    ends = deep - 12 * layer
    if bf16_stream:
        layer = (stored("124m-32-bf16-stream").bytes_of("elementwise") / (32 * unit) - ends) / 12
    return layer, ends


def quantization(shape: ModelShape, batch: int) -> tuple[float, float]:
    """Return the bytes and the launches that FP8 adds to a micro-batch: largest values, casts, transposed copies.

    Of the bytes of a layer, one part is proportional to the tokens and one to the weights. Graphs of two micro-batches
    give both. The output layer stays in 16 bits.
    """

    def added(name: str, layers: int) -> tuple[float, float]:
        ours, plain = stored(f"{name}-fp8"), stored(name)
        return (ours.bytes_moved - plain.bytes_moved) / layers, (ours.launches - plain.launches) / layers

    (many, launches), (few, _) = added("124m-32", 12), added("2-layers-16", 2)
    by_token = (many - few) / (16 * CONTEXT)  # bytes of a layer of width 768
    of_weights = many - 32 * CONTEXT * by_token
    share = shape.n_embd / 768
    layer = batch * shape.block_size * by_token * share + of_weights * share**2
    return shape.n_layer * layer, shape.n_layer * launches


def work_at(shape: ModelShape, batch: int, *, bf16_stream: bool = False) -> Work:
    """Return the work of a GPT-2 that was not traced: its products exactly, all other bytes by `traffic`."""
    rows, d, layers, vocab = batch * shape.block_size, shape.n_embd, shape.n_layer, padded(shape.vocab_size, MULTIPLE)
    layer, ends = traffic(bf16_stream=bf16_stream)
    matrices = [(out, inner, layers) for out, inner in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))] + [(vocab, d, 1)]
    products = [
        product
        for out, inner, count in matrices
        # forward, the gradient of the input, the gradient of the weights
        for product in ((rows, out, inner, count), (rows, inner, out, count), (out, inner, rows, count))
    ]
    heads = (batch, shape.n_head, shape.block_size, shape.head_dim, layers)
    weights = 12 * layers * d * d + vocab * d
    kernels = (
        ("elementwise", rows * d * (layers * layer + ends), 1),
        ("log_softmax", float(LOGIT_BYTES * rows * vocab), 1),
        ("triton_poi_fused__to_copy_", 12.0 * weights, 1),  # a weight and its gradient: 4 bytes and 2 each
        ("small", 0.0, 28 * layers + 20),
    )
    return Work(products=tuple(products), attention=(("forward", *heads), ("backward", *heads)), kernels=kernels)


GRAPHED = 0.8e-6  # s between two kernels of a CUDA graph
FUSED_LOSS = Means(loss=1 / 6)  # the logits stay in the cache; their gradients alone are written
TOGETHER = replace(FUSED_LOSS, gap=GRAPHED, accumulation=4)
HALVED = replace(TOGETHER, elementwise=0.5)
LADDER: tuple[tuple[str, bool, int, Means], ...] = (  # label, bf16 stream, micro-batch, means
    ("as it is", False, 32, AS_IT_IS),
    ("FP8 in the products of blocks", False, 32, Means(fp8=True)),
    ("residual stream in bf16", True, 32, AS_IT_IS),
    ("loss fused with the output layer", False, 32, FUSED_LOSS),
    ("micro-batch 64", False, 64, AS_IT_IS),
    ("FlashAttention-3", False, 32, Means(attention=(330e12, 330e12))),
    ("4 micro-batches per step", False, 32, Means(accumulation=4)),
    ("CUDA graphs", False, 32, Means(gap=GRAPHED)),
    ("optimizer not fused", False, 32, Means(optimizer=2.2)),
    ("FlashAttention-2", False, 32, Means(attention=(229e12, 190e12))),
    ("bf16 stream, fused loss, CUDA graphs, 4 micro-batches", True, 32, TOGETHER),
    ("the same, half the bytes between products", True, 32, HALVED),
    ("the same with FP8", True, 32, replace(HALVED, fp8=True)),
)
SIZE_TITLES = ("GPU", "model", "micro-batch", "ms", "MFU low", "mid", "high")
LADDER_TITLES = ("124M on an H100", "speed", "MFU low", "mid", "high")
SIZES = (("124m", (16, 32, 64)), ("350m", (8, 16, 32)), ("774m", (4, 8, 16)), ("1558m", (4, 8)))


def band(work: Work, shape: ModelShape, batch: int, gpu: str, means: Means = AS_IT_IS) -> list[Prediction]:
    """Return the predictions low, mid and high."""
    return [predict(work, shape, batch, DEVICES[gpu], rates, means) for rates in BANDS[gpu]]


def percent(predictions: Iterable[Prediction]) -> list[str]:
    return [f"{100 * prediction.mfu:.1f}" for prediction in predictions]


def sizes() -> list[list[str]]:
    """Return the rows of the table of models: GPU, model, micro-batch, step in ms (mid), MFU low, mid, high."""
    rows = []
    for gpu in DEVICES:
        for name, batches in SIZES:
            for batch in batches:
                found = band(work_at(named(name), batch), named(name), batch, gpu)
                rows.append([gpu, name, str(batch), f"{1e3 * found[1].seconds:.1f}", *percent(found)])
    return rows


def ladder() -> list[list[str]]:
    """Return the rows of the table of means at 124M on an H100: label, gain in speed (mid), MFU low, mid, high."""
    shape, rows, base = named("124m"), [], 0.0
    for label, bf16_stream, batch, means in LADDER:
        work = work_at(shape, batch, bf16_stream=bf16_stream)
        found = band(work, shape, batch, "H100", means)
        base = base or found[1].tokens_per_second
        rows.append([label, f"{100 * (found[1].tokens_per_second / base - 1):+.0f} %", *percent(found)])
    return rows


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def trace() -> None:
    """Compile the graphs again and write their reports. Needs torch's CUDA build, and no GPU."""
    program = ROOT / "tests" / "support" / "fake_gpu_compile.py"
    path = os.pathsep.join([str(ROOT / "lib"), str(ROOT), str(program.parent)])
    for name, request in REPORTS.items():
        command = [sys.executable, str(program), json.dumps(request)]
        environ = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, check=True)
        report = json.loads(done.stdout.splitlines()[-1])
        kept = {key: value for key, value in report.items() if key != "seconds"}
        text = json.dumps(kept, indent=1)
        # One line per kernel: a change of one is a change of one line.
        text = re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text)
        (GRAPHS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        work = work_of(report)
        print(f"{name}: {work.launches} launches, {work.bytes_moved / 1e9:.1f} GB, {report['seconds']} s to compile")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Predict step time and MFU on GPUs: not a measurement.")
    parser.add_argument("--trace", action="store_true", help="compile the graphs again (torch's CUDA build, no GPU)")
    if parser.parse_args(argv).trace:
        trace()
    work = stored("124m-32")
    middle = band(work, named("124m"), 32, "H100")[1]
    shares = ", ".join(f"{name} {100 * s / middle.seconds:.1f} %" for name, s in middle.parts.items())
    print("Predictions, not measurements; MFU in percent, low, mid and high.\n")
    print("\n".join(markdown(SIZE_TITLES, sizes())))
    print(f"\n124m at 32 on an H100, mid, from the graph itself: {1e3 * middle.seconds:.1f} ms: {shares}\n")
    print("\n".join(markdown(LADDER_TITLES, ladder())))


if __name__ == "__main__":
    main()
