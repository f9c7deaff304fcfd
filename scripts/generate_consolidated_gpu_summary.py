#!/usr/bin/env python3
"""Print memory, balance and energy of every GPU, for all runs of a matrix."""

import argparse
import sys
from pathlib import Path

# Without an installation of kmatrix.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from kmatrix.errors import KmatrixError
from kmatrix.report.folders import find_recorded, summarize

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="matrix directory (default: newest here)")
    try:
        print(summarize(find_recorded(parser.parse_args().folder, Path())), end="")
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
