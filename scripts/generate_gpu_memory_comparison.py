#!/usr/bin/env python3
"""Draw the GPU graphs of a matrix, or of a directory of the original project."""

import argparse
import sys
from pathlib import Path

# Without an installation of kmatrix.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from kmatrix.errors import KmatrixError
from kmatrix.report.folders import draw_memory, find_recorded

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="matrix directory (default: newest here)")
    parser.add_argument("--output", metavar="DIR", type=Path, help="output directory (default: graphs/ in DIR)")
    args = parser.parse_args()
    try:
        files, missing = draw_memory(find_recorded(args.folder, Path()), args.output)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join([*(f"wrote {file}" for file in files), *(f"note: {reason}" for reason in missing)]))
