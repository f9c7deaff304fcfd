#!/usr/bin/env python3
"""Print memory, balance and energy of every GPU of every run in a folder."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from kmatrix.errors import KmatrixError
from kmatrix.report.gpu_report import find_recorded, summarize

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="default: the newest matrix here")
    try:
        print(summarize(find_recorded(parser.parse_args().folder, Path())), end="")
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
