"""The parts `first` and `chain` of `make bench`: products, a copy and attention alone, each as in a training step.

Dimensions in comments: R rows (tokens), O outputs and I inputs of a layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from gpu_results import FP8_RATIO, FailedError, Item, Scale, Values
from torch.nn import functional
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

from gpt2.model import fp8
from gpt2.model.attention_kernel import FLASH_PACKAGES, KERNELS
from kmatrix.shapes import GPT2_VOCAB, NAMED, ModelShape, padded

MULTIPLE = 64  # of the padded vocabulary
BATCH = 32  # micro-batch of the 124M model, in sequences
LAYERS = ("qkv", "attention projection", "MLP up", "MLP down", "head")
WAYS = ("forward", "by input", "by weight")
COPY_BYTES = 2**30
LEAST_S = 0.2  # s of work that a measurement lasts at least
GROUPS = 5  # the median is that of so many groups of calls
CONTEXT = 1024  # tokens per sequence
TINY = ModelShape(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=500)


def named(name: str) -> ModelShape:
    layers, heads, width = NAMED[name]
    return ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=CONTEXT, vocab_size=GPT2_VOCAB)


def shape_of(scale: Scale) -> tuple[ModelShape, int]:
    """Return the model of the part `first` and its micro-batch in sequences."""
    return (TINY, 2) if scale.tiny else (named("124m"), BATCH)


def layers_of(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each linear layer."""
    d = shape.n_embd
    sizes = ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d), (padded(shape.vocab_size, MULTIPLE), d))
    return dict(zip(LAYERS, sizes, strict=True))


def seconds_of(call: Callable[[], object], scale: Scale) -> float:
    """Return the seconds of a call: the median over groups of calls, by CUDA events on a GPU."""
    for _ in range(3):
        call()
    once = _timed(call, 1, scale)
    least = 0.002 if scale.tiny else LEAST_S
    count = max(1, min(1000, round(least / GROUPS / max(once, 1e-7))))
    return statistics.median(_timed(call, count, scale) for _ in range(GROUPS))


def _timed(call: Callable[[], object], count: int, scale: Scale) -> float:
    if scale.device == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def first(scale: Scale) -> Iterator[Item]:
    """Yield the measurements of the first minute: 15 products in bf16 and 12 in FP8, a copy, attention."""
    shape, batch = shape_of(scale)
    rows = batch * shape.block_size
    yield Item(name="copy", measure=lambda: copy(scale))
    for layer, (outputs, inputs) in layers_of(shape).items():
        for way in WAYS:
            sizes = (rows, outputs, inputs)
            yield Item(name=f"{layer}, {way}", measure=lambda w=way, s=sizes: product(w, s, scale))
    for layer, (outputs, inputs) in layers_of(shape).items():
        if layer == "head":  # stays in bfloat16
            continue
        for way in WAYS:
            sizes = (rows, outputs, inputs)
            yield Item(name=f"{layer}, {way}, FP8", measure=lambda w=way, s=sizes: product_fp8(w, s, scale))
    for kernel in ("auto", *KERNELS):
        yield Item(name=f"attention {kernel}", measure=lambda k=kernel: attention(k, shape, batch, scale))


def copy(scale: Scale) -> Values:
    """Measure a copy within the memory of the device. gbps: bytes read and written, in GB/s."""
    size = 2**20 if scale.tiny else COPY_BYTES
    source = torch.empty(size // 4, device=scale.device, dtype=torch.float32).normal_()
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), scale)
    return {"seconds": seconds, "gbps": 2 * size / seconds / 1e9}


def product(way: str, sizes: tuple[int, int, int], scale: Scale) -> Values:
    """Measure a product of a linear layer in bfloat16, with the layouts of training. sizes: R, O, I."""
    rows, outputs, inputs = sizes
    x, grad, weight = (
        # Random numbers: zeros take less power, and so higher clocks.
        torch.randn(size, device=scale.device, dtype=torch.bfloat16)
        for size in ((rows, inputs), (rows, outputs), (outputs, inputs))
    )
    calls = {
        "forward": lambda: torch.mm(x, weight.t()),  # (R, I) (I, O)
        "by input": lambda: torch.mm(grad, weight),  # (R, O) (O, I)
        "by weight": lambda: torch.mm(grad.t(), x),  # (O, R) (R, I)
    }
    return _rates(seconds_of(calls[way], scale), sizes, scale, 1.0)


