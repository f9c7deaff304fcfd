"""Run a report script: print its text, errors and warnings, and exit."""

import sys

from kmatrix.errors import KmatrixError, damaged_files
from kmatrix.output import run_program


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
