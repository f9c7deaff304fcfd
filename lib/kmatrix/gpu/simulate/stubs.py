"""A C function for every function that the installed nvidia-ml-py asks the driver for: it answers "not supported".

The functions are weak: where nvml.c has one of the same name, the linker takes that.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from kmatrix.errors import LaunchError

NOT_SUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED
_ASKED_FOR = re.compile(r'_nvmlGetFunctionPointer\("(\w+)"\)')


def symbols() -> tuple[str, ...]:
    """Return the names, sorted, from the source of the client library, which is not imported."""
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        raise LaunchError(
            "simulated GPUs need the package nvidia-ml-py", why="it is not installed", fix="run `make setup`"
        )
    return tuple(sorted(set(_ASKED_FOR.findall(Path(found.origin).read_text(encoding="utf-8")))))


def source(names: tuple[str, ...]) -> str:
    """Return the C text."""
    head = (
        f'#define STUB(name) __attribute__((weak, visibility("default"))) int name(void) {{ return {NOT_SUPPORTED}; }}'
    )
    return "\n".join([head, *(f"STUB({name})" for name in names), ""])
