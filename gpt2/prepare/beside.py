"""Prepare the shards that a run with streamed data reads, while it runs: python -m gpt2.prepare.beside RUN_DIR.

The runner starts this process next to the trainer, and ends it with it. A second one for the same dataset waits until
the first one ends. Shards are listed in dataset.json as soon as they are complete.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from gpt2.prepare.dataset import more_shards
from gpt2.prepare.progress import as_known, say
from kmatrix.errors import KmatrixError
from kmatrix.records.dataset import RECORD, read_dataset, tokens_to_read
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig

NICE = 10  # the training comes first: on the CPU both share its cores
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def prepare_for(config: TrainConfig) -> None:
    """Prepare all that a run reads."""
    folder = Path(config.data_path)
    mixed = read_dataset(folder / RECORD).sources
    total = sum(source.weight for source in mixed)
    for path, share in [(Path(source.path), source.weight / total) for source in mixed] or [(folder, 1.0)]:
        more_shards(path, tokens=tokens_to_read(config, share=share), block_size=config.block_size)


def main() -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)  # also if the runner is killed
    os.nice(NICE)
    run = RunDir(Path(sys.argv[1]))
    try:
        prepare_for(TrainConfig.from_json(read_json(run.run_json)["train"]))
    except (KmatrixError, OSError) as error:
        known = as_known(error, run.path)
        say(f"error: {known.what}: {known.why}" if known.why else f"error: {known.what}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
