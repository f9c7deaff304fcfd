"""A double of torch.cuda: an H100 on which nothing is computed, for torch's CUDA build on a machine without a GPU.

Inside `fake_h100()`, tensors of FakeTensorMode may be on "cuda:0": they have shapes and dtypes, but no values. `Waits`
counts the lines at which a real GPU would make the process wait. A program that has used the double ends with
`leave()`, because the normal end of the interpreter frees what a device would have, and crashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.cuda.amp.common
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
TESTED = "2.13.0"  # the double replaces parts of torch that are not an interface, so it is tied to a version
UPGRADE = 'docs/developing.md, section "The CUDA path without a GPU"'
DEVICE = torch.device("cuda", 0)
# An H100 SXM as its driver describes it.
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=85_017_493_504,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=52_428_800,
    uuid="00000000-0000-0000-0000-000000000000",
    gcnArchName=None,
    is_integrated=0,
    clock_rate=1_980_000,  # kHz
    memory_clock_rate=2_619_000,  # kHz
    memory_bus_width=5120,
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
)


def unsuitable() -> str | None:
    """Return why the double does not work with this torch, with a hint; None if it does."""
    version = torch.__version__.partition("+")[0]
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} has no CUDA: these tests need its CUDA build\n"
            "  hint: run `make check-gpuless`, which installs it into a folder of its own"
        )
    if version != TESTED:
        return (
            f"the double of CUDA was written for torch {TESTED}, and this is {version}\n"
            f"  hint: set TESTED in tests/support/fake_cuda.py to {version}, run `make check-gpuless`, "
            f"and fix what fails: {UPGRADE}"
        )
    if torch.cuda.is_available():
        return "this machine has a GPU: the double would hide it\n  hint: set CUDA_VISIBLE_DEVICES to nothing"
    return None


def leave(code: int = 0) -> NoReturn:
    """End the process without the normal end of the interpreter."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_program(main: Callable[[list[str]], object]) -> NoReturn:
    """Print the JSON of what `main` returns for the arguments of the command line, and end the process."""
    try:
        print(json.dumps(main(sys.argv[1:])))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave()


def line_of_caller() -> str:
    """Return file:line of the innermost frame in the project's code, and of a library's optimizer that it called."""
    frame, library = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith((f"{ROOT}/gpt2/", f"{ROOT}/lib/")):
            return f"{path[len(str(ROOT)) + 1 :]}:{frame.f_lineno}{library}"
        if not library and ("/torch/optim/" in path or "/pytorch_optimizer/" in path):
            library = f" via {path.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the project"


class FakeEvent:
    """torch.cuda.Event with a clock of its own, which each record advances by a millisecond."""

    clock = 0
    waits: Callable[[str], None] = staticmethod(lambda _: None)  # called with each wait

    def __init__(self, *_: object, **__: object) -> None:
        self.recorded = 0

    def record(self, *_: object) -> None:
        FakeEvent.clock += 1
        self.recorded = FakeEvent.clock

    def synchronize(self) -> None:
        FakeEvent.waits("Event.synchronize")

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.recorded - self.recorded)

    def query(self) -> bool:
        return True


