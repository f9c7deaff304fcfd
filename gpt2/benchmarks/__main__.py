"""Download the files of benchmarks unless they are there; progress to stderr, an error as JSON to stdout.

python -m gpt2.benchmarks hellaswag core --data-dir data
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpt2.benchmarks.published import PUBLISHED, fetch_published
from gpt2.prepare.progress import explain
from kmatrix.errors import KmatrixError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpt2.benchmarks", description="Download benchmarks.")
    parser.add_argument("names", nargs="+", choices=tuple(PUBLISHED), metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of datasets")
    args = parser.parse_args(argv)
    data_dir = args.data_dir.absolute()
    try:
        for name in args.names:
            fetch_published(name, data_dir)
    except KeyboardInterrupt:
        return 130
    except (KmatrixError, OSError) as error:
        return explain(error, data_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
