"""Download the files of benchmarks unless they are there; an error as JSON to stdout.

python -m gpt2.benchmarks hellaswag core --data-dir data
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpt2.prepare import explain, say
from gpt2.prepare.hub import fetch_url
from kmatrix.errors import KmatrixError

URLS = {  # address and SHA-256
    "hellaswag": (  # the last commit of https://github.com/rowanz/hellaswag, 12 MB
        "https://raw.githubusercontent.com/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl",
        "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    ),
    # The address has no version, and nanochat's scripts/base_eval.py reads what it finds. This was there in June 2026.
    "core": (
        "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip",  # 162 MB
        "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpt2.benchmarks", description="Download benchmarks.")
    parser.add_argument("names", nargs="+", choices=tuple(URLS), metavar="NAME", help=", ".join(URLS))
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of datasets")
    args = parser.parse_args(argv)
    try:
        for name in args.names:
            url, sha256 = URLS[name]
            path = args.data_dir.absolute() / url.rpartition("/")[2]
            if not path.is_file():  # one that is there is used, whatever it holds
                say(f"downloading {path} from {url}")
                fetch_url(url, path, sha256=sha256)
    except KeyboardInterrupt:
        return 130
    except (KmatrixError, OSError) as error:
        return explain(error, args.data_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
