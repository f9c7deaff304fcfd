"""Prepare a dataset: print one JSON line to stdout, progress to stderr.

python -m gpt2.prepare stdlib --data-dir data
python -m gpt2.prepare --run RUN_DIR  (of streamed data: next to its trainer, by the runner)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from gpt2.prepare import explain, say
from gpt2.prepare.catalog import DatasetRequest
from gpt2.prepare.dataset import DATASETS, prepare_dataset, prepare_for
from kmatrix.errors import KmatrixError
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpt2.prepare", description="Prepare a dataset (docs/data.md).")
    parser.add_argument("dataset", choices=DATASETS, nargs="?", default="stdlib")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder of datasets")
    parser.add_argument("--run", type=Path, help="prepare what the run in this directory reads, while it runs")
    for field in fields(DatasetRequest)[1:]:
        kind = {"action": "store_true"} if field.default is False else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, help="%(default)s", **kind)
    args = vars(parser.parse_args(argv))
    data_dir, run = args.pop("data_dir").absolute(), args.pop("run")
    try:
        if run:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)  # also if the runner is killed
            os.nice(10)  # the training comes first: on the CPU both share its cores
            prepare_for(TrainConfig.from_json(read_json(RunDir(run).run_json)["train"]))
            return 0
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
