"""Measure how kmatrix behaves at scale: commands on large matrices, as processes, next to their goals.

    python bench/scale.py [--smallest] [--rounds 3]

CPU seconds are those of all processes, so other load on the machine changes them little; wall times are for an idle
machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common import Cost, Found, compare_with_goals, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the measurements."""

    queued: int = 10_000  # runs of a matrix on a cluster, of which four run and the others wait
    logged: int = 1_000  # runs of a report, with logs of `lines` lines and recordings of 4 GPUs
    lines: int = 20_000


SMALLEST = Sizes(queued=6, logged=4, lines=300)


def measure(smallest: bool) -> Iterator[Found]:
    """Measure everything once."""
    sizes = SMALLEST if smallest else Sizes()
    yield from report(sizes)
    yield from cluster(sizes)


def kmatrix(*words: str) -> Cost:
    return run([sys.executable, "-m", "kmatrix", *words])


def report(sizes: Sizes) -> Iterator[Found]:
    """Measure `make summary` of a large matrix with long logs."""
    from large_matrix import make_logged_matrix

    with tempfile.TemporaryDirectory() as folder:
        matrix = make_logged_matrix(Path(folder), sizes.logged, lines=sizes.lines).path
        cost = kmatrix("summary", f"TARGET={matrix}")
        page = (matrix / "report.html").stat().st_size / 1e6
    yield Found(what=f"make summary of {sizes.logged:,} runs, wall", value=cost.wall, unit="s", goal=90)
    yield Found(what="the same, memory", value=cost.memory, unit="MiB", goal=250)
    yield Found(what="the same, report.html", value=page, unit="MB", goal=4)


def cluster(sizes: Sizes) -> Iterator[Found]:
    """Measure commands on a cluster: programs that answer as Slurm does; no run trains."""
    from factories import make_data
    from large_matrix import make_queued_matrix

    path = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_data(folder / "data")
        (folder / ".config").touch()
        words = ["ENGINE=slurm", "DEVICE=cpu", "MODEL=tiny", "NUM_GPUS=1", "DATASET=shards", "BLOCK_SIZE=32"]
        words += [f"DATA_PATH={folder}/data", f"RESULTS_DIR={folder}/results", f"KCONFIG_CONFIG={folder}/.config"]
        words += ["EVAL_SAMPLES=10", "SLURM_TIME=1h", f"SEED={','.join(map(str, range(1, sizes.queued + 1)))}"]
        os.environ["PATH"] = f"{slurm(folder / 'slurm')}:{path}"
        try:
            cost = kmatrix("test-matrix", *words)
            calls = len((folder / "slurm" / "calls").read_text("utf-8").splitlines())
            yield Found(what=f"make test-matrix of {sizes.queued:,} runs, CPU", value=cost.cpu, unit="s", goal=60)
            # An array has at most 1000 tasks, and one job follows all others.
            yield Found(what="the same, submissions", value=calls, unit="", goal=-(-sizes.queued // 1000) + 1)
            matrix, answer = make_queued_matrix(folder / "queued", sizes.queued)
            (folder / "slurm" / "jobs").write_text(answer, "utf-8")
            for command in ("status", "estimate"):
                cost = kmatrix(command, f"TARGET={matrix.path}")
                yield Found(what=f"make {command} of the same, jobs waiting, CPU", value=cost.cpu, unit="s", goal=1.5)
                yield Found(what="the same, memory", value=cost.memory, unit="MiB", goal=300)
        finally:
            os.environ["PATH"] = path


def slurm(folder: Path) -> Path:
    """Write the programs of a Slurm with one partition, whose jobs are the lines of the file `jobs`; return folder."""
    folder.mkdir()
    (folder / "jobs").touch()
    texts = {
        "sinfo": "echo 'main*|infinite|1-infinite|100|64|256000|(null)'",
        "scontrol": "echo 'MaxArraySize = 1001'",
        "sbatch": f"echo x >> {folder}/calls; wc -l < {folder}/calls",
        "squeue": f"cat {folder}/jobs",
        "scancel": "exit 0",
    }
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n", "utf-8")
        (folder / name).chmod(0o755)
    return folder


if __name__ == "__main__":
    sys.exit(compare_with_goals(__doc__, measure))
