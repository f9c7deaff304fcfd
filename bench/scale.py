"""Measure how kmatrix behaves at scale: commands on large matrices, as processes, next to their goals.

    python bench/scale.py [FIGURE ...] [--smallest] [--rounds 3]

Each figure is the median of its rounds. CPU seconds are those of all its processes, so other load on the machine
changes them little; wall times are for an idle machine. --smallest: sizes that take seconds, to see that it works. The
exit status is 1 if a goal is missed at full size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Cost, machine, number, run, table

LOSSES = 3.2, 0.001  # of the first run, and by which the next one is worse


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the measurements."""

    cells: int = 100_000  # of the dry run
    runs: int = 2_000  # of finished matrices
    queued: int = 10_000  # runs of a matrix on a cluster, of which four run and the others wait
    logged: int = 1_000  # runs of a report, with logs of `lines` lines and recordings of 4 GPUs
    lines: int = 20_000


SMALLEST = Sizes(cells=80, runs=6, queued=6, logged=4, lines=300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One measured value. goal: the value must not be above it; None: it has none."""

    what: str
    value: float
    unit: str
    goal: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", help=f"of {', '.join(FIGURES)}; all by default")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.figures if name not in FIGURES]:
        parser.error(f"unknown figure {unknown[0]}: expected {', '.join(FIGURES)}")
    sizes = SMALLEST if args.smallest else Sizes()
    print(machine(), flush=True)
    rows, missed = [], False
    for name in args.figures or FIGURES:
        rounds = [[*FIGURES[name](sizes)] for _ in range(args.rounds)]
        for several in zip(*rounds, strict=True):
            one, value = several[0], statistics.median(found.value for found in several)
            is_missed = one.goal is not None and value > one.goal
            missed |= is_missed
            mark = "" if args.smallest or one.goal is None else "MISSED" if is_missed else "met"
            rows.append([name, one.what, f"{value:,.4g} {one.unit}", number(one.goal, "g", f" {one.unit}"), mark])
    print(table(["figure", "of", "measured", "goal", ""], rows))
    return int(missed and not args.smallest)


def kmatrix(*words: str) -> Cost:
    return run([sys.executable, "-m", "kmatrix", *words])


def defconfig(_: Sizes) -> Iterator[Found]:
    """Time configuration targets as processes, next to a Python that does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        kmatrix("defconfig-gpt2-cpu-quick", f"O={folder}")  # byte code and the page cache
        bare = run([sys.executable, "-c", "pass"]).wall
        took = kmatrix("defconfig-gpt2-cpu-quick", f"O={folder}").wall
    yield Found(what="python -c pass, wall", value=1e3 * bare, unit="ms")
    yield Found(what="make defconfig-x, wall", value=1e3 * took, unit="ms", goal=150)


def dry_run(sizes: Sizes) -> Iterator[Found]:
    """Measure a dry run, with legality and ids."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / ".config"
        config.write_text("CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_GPT2_NUM_GPUS=1\nCONFIG_GPT2_MODEL_TINY=y\n", "utf-8")
        seeds = ",".join(map(str, range(max(1, sizes.cells // 40))))
        axes = ["OPTIMIZER=sgd,adam,adamw,muon,adafactor", "SCHEDULE=cosine,linear,constant,wsd", "DTYPE=fp32,bf16"]
        cost = kmatrix("test-matrix-dry-run", f"KCONFIG_CONFIG={config}", *axes, f"SEED={seeds}")
    yield Found(what=f"{sizes.cells:,} cells, CPU", value=cost.cpu, unit="s", goal=10)
    yield Found(what="the same, memory", value=cost.memory, unit="MiB", goal=500)


def finished(folder: str, count: int) -> Path:
    """Write a matrix of finished runs, and return its directory."""
    from records_factory import make_matrix, runs_with_seeds

    return make_matrix(Path(folder), runs_with_seeds(count, [LOSSES[0] + LOSSES[1] * n for n in range(count)])).path


def status(sizes: Sizes) -> Iterator[Found]:
    """Measure commands on a matrix of finished runs."""
    with tempfile.TemporaryDirectory() as folder:
        few = finished(folder, min(100, sizes.runs))
        kmatrix("status", f"TARGET={few}")
        yield Found(
            what="make status of 100 runs, wall", value=kmatrix("status", f"TARGET={few}").wall, unit="s", goal=0.15
        )
    with tempfile.TemporaryDirectory() as folder:
        matrix = finished(folder, sizes.runs)
        yield Found(
            what=f"make summary of {sizes.runs:,} runs, CPU",
            value=kmatrix("summary", f"TARGET={matrix}").cpu,
            unit="s",
            goal=5,
        )
        kmatrix("continue", f"TARGET={matrix}")  # writes the status and the report of the matrix, as a runner does
        yield Found(
            what="make continue, nothing to do, CPU",
            value=kmatrix("continue", f"TARGET={matrix}").cpu,
            unit="s",
            goal=3,
        )
        yield Found(what="one redraw of the live status, CPU", value=redraw(matrix), unit="ms", goal=200)
    with tempfile.TemporaryDirectory() as folder:
        cost = kmatrix("status", f"TARGET={finished(folder, sizes.queued)}")
        yield Found(what=f"make status of {sizes.queued:,} runs, CPU", value=cost.cpu, unit="s", goal=1)


def redraw(path: Path) -> float:
    """Return the CPU milliseconds of one redraw of the live status, after the first."""
    from kmatrix.cli.watch.status import screen
    from kmatrix.status.look import look
    from kmatrix.status.view import Viewer

    viewer, times = Viewer(path=path), []
    for _ in range(4):
        since = time.process_time()
        screen(viewer.view(look(path)), width=120, height=50)
        times.append(1e3 * (time.process_time() - since))
    return statistics.median(times[1:])


def report(sizes: Sizes) -> Iterator[Found]:
    """Measure `make report` of a large matrix with long logs."""
    from large_matrix import make_logged_matrix

    with tempfile.TemporaryDirectory() as folder:
        matrix = make_logged_matrix(Path(folder), sizes.logged, lines=sizes.lines, gpus=4).path
        cost = kmatrix("report", f"TARGET={matrix}")
        page = (matrix / "report.html").stat().st_size / 1e6
    yield Found(what=f"{sizes.logged:,} runs of {sizes.lines:,} lines, wall", value=cost.wall, unit="s", goal=6)
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


FIGURES: dict[str, Callable[[Sizes], Iterator[Found]]] = {
    **{"defconfig": defconfig, "dry-run": dry_run, "status": status, "report": report, "cluster": cluster},
}


if __name__ == "__main__":
    sys.exit(main())
