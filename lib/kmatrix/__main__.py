"""`kmatrix COMMAND [NAME=value ...]`, also `python -m kmatrix`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run one command and exit with its status."""
    from kmatrix import cli

    sys.exit(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
