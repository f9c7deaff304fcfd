"""Run the programs of `make check-gpuless`, each in a process of its own, and read what they print.

The double of CUDA changes torch for the rest of a process, and the process then cannot end normally.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


def answer(program: str, *arguments: object, timeout: float = 500) -> Any:
    """Return the JSON value that a program of tests/support prints last.

    arguments: paths, or values that are passed as JSON. Raises AssertionError with the end of its errors if it fails.
    """
    words = [str(word) if isinstance(word, Path) else json.dumps(word) for word in arguments]
    # One thread: nothing is computed, and the kernels are compiled in this process.
    path = os.pathsep.join([str(ROOT / "lib"), str(ROOT), str(SUPPORT)])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command: Sequence[str] = [sys.executable, str(SUPPORT / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=timeout)
    assert done.returncode == 0, f"{program} {' '.join(words)}: exit status {done.returncode}\n{done.stderr[-3000:]}"
    lines = done.stdout.splitlines()
    start = max(number for number, line in enumerate(lines) if line.startswith(("{", "[")))
    return json.loads("\n".join(lines[start:]))
