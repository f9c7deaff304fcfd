"""`make check-gpu`: look for usable GPUs, then run the tests that need one, or say in one line what is missing.

`python check_gpu.py [gpu|cpu] [arguments of pytest]`. With cpu, the CPU and gloo take the place of a GPU and NCCL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kmatrix.gpu.nvml.detect import Detected, detect

ROOT = Path(__file__).resolve().parents[2]
ON = "KMATRIX_CHECK_ON"  # environment variable: the device of the tests in tests/on_gpu, gpu (also if unset) or cpu
GPU, CPU = "gpu", "cpu"
REFUSED = 2
PLACE = "run it on a machine with an NVIDIA GPU (docs/performance.md), or in its place: make check-gpu ON=cpu"
SLOWEST = 15  # tests whose durations are printed


def missing(detected: Detected) -> str:
    """Return why no GPU can be used, and a hint; empty if PyTorch computes on one."""
    if not detected.gpus:
        found = "; ".join(detected.notes) or "no NVIDIA driver, or no GPU"
        return f"no GPU: {found}; {PLACE}"
    import torch

    count = len(detected.gpus)
    if torch.version.cuda is None:
        hint = "delete .venv and run make setup with TORCH_INDEX=<index of CUDA builds>, or make check-gpu ON=cpu"
        build = f"PyTorch {torch.__version__} is a build without CUDA"
        return f"no GPU: {build}, for {count} x {detected.gpus[0].name}; {hint}"
    if not torch.cuda.is_available():
        return f"no GPU: PyTorch {torch.__version__} cannot use {detected.gpus[0].name}: make doctor says why"
    return ""


def arguments(on: str, more: Sequence[str]) -> list[str]:
    """Return the arguments of pytest. All tests run, whatever fails."""
    # One process: two tests on one GPU would take each other's memory, and their times would mean nothing.
    # -vv is one more than the -q of pyproject.toml: a line per test.
    return ["-m", "gpu", "tests/on_gpu", "-vv", "-rs", "--maxfail=0", f"--durations={SLOWEST}", "--timeout=1800", *more]


def main(argv: Sequence[str]) -> int:
    on = (argv[0] if argv else "") or GPU
    if on not in (GPU, CPU):
        print(f"check-gpu: unknown ON={on}: leave it out for a GPU, or use ON=cpu", file=sys.stderr)
        return REFUSED
    if on == GPU and (why := missing(detect())):
        print(f"check-gpu: {why}", file=sys.stderr)
        return REFUSED
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl+C is for pytest, which prints what has run
    command = [sys.executable, "-m", "pytest", *arguments(on, argv[1:])]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {ON: on}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
