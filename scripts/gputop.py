"""All GPUs on one screen: `python scripts/gputop.py --help`. Everything it does is in kmatrix.gpu.top."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from kmatrix.errors import KmatrixError
from kmatrix.gpu.top import GPUMonitor, main

__all__ = ["GPUMonitor", "main"]

if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except BrokenPipeError:  # `python scripts/gputop.py --once | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
