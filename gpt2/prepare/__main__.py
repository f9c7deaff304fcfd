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
    parser = argparse.ArgumentParser(prog="python -m gpt2.prepare", description="Prepare a dataset (docs/data.md).")
    parser.add_argument("dataset", choices=DATASETS)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of datasets")
    for field in fields(DatasetRequest)[1:]:
        option, default = f"--{field.name.replace('_', '-')}", field.default
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            choices = NAMES if field.name == "tokenizer" else None
            parser.add_argument(option, type=type(default), default=default, choices=choices, help="%(default)s")
    args = vars(parser.parse_args(argv))
    data_dir = args.pop("data_dir").absolute()
    try:
        found = prepare_dataset(DatasetRequest(**args), data_dir)
    except KeyboardInterrupt:
        say("stopped: finished shards and partial downloads are kept")
        os._exit(130)  # without waiting for the threads of downloads
    except (KmatrixError, OSError) as error:
        return explain(error, data_dir)
    print(json.dumps(asdict(found)), flush=True)  # the only line on stdout: the control side parses it
    return 0


if __name__ == "__main__":
    sys.exit(main())
