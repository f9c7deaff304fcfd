#!/usr/bin/env python3
"""All GPUs on one screen: `python scripts/gputop.py --help`. The code is in kmatrix.gputop."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.environment import find_packages

find_packages("rich", "msgspec", "psutil", "pynvml", imported=__name__ != "__main__")

from kmatrix.gputop.command import main, run
from kmatrix.gputop.monitor import GPUMonitor

__all__ = ["GPUMonitor", "main"]  # for `import scripts.gputop`: docs/gputop.md

if __name__ == "__main__":
    if any(word.partition("=")[0] in ("--gen-graph", "--compare") for word in sys.argv[1:]):  # the report draws these
        from kmatrix.report.gpu.graphs import main as draw

        sys.exit(draw(sys.argv[1:]))
    sys.exit(run(sys.argv[1:]))
