"""Prepare a dataset: print one JSON line to stdout, progress to stderr.

python -m gpt2.prepare stdlib --data-dir data
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from gpt2.data.tokenizer import NAMES
from gpt2.prepare.catalog import DatasetRequest
from gpt2.prepare.dataset import DATASETS, prepare_dataset
from gpt2.prepare.progress import explain, say
from kmatrix.errors import KmatrixError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpt2.prepare", description="Prepare a dataset.")
    parser.add_argument("dataset", choices=DATASETS)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of datasets")
    parser.add_argument("--tokenizer", choices=NAMES, default="byte", help="default: byte")
    parser.add_argument("--data-path", default="", help="for hub, folder and shards; relative to --data-dir")
    parser.add_argument("--mix", default="", help='for mix, for example "finewebedu:65 tinystories:34 stdlib:1"')
    parser.add_argument("--text-column", default="text", help="column of JSON lines and Parquet")
    parser.add_argument("--val-percent", type=int, default=7, help="percent of the documents used for validation")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="maximum tokens per shard")
    parser.add_argument("--bpe-vocab-size", type=int, default=8192, help="maximum size of a trained vocabulary")
    parser.add_argument("--tokens", type=int, default=0, help="training tokens to read (0: all)")
    parser.add_argument("--block-size", type=int, default=1, help="tokens of the longest sequence")
    parser.add_argument("--shards", type=int, default=0, help="training shards (0: as many as --tokens need)")
    parser.add_argument("--streaming", action="store_true", help="only the first shard: runs have the others prepared")
    args = vars(parser.parse_args(argv))
    data_dir = args["data_dir"].absolute()
    names = [field.name for field in fields(DatasetRequest) if field.name in args]
    try:
        found = prepare_dataset(DatasetRequest(**{name: args[name] for name in names}), data_dir)
    except KeyboardInterrupt:
        say("stopped: finished shards and partial downloads are kept")
        os._exit(130)  # without waiting for the threads of downloads
    except (KmatrixError, OSError) as error:
        return explain(error, data_dir)
    print(json.dumps(asdict(found)), flush=True)  # the only line on stdout: the control side parses it
    return 0


if __name__ == "__main__":
    sys.exit(main())
