"""Measure what a user waits for before a run: configuration targets, help, status, and dry runs of large matrices.

    python bench/config.py [--smallest] [--rounds 11]

Wall times are for an idle machine, next to a Python that does nothing; CPU seconds change little with other load.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import Found, compare_with_goals, environment, run

from records_factory import make_matrix, runs_with_seeds

AXES = ("OPTIMIZER=sgd,adam,adamw,muon,adafactor", "SCHEDULE=cosine,linear,constant,wsd", "DTYPE=fp32,bf16")
CELLS = 40  # of these axes, without seeds
CPU = "CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_GPT2_NUM_GPUS=1\nCONFIG_GPT2_MODEL_TINY=y\n"
WITH_BYTE_CODE = environment(PYTHONDONTWRITEBYTECODE="")  # as a user has it: the first round writes it


def measure(smallest: bool) -> Iterator[Found]:
    """Measure each command once."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        finished = make_matrix(folder / "results", runs_with_seeds(100, [3.2 + 0.001 * n for n in range(100)])).path
        nothing = run([sys.executable, "-c", "pass"], variables=WITH_BYTE_CODE)
        yield Found(what="python -c pass, wall", value=nothing.wall, unit="s")
        yield make("defconfig-gpt2-cpu-quick", f"O={folder}", goal=0.13)
        yield make("help", goal=0.08)
        yield make("status", f"TARGET={finished}", goal=0.15)
        (folder / "one").write_text(CPU, "utf-8")
        for size, goal in ((40, 0.5), (80, 0.5)) if smallest else ((1000, 0.5), (10_000, 4.0)):
            seeds = f"SEED={','.join(map(str, range(size // CELLS)))}"
            words = ["test-matrix-dry-run", f"KCONFIG_CONFIG={folder}/one", *AXES, seeds]
            cost = run([sys.executable, "-m", "kmatrix", *words], variables=WITH_BYTE_CODE)
            yield Found(what=f"dry run of {size:,} runs, CPU", value=cost.cpu, unit="s", goal=goal)


def make(target: str, *words: str, goal: float) -> Found:
    """Measure a make target."""
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", target, *words]
    cost = run(command, variables=WITH_BYTE_CODE)
    return Found(what=f"make {target}, wall", value=cost.wall, unit="s", goal=goal)


if __name__ == "__main__":
    sys.exit(compare_with_goals(__doc__, measure))