class FakeStream:
    """torch.cuda.Stream: every method exists and does nothing, but `synchronize` is a wait."""

    cuda_stream = stream_id = 0
    device = DEVICE

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def synchronize(self) -> None:
        FakeEvent.waits("Stream.synchronize")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class FakeDriver:
    """The driver that Triton compiles for."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        properties = {
            "max_shared_mem": H100.shared_memory_per_block_optin,
            "multiprocessor_count": H100.multi_processor_count,
            "max_num_regs": H100.regs_per_multiprocessor,
            "warpSize": H100.warp_size,
            "sm_clock_rate": H100.clock_rate,
            "mem_clock_rate": H100.memory_clock_rate,
            "mem_bus_width": H100.memory_bus_width,
        }
        self.utils = types.SimpleNamespace(get_device_properties=lambda _: properties)

    def get_current_target(self) -> Any:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda *_, **__: [0.0, 0.0, 0.0]


_referenced: list[object] = []  # by C++ code until the process ends


def position_of(method: str) -> int:
    """Return the position of a method in the table of virtual functions of torch's device hooks.

    Read from the header of the installed torch. A destructor has two entries (Itanium C++ ABI, 2.5.2) and is the first.
    """
    header = Path(torch.__file__).parent / "include" / "ATen" / "detail" / "AcceleratorHooksInterface.h"
    methods = re.findall(r"^\s*virtual [^;{]*?(~?\w+)\(", header.read_text(encoding="utf-8"), re.MULTILINE)
    if not methods[0].startswith("~") or method not in methods:
        raise RuntimeError(f"{header.name} has changed: its methods are {', '.join(methods[:6])} ... ({UPGRADE})")
    return methods.index(method) + 1


def let_autograd_run() -> None:
    """Answer the question of autograd whether a device has a context with no.

    Before it runs a backward pass it asks this of each device, and the CUDA build without a GPU raises
    "hasPrimaryContext expects a valid device index" instead. The object that answers gets a copy of its table of
    virtual functions, in which that function returns false.
    """
    if _referenced:
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    hooks = library._ZN2at6detail12getCUDAHooksEv  # at::detail::getCUDAHooks()
    hooks.restype = ctypes.c_void_p
    first_word = ctypes.cast(hooks(), ctypes.POINTER(ctypes.c_void_p))  # of the object: the address of its table
    word, entries = ctypes.sizeof(ctypes.c_void_p), 128  # more entries than the class has
    table = (ctypes.c_void_p * (entries + 2))()  # two words precede the functions: an offset and the type
    ctypes.memmove(table, first_word[0] - 2 * word, ctypes.sizeof(table))
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_byte)(lambda *_: False)
    table[2 + position_of("hasPrimaryContext")] = ctypes.cast(no, ctypes.c_void_p).value
    first_word[0] = ctypes.addressof(table) + 2 * word
    _referenced.extend([table, no])
    torch._C._ensureCUDADeviceGuardSet()


def _answers() -> dict[str, object]:
    """Return what the functions of torch.cuda answer, by name."""
    return {
        "set_device": None,
        "current_device": 0,
        "device_count": 1,
        "get_device_name": H100.name,
        "get_device_properties": H100,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "_lazy_init": None,
        "current_stream": FakeStream(),
        "default_stream": FakeStream(),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "mem_get_info": (80 * 10**9, 85 * 10**9),
        "can_device_access_peer": True,
        "_get_generator": torch.Generator(),
    }


@contextlib.contextmanager
def fake_h100(*, compiler: bool = False) -> Iterator[None]:
    """Let torch.cuda answer as one H100 would. compiler: Dynamo, inductor and Triton compile for it, too."""
    if why := unsuitable():
        raise RuntimeError(why)
    let_autograd_run()
    with contextlib.ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for name, answer in _answers().items():
            replace(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
        replace(torch.cuda, "synchronize", lambda *_: FakeEvent.waits("synchronize"))
        replace(torch.cuda, "Event", FakeEvent)
        replace(torch.cuda, "Stream", FakeStream)
        replace(functional, "scaled_dot_product_attention", fused_attention)
        for module in (torch.cuda.amp, torch.cuda.amp.common):  # else autocast switches itself off with a warning
            replace(module, "amp_definitely_not_available", lambda: False)
        if compiler:
            _replace_compiler(replace)
        yield


def _replace_compiler(replace: Callable[[object, str, object], None]) -> None:
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch.utils._triton import has_triton
    from triton.runtime import driver

    answers = {
        "get_compute_capability": 90,
        "get_device_properties": H100,
        "is_bf16_supported": True,
        "set_device": None,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "is_triton_capable": True,
        "is_available": True,
        "raise_if_triton_unavailable": None,
        "device_count": 1,
        "current_device": 0,
        "synchronize": None,
    }
    for name, answer in answers.items():
        replace(CudaInterface, name, staticmethod(lambda *_, _answer=answer, **__: _answer))
    replace(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: H100))
    replace(CudaInterface.Worker, "current_device", staticmethod(lambda: 0))
    replace(triton_helpers, "set_driver_to_gpu", lambda: None)
    has_triton.cache_clear()  # the import of inductor has asked already, and remembered that there is no device
    driver.set_active(FakeDriver())


def to_gpu(module: nn.Module) -> nn.Module:
    """Move a module of fake tensors to the device and return it. nn.Module.to swaps tensors; fake ones refuse that."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = parameter.detach().to(DEVICE)
                part._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(DEVICE)
    return module


def body_of(operator: Any) -> Callable[..., Any] | None:
    """Return the Python function of an operator of this project, None for the operators of torch.

    With fake tensors torch calls the function that makes empty results, and none of the lines that a GPU runs.
    """
    name = str(operator._name)
    return torch._library.custom_ops.OPDEFS[name]._init_fn if name.startswith("kmatrix::") else None


def tokens(rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of a micro-batch on the device, both (B, T)."""
    inputs = torch.zeros(rows, context, dtype=torch.int64, device=DEVICE)
    return inputs, torch.zeros_like(inputs)


def fused_attention(  # noqa: PLR0917  (the signature of torch's function)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return scaled_dot_product_attention of q (B, H, T, D) over k and v (B, K, T, D): (B, H, T, D).

    Without a device, torch would choose plain products. FlashAttention takes no mask; with one, memory-efficient
    attention is the next in torch's order. Which kernel a GPU chooses is thus assumed here.
    """
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    bias = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    has_gradient = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, has_gradient, dropout_p, is_causal)[0]
