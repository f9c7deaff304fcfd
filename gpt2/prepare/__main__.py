"""Make a dataset ready and say what it is: one JSON line on stdout, progress on stderr.

python -m gpt2.prepare stdlib --data-dir data
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from gpt2.prepare import DATASETS, Wanted, ready
from gpt2.tokenizer import NAMES
from kmatrix.errors import DataError, KmatrixError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpt2.prepare", description="Make a dataset ready.")
    parser.add_argument("dataset", choices=DATASETS)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of datasets")
    parser.add_argument("--tokenizer", choices=NAMES, default="byte", help="what the tokens are")
    parser.add_argument("--data-path", default="", help="of hub, folder and shards; relative ones start at --data-dir")
    parser.add_argument("--mix", default="", help='of mix: "finewebedu:65 tinystories:34 stdlib:1"')
    parser.add_argument("--text-column", default="text", help="of JSON lines and Parquet")
    parser.add_argument("--val-percent", type=int, default=7, help="of the documents that are validation")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="the most in one shard")
    parser.add_argument("--bpe-vocab-size", type=int, default=8192, help="the most tokens of a trained vocabulary")
    parser.add_argument("--tokens", type=int, default=0, help="training tokens that are read (0: all)")
    parser.add_argument("--block-size", type=int, default=1, help="tokens of the longest sequence")
    parser.add_argument("--shards", type=int, default=0, help="training shards (0: as many as --tokens need)")
    args = vars(parser.parse_args(argv))
    data_dir = args["data_dir"].absolute()
    try:
        found = ready(Wanted(**{field.name: args[field.name] for field in fields(Wanted)}), data_dir)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {DataError(f'{data_dir} cannot be used', why=str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: what has come is kept, and the next attempt goes on from there", file=sys.stderr)
        return 130
    print(json.dumps(found.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
