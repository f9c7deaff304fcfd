"""Run a report script: print its text, errors and warnings, and exit."""

import sys

from kmatrix.errors import KmatrixError
from kmatrix.output import run_program
from kmatrix.records.decode import damaged_files


def run(report):
    """Print the text that `report` returns, or its error, and exit."""

    def main():
        try:
            print(report(), end="")
        except KmatrixError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        finally:
            for text in damaged_files():
                print(f"warning: {text}", file=sys.stderr)
        return 0

    sys.exit(run_program(main))
