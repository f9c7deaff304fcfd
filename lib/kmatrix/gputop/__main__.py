"""`python -m kmatrix.gputop`: the screen as a program of its own."""

from __future__ import annotations

import sys

from kmatrix.gputop.command import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
