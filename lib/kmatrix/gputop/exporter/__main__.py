"""`python -m kmatrix.gputop.exporter`: the exporter as a program of its own."""

from __future__ import annotations

import sys

from kmatrix.gputop.exporter.command import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
