"""All GPUs on one screen: `python scripts/gputop.py --help`. The code is in kmatrix.gputop."""

from __future__ import annotations

import sys
from pathlib import Path

# The script runs with any Python that has the packages, without an installation of kmatrix.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

try:
    from kmatrix.gputop.command import main, run
    from kmatrix.gputop.feeds import GPUMonitor
except ModuleNotFoundError as error:
    print(f"error: {error}\n  hint: run `make setup`, then use .venv/bin/python", file=sys.stderr)
    sys.exit(2)

__all__ = ["GPUMonitor", "main"]  # for `import scripts.gputop`: docs/gputop.md

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
