#!/usr/bin/env python3
"""Draw the GPU graphs of a matrix, or of a directory of the original project."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.environment import find_packages

find_packages("msgspec", "numpy", "jinja2", "matplotlib")

from kmatrix.output import run_program
from kmatrix.report.gpu.folders import find_recorded, read_folder
from kmatrix.report.gpu.graphs import draw


def main():
    """Draw the graphs, and print a line per graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="matrix directory (default: newest here)")
    parser.add_argument("--output", metavar="DIR", type=Path, help="output directory (default: graphs/ in DIR)")
    args = parser.parse_args()
    folder = find_recorded(args.folder, Path())
    files, missing = draw(*read_folder(folder), args.output or folder / "graphs")
    print("\n".join([*(f"wrote {file}" for file in files), *(f"note: {reason}" for reason in missing)]))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