def product_fp8(way: str, sizes: tuple[int, int, int], scale: Scale) -> Values:
    """Measure the same product in FP8, of tensors that are FP8 already: quantization is part of the kernels before."""
    if scale.device == "cuda" and torch.cuda.get_device_capability() < fp8.CAPABILITY:
        raise FailedError("this GPU has no FP8 products")
    rows, outputs, inputs = sizes
    a, b = {
        "forward": ((rows, inputs), (outputs, inputs)),
        "by input": ((rows, outputs), (inputs, outputs)),
        "by weight": ((outputs, rows), (inputs, rows)),
    }[way]
    small, large = (
        fp8.quantized(torch.randn(size, device=scale.device, dtype=torch.bfloat16), dtype)
        for size, dtype in ((a, fp8.FORWARD if way == "forward" else fp8.BACKWARD), (b, fp8.FORWARD))
    )
    return _rates(seconds_of(lambda: fp8.product(small, large), scale), sizes, scale, FP8_RATIO)


def _rates(seconds: float, sizes: tuple[int, int, int], scale: Scale, ratio: float) -> Values:
    rows, outputs, inputs = sizes
    flops = 2.0 * rows * outputs * inputs / seconds
    values: Values = {"seconds": seconds, "tflops": flops / 1e12, "sizes": list(sizes)}
    values["share"] = flops / scale.peak / ratio if scale.peak else None
    return values


def mnk(way: str, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return rows, columns and inner dimension of a product. sizes: R, O, I."""
    rows, outputs, inputs = sizes
    return {
        "forward": (rows, outputs, inputs),
        "by input": (rows, inputs, outputs),
        "by weight": (outputs, inputs, rows),
    }[way]


def attention(kernel: str, shape: ModelShape, batch: int, scale: Scale) -> Values:
    """Measure causal attention of one layer, forward and backward, in TFLOP/s; half of the square counts."""
    size = (batch, shape.n_head, shape.block_size, shape.head_dim)
    q, k, v, grad = (torch.randn(size, device=scale.device, dtype=torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    active = False
    try:
        if package := FLASH_PACKAGES.get(kernel):
            activate_flash_attention_impl(package)
            active = True
        seconds = _attention_seconds(kernel, (q, k, v, grad), scale)
    except (ImportError, RuntimeError, ValueError) as error:
        raise FailedError(str(error).split("\n")[0][:100] or type(error).__name__) from error
    finally:
        if active:
            restore_flash_attention_impl()
    causal = 2.0 * batch * shape.n_head * shape.block_size**2 * shape.head_dim
    forward, backward = causal / seconds[0], 2.5 * causal / seconds[1]
    return {"seconds": seconds, "forward_tflops": forward / 1e12, "backward_tflops": backward / 1e12}


def _attention_seconds(kernel: str, tensors: Sequence[torch.Tensor], scale: Scale) -> list[float]:
    """Return the seconds of the forward and of the backward pass."""
    q, k, v, grad = tensors

    def forward() -> torch.Tensor:
        if kernel == "auto":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with sdpa_kernel(KERNELS[kernel]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        ahead = seconds_of(forward, scale)
    out = forward()
    back = seconds_of(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), scale)
    return [ahead, back]


def chain(products: Sequence[tuple[int, int, int, int]], scale: Scale) -> Values:
    """Measure the products of a step one after the other, with nothing between them: the least time of a step.

    products: rows, columns, inner dimension and how often.
    """
    sides = [(m * k, k * n, m * n) for m, n, k, _ in products]
    a, b, c = (torch.randn(max(side[i] for side in sides), device=scale.device, dtype=torch.bfloat16) for i in range(3))

    def call() -> None:
        for m, n, k, count in products:
            left, right, out = a[: m * k].view(m, k), b[: k * n].view(k, n), c[: m * n].view(m, n)
            for _ in range(count):
                torch.mm(left, right, out=out)

    seconds = seconds_of(call, scale)
    flops = sum(2.0 * m * n * k * count for m, n, k, count in products) / seconds
    return {"seconds": seconds, "tflops": flops / 1e12, "share": flops / scale.peak if scale.peak else None}


def show(_: str, values: Values) -> str:
    """Return the line of a measurement for the terminal."""
    if "gbps" in values:
        return f"{values['gbps']:8.0f} GB/s"
    if "forward_tflops" in values:
        return f"{values['forward_tflops']:8.1f} TFLOP/s forward, {values['backward_tflops']:.1f} backward"
    share = f"{100 * values['share']:5.1f} % of the peak" if values.get("share") else "peak unknown"
    return f"{values['tflops']:8.1f} TFLOP/s, {share}"
