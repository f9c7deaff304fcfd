"""Build inductor's Triton kernels for an H100, and report registers, spills and shared memory of each.

    python tests/support/cubins.py FOLDER/kernels.json      # written by fake_gpu_compile.py

A kernel is built with the first of inductor's configurations; a GPU would measure them and choose.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fake_cuda

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
ARCHITECTURE = 90  # compute capability 9.0
TUNERS = ("CachingAutotuner", "DebugAutotuner")


def built(name: str, source: str, folder: Path) -> dict[str, Any]:
    """Return what ptxas reports of a kernel, in registers per thread and bytes."""
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")  # Triton reads the lines of the function from the file
    scope: dict[str, Any] = {"__name__": name, "__file__": str(path)}
    exec(compile(source, str(path), "exec"), scope)
    tuner = next(value for value in scope.values() if type(value).__name__ in TUNERS)
    config, names = tuner.configs[0], tuner.fn.arg_names
    signature = {key: value for key, value in tuner.triton_meta["signature"].items() if key in names}
    signature |= dict.fromkeys((key for key in config.kwargs if key in names), "constexpr")
    constants = {**tuner.triton_meta.get("constants", {}), **config.kwargs}
    constants = {(names.index(key),): value for key, value in constants.items() if key in names}
    attributes = tuner.triton_meta["configs"][0]
    kernel = triton.compile(
        ASTSource(tuner.fn, signature, constants, attributes if isinstance(attributes, dict) else {}),
        target=GPUTarget("cuda", ARCHITECTURE, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    assembly = folder / "kernel.ptx"
    assembly.write_text(kernel.asm["ptx"], encoding="utf-8")
    command = [PTXAS, "-v", "--gpu-name", f"sm_{ARCHITECTURE}a", assembly, "-o", folder / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    return {
        "name": name,
        "registers": int(registers[1]) if registers else None,
        "spills": int(spills[1]) + int(spills[2]) if spills else None,
        "shared": kernel.metadata.shared,
    }


def main(argv: list[str]) -> dict[str, Any]:
    sources = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    rows, failed, started = [], {}, time.perf_counter()
    with fake_cuda.fake_h100(compiler=True), tempfile.TemporaryDirectory() as folder:
        for name, source in sources.items():
            try:
                rows.append(built(name, source, Path(folder)))
            # Broad: whatever the compiler raises is the result of this kernel, and the others are built all the same.
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"[:300]
    return {"kernels": rows, "failed": failed, "seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    fake_cuda.run_program(main)
