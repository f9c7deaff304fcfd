#!/usr/bin/env python3
"""Print memory, balance and energy of every GPU, for all runs of a matrix."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.environment import find_packages

find_packages("msgspec")

from kmatrix.errors import KmatrixError
from kmatrix.output import run_program
from kmatrix.records.decode import damaged_files
from kmatrix.report.folders import find_recorded, summarize


def main():
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="matrix directory (default: newest here)")
    try:
        print(summarize(find_recorded(parser.parse_args().folder, Path())), end="")
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        for text in damaged_files():
            print(f"warning: {text}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
