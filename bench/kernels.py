"""Measure what a training step is made of, each alone: a copy, products in bf16 and FP8, attention, and the loss.

    python bench/kernels.py [copy] [products] [attention] [loss] [--model 124m] [--batch 32]

The median of groups of calls after a second of work, with mean power and clock of the GPU. --batch: sequences of 1024
tokens. Without a GPU, or with --device cpu, tiny shapes: they show that the program works, and nothing about speed.
Dimensions in comments: R rows (tokens), O outputs and I inputs of a layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from common import POWER, Figures, Sensors, figures_table, machine, options
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.model.gpt2 import GPT
from gpt2.model.precision import autocast, configure_precision
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape, padded, peak_tflops

FORMS = {"ms": ".3f", "TFLOP/s": ",.4g", "GB/s": ",.4g", "peak": ".1%", **POWER}
GROUPS = 5  # of calls: their median counts
WARM_S, LEAST_S = 1.0, 0.3  # s of work before a measurement, for the clock, and of a measurement
TINY_S = 0.002
FP8_RATIO = 2.0  # dense FP8 peak relative to bfloat16, of Hopper and Ada: NVIDIA H100 data sheet
KERNELS = {
    "auto": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


Measured = tuple[str, Figures]  # what was measured, and the columns of FORMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device and the model whose parts are measured."""

    device: str
    shape: ModelShape
    batch: int  # sequences

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.shape.block_size

    @property
    def peak(self) -> float | None:
        """FLOP/s of dense bfloat16; None if the device is unknown."""
        tera = peak_tflops(torch.cuda.get_device_name(), "bf16") if self.device == "cuda" else None
        return None if tera is None else 1e12 * tera

    def random(self, *size: int) -> Tensor:
        """Return random numbers in bfloat16: zeros take less power, and so have higher clocks."""
        return torch.randn(size, device=self.device, dtype=torch.bfloat16)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call: the median over groups of calls."""

        def timed(count: int) -> float:
            begin = time.perf_counter()
            for _ in range(count):
                call()
            if self.device == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - begin) / count

        warm, least = (WARM_S, LEAST_S) if self.device == "cuda" else (TINY_S, TINY_S)
        timed(1)  # compiles
        begin, once = time.perf_counter(), timed(3)
        while time.perf_counter() - begin < warm:
            once = timed(3)
        count = max(1, min(1000, round(least / GROUPS / once)))
        return statistics.median(timed(count) for _ in range(GROUPS))

    def measured(self, name: str, seconds: float, flops: float, ratio: float = 1.0) -> Measured:
        """Return a measurement with its share of the dense peak of the data sheet. ratio: of it to that of bfloat16."""
        share = flops / seconds / self.peak / ratio if self.peak else None
        return name, {"ms": 1e3 * seconds, "TFLOP/s": flops / seconds / 1e12, "peak": share}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = options(__doc__, "parts", model="124m", batch=32, device=device)
    layers, heads, width = NAMED[args.model]
    shape = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=GPT2_VOCAB)
    place = Place(device=args.device, shape=shape, batch=args.batch)
    if args.device == "cpu":
        shape = ModelShape(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=500)
        place = Place(device="cpu", shape=shape, batch=2)
        torch.set_num_threads(1)
    measures = {"copy": copy, "products": products, "attention": attention, "loss": loss}
    rows: dict[str, Figures] = {}
    with Sensors() as sensors:
        print(machine(sensors), f"torch {torch.__version__}, micro-batch {place.batch} of {args.model}", sep=", ")
        for part in args.parts or measures:
            begin = time.time()
            for name, figures in measures[part](place):
                rows[name] = {**figures, **sensors.since(begin)}
                begin = time.time()
    print(figures_table("part", FORMS, rows))


def copy(place: Place) -> Iterator[Measured]:
    """Measure a copy within the memory of the device: bytes read and written. No kernel is faster."""
    size = 2**30 if place.device == "cuda" else 2**20
    source = torch.empty(size // 4, device=place.device, dtype=torch.float32).normal_()
    target = torch.empty_like(source)
    seconds = place.seconds(lambda: target.copy_(source))
    yield "copy", {"ms": 1e3 * seconds, "GB/s": 2 * size / seconds / 1e9}


def layers_of(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each linear layer."""
    d = shape.n_embd
    blocks = {"qkv": (3 * d, d), "attention projection": (d, d), "MLP up": (4 * d, d), "MLP down": (d, 4 * d)}
    return {**blocks, "head": (padded(shape.vocab_size, 64), d)}


