"""The trainer under a double of a GPU's queue: reading a tensor in a step raises, as it would wait for the GPU there.

On a GPU, PyTorch itself raises at each operation that waits for it.
On the CPU every tensor can be read at once, so the double allows by place what a GPU run reads without waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2 import train
from gpt2.steps import Steps

READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "nonzero")
OPERATORS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")
ALLOWED = {
    ("gpt2/steps.py", "drain"),  # the step before, whose copy to pinned memory is complete by then
    ("gpt2/optim/spam.py", "_weaken"),  # on the CPU alone
    ("gpt2/optim/adafactor.py", "step"),  # a counter of steps, which is on the CPU
    ("torch/optim/optimizer.py", "_get_value"),  # a counter of steps, which is on the CPU
}


FIRST = 3  # step from which a GPU must not be waited for: before it, the compiler and cuBLAS start


class WaitError(Exception):
    """A step reads a tensor."""


def check(what: str) -> None:
    """Raise WaitError unless one of the calling functions may read."""
    frame, ours = sys._getframe(1), ""
    while frame is not None and frame.f_code.co_name != "guarded_part":
        file = frame.f_code.co_filename
        if any(file.endswith(name) and frame.f_code.co_name == function for name, function in ALLOWED):
            return
        if not ours and not file.endswith("no_waits.py"):
            ours = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    raise WaitError(f"{what} at {ours}")


class Functions(TorchFunctionMode):
    """Sees the methods of tensors, also those that read without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            check(func.__name__)
        return func(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    """Sees the operators, also those that PyTorch calls itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in OPERATORS:
            check(name)
        return func(*args, **kwargs or {})


def guarded(part: Any, step_at: int) -> Any:
    """Return a part of a step under the double. step_at: which of its arguments is the step."""

    def guarded_part(*arguments: Any, **named: Any) -> Any:
        if not torch.cuda.is_available():
            with Functions(), Operators():
                return part(*arguments, **named)
        torch.cuda.set_sync_debug_mode("error" if arguments[step_at] >= FIRST else "default")
        try:
            return part(*arguments, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")  # evaluations and checkpoints may wait

    return guarded_part


def install(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Put the parts of a step under the double."""
    for owner, name in ((train, "gradients"), (train, "update"), (Steps, "post")):
        replace(owner, name, guarded(getattr(owner, name), 1))


if __name__ == "__main__":
    install()
    train.main()
