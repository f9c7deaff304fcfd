"""`python -m kmatrix.gpu.top`: the screen as a program of its own."""

from __future__ import annotations

import sys

from kmatrix.errors import KmatrixError
from kmatrix.gpu.top import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
