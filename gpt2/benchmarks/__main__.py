"""Download the files of benchmarks unless they are there; progress to stderr, an error as JSON to stdout.

python -m gpt2.benchmarks hellaswag core --data-dir data
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2.data.download import fetch
from gpt2.prepare.progress import explain, say
from kmatrix.errors import DataError, KmatrixError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A file on the web that never changes."""

    name: str  # in DATA_DIR; the same as in kmatrix.experiment.inputs.benchmarks.PUBLISHED
    url: str
    sha256: str
    size: str  # for people


PUBLISHED = {
    "hellaswag": PublishedFile(
        name="hellaswag_val.jsonl",
        # The last commit of https://github.com/rowanz/hellaswag
        url="https://raw.githubusercontent.com/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl",
        sha256="0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
        size="12 MB",
    ),
    # The address has no version, and nanochat's scripts/base_eval.py reads what it finds. This was there in June 2026.
    "core": PublishedFile(
        name="eval_bundle.zip",
        url="https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip",
        sha256="90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200",
        size="162 MB",
    ),
}


def fetch_published(file: PublishedFile, data_dir: Path) -> None:
    """Download a file into DATA_DIR, unless one of that name is there, whatever it holds. Raises DataError."""
    path = data_dir / file.name
    if path.is_file():
        return
    say(f"downloading {file.name}, {file.size}, from {file.url}")
    try:
        fetch(file.url, path, sha256=file.sha256)
    except DataError as error:
        raise DataError(
            f"{file.name} is missing, and {error.what}",
            why=error.why,
            hint=f"put {file.url} at {path} (SHA-256 {file.sha256}), or run this again with network access",
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpt2.benchmarks", description="Download benchmarks.")
    parser.add_argument("names", nargs="+", choices=tuple(PUBLISHED), metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of datasets")
    args = parser.parse_args(argv)
    data_dir = args.data_dir.absolute()
    try:
        for name in args.names:
            fetch_published(PUBLISHED[name], data_dir)
    except KeyboardInterrupt:
        return 130
    except (KmatrixError, OSError) as error:
        return explain(error, data_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