def products(place: Place) -> Iterator[Measured]:
    """Measure the products of each linear layer with the layouts of training: bfloat16, and FP8 but for the head."""
    rows, one = place.rows, torch.ones((), device=place.device)
    for layer, (outputs, inputs) in layers_of(place.shape).items():
        has_fp8 = layer != "head" and place.device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
        sides = {  # of a and b in the product a b'
            "forward": ((rows, inputs), (outputs, inputs)),
            "by input": ((rows, outputs), (inputs, outputs)),
            "by weight": ((outputs, rows), (inputs, rows)),
        }
        for way, (left, right) in sides.items():
            name, flops = f"{layer}, {way} {(rows, outputs, inputs)}", 2.0 * rows * outputs * inputs
            # In training, `by input` has its weight and `by weight` both sides the other way round in memory.
            a = place.random(*left) if way != "by weight" else place.random(*left[::-1]).t()
            b = place.random(*right).t() if way == "forward" else place.random(*right[::-1])
            yield place.measured(name, place.seconds(lambda a=a, b=b: torch.mm(a, b)), flops)
            if has_fp8:
                a = a.contiguous().to(torch.float8_e4m3fn if way == "forward" else torch.float8_e5m2)
                b = b.t().contiguous().to(torch.float8_e4m3fn).t()
                product = partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
                yield place.measured(f"{name}, FP8", place.seconds(product), flops, FP8_RATIO)


def attention(place: Place) -> Iterator[Measured]:
    """Measure causal attention of one layer by each kernel: half of the square counts, and backward 2.5 times."""
    shape = place.shape
    size = (place.batch, shape.n_head, shape.block_size, shape.head_dim)
    q, k, v, grad = (place.random(*size) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    causal = 2.0 * place.batch * shape.n_head * shape.block_size**2 * shape.head_dim
    for name, backend in KERNELS.items():

        def forward(backend: SDPBackend | None = backend) -> Tensor:
            if backend is None:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        try:
            with torch.no_grad():
                ahead = place.seconds(forward)
            out = forward()
            back = place.seconds(lambda out=out: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        except RuntimeError as error:
            print(f"attention {name}: {str(error).splitlines()[0][:90]}")
            continue
        for way, seconds, flops in (("forward", ahead, causal), ("backward", back, 2.5 * causal)):
            yield place.measured(f"attention {name}, {way}", seconds, flops)


def loss(place: Place) -> Iterator[Measured]:
    """Measure the output layer with its loss, forward and backward: PyTorch's, and the trainer's compiled and not.

    The trainer's is that of a model without blocks, whose embedding and last norm are part of the time.
    """
    shape = place.shape
    configure_precision(place.device)
    rows, vocab = place.rows, padded(shape.vocab_size, 64)
    flops = 6.0 * rows * vocab * shape.n_embd
    x, head = (place.random(n, shape.n_embd).requires_grad_() for n in (rows, vocab))
    labels = torch.randint(shape.vocab_size, (place.batch, shape.block_size), device=place.device)

    def plain() -> Tensor:
        return functional.cross_entropy(functional.linear(x, head).float(), labels.view(-1))

    model = GPT(replace(shape, n_layer=1), vocab_multiple=64).to(place.device)
    model.h = torch.nn.ModuleList()  # without blocks

    def trainers(inner: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        with autocast(place.device, "bf16"):
            return inner(labels, labels)[1]

    calls: dict[str, Callable[[], Tensor]] = {"PyTorch's": plain, "the trainer's": lambda: trainers(model)}
    if place.device == "cuda":
        compiled, fast = torch.compile(plain), torch.compile(model)
        calls |= {"PyTorch's, compiled": compiled, "the trainer's, compiled": lambda: trainers(fast)}
    for name, call in calls.items():
        seconds = place.seconds(lambda call=call: call().backward())
        yield place.measured(f"head and loss, {name}", seconds, flops)


if __name__ == "__main__":
    main()
