"""Measure what a user waits for before a run: configuration targets, help, status, and dry runs of large matrices.

    python bench/config.py [--smallest] [--rounds 11]

Each figure is the median of its rounds. Wall times are for an idle machine, next to a Python that does nothing; CPU
seconds change little with other load. --smallest: sizes that take seconds, to see that it works. The exit status is 1
if a goal is missed at full size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import Cost, environment, machine, run, table

from records_factory import make_matrix, runs_with_seeds

AXES = ("OPTIMIZER=sgd,adam,adamw,muon,adafactor", "SCHEDULE=cosine,linear,constant,wsd", "DTYPE=fp32,bf16")
CELLS = 40  # of these axes, without seeds
CPU = "CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_GPT2_NUM_GPUS=1\nCONFIG_GPT2_MODEL_TINY=y\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args(argv)
    sizes = (40, 80) if args.smallest else (1000, 10_000)
    print(machine(), flush=True)
    rows, missed = [], False
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "one").write_text(CPU, "utf-8")
        finished = make_matrix(folder / "results", runs_with_seeds(100, [3.2 + 0.001 * n for n in range(100)])).path
        figures: list[tuple[str, list[str], str, float | None]] = [
            ("python -c pass", [sys.executable, "-c", "pass"], "wall", None),
            ("make defconfig-gpt2-cpu-quick", make("defconfig-gpt2-cpu-quick", f"O={folder}"), "wall", 0.13),
            ("make help", make("help"), "wall", 0.08),
            ("make status of 100 runs", make("status", f"TARGET={finished}"), "wall", 0.15),
            *((f"dry run of {size:,} runs", dry_run(folder / "one", size), "cpu", size / 2000) for size in sizes),
        ]
        variables = environment(PYTHONDONTWRITEBYTECODE="")
        for what, words, kind, goal in figures:
            # As a user has it: with byte code, which the first run writes.
            costs: list[Cost] = [run(words, variables=variables) for _ in range(args.rounds + 1)][1:]
            wall, cpu = (statistics.median(getattr(cost, name) for cost in costs) for name in ("wall", "cpu"))
            is_missed = goal is not None and (wall if kind == "wall" else cpu) > goal
            missed |= is_missed
            mark = "" if args.smallest or goal is None else "MISSED" if is_missed else "met"
            rows.append([what, f"{wall:.3f} s", f"{cpu:.3f} s", f"{goal:g} s {kind}" if goal else "", mark])
    print(table(["command", "wall", "CPU", "goal", ""], rows))
    return int(missed and not args.smallest)


def make(target: str, *words: str) -> list[str]:
    return ["make", "--no-print-directory", f"PYTHON={sys.executable}", target, *words]


def dry_run(config: Path, size: int) -> list[str]:
    """Return the command of a dry run of this many cells."""
    seeds = f"SEED={','.join(map(str, range(size // CELLS)))}"
    return [sys.executable, "-m", "kmatrix", "test-matrix-dry-run", f"KCONFIG_CONFIG={config}", *AXES, seeds]


if __name__ == "__main__":
    sys.exit(main())
