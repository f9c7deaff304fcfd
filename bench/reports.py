"""Measure reports, next to those of the original project and of another checkout.

    python bench/reports.py [--peer ../AdamWPrune] [--against ../former]

All programs run in turn, in each round. Goals: at most the time of the original, and 1.1 times that of the checkout.

text, pictures   of 3 runs on 4 GPUs: of JSON files in the layout of the original, and of gpu_samples.bin
20 runs          `make summary` of logs of 1,000 lines; scale.py has that of 1,000 runs
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

from common import ROOT, Cost, Found, compare_with_goals, environment, run

T = TypeVar("T")
SCRIPTS = {"text": "generate_consolidated_gpu_summary.py", "pictures": "generate_gpu_memory_comparison.py"}
OPTIMIZERS = ("adamw", "adamwprune", "sgd")
PLACE = tempfile.TemporaryDirectory(prefix="reports-")  # of all rounds
SIZES, SMALLEST = (100_000, 20), (100, 4)  # samples; runs with long logs
LINES = 1000  # of such a log


def measure(smallest: bool, peer: Path | None, against: Path | None) -> Iterator[Found]:
    """Measure everything once."""
    samples, runs = SMALLEST if smallest else SIZES
    others = {"the other checkout": against} if against else {}
    peers = {**others, "the original": peer} if peer else others
    foreign, own = in_a_process(recordings, samples)
    for kind, script in SCRIPTS.items():
        for what, folder, programs in (("JSON", foreign, peers), ("gpu_samples.bin", own, others)):
            figure = f"{kind} of 3 x {samples:,} samples x 4 GPUs, {what}"
            yield from compared(figure, [f"scripts/{script}", str(folder)], folder, programs)
    matrix = in_a_process(logged, runs)
    figure = f"make summary of {runs:,} runs, logs of {LINES:,} lines"
    yield from compared(figure, ["-m", "kmatrix", "summary", f"TARGET={matrix}"], matrix, others)


def compared(figure: str, words: list[str], folder: Path, others: dict[str, Path]) -> Iterator[Found]:
    """Measure a program of this checkout and of others, in turn. words: its path in a checkout, and its arguments."""
    costs = {name: cost_of(words, folder, checkout) for name, checkout in others.items()}
    ours = cost_of(words, folder, ROOT)
    yield Found(what=figure, value=ours.wall, unit="s")
    yield Found(what="the same, memory", value=ours.memory, unit="MiB")
    for name, cost in costs.items():
        yield Found(what=f"the same, {name}", value=cost.wall, unit="s")
        share, goal = ours.wall / cost.wall, 1.0 if name == "the original" else 1.1
        yield Found(what=f"the same, our share of the time of {name}", value=share, unit="", goal=goal)


def cost_of(words: list[str], folder: Path, checkout: Path) -> Cost:
    """Run a program of a checkout on a folder; the text program of the original takes the current one."""
    shutil.rmtree(folder / "graphs", ignore_errors=True)
    script = words[:1] if words[0] == "-m" else [str(checkout.resolve() / words[0])]
    # Compiled modules are kept, as users have them.
    variables = environment(checkout.resolve(), PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=f"{PLACE.name}/cache")
    return run([sys.executable, *script, *words[1:]], folder, variables)


@cache
def in_a_process(make: Callable[..., T], *arguments: int) -> T:
    """Call a function once in a process of its own: the memory of this one is the least that its children show."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(make, *arguments).result()


def recordings(samples: int) -> tuple[Path, Path]:
    """Return a folder in the layout of the original, and a matrix, with the same recordings."""
    from gpu_factory import FakeGpus, write_samples
    from kmatrix.gpu.formats.samples import multi
    from records_factory import FakeRun, make_matrix

    gpus = FakeGpus(samples=samples)
    snapshots = [*gpus.snapshots()]
    matrix = make_matrix(Path(PLACE.name), [FakeRun(optimizer=one, gpus=4, device="cuda") for one in OPTIMIZERS])
    first, *others = matrix.runs()
    write_samples(first.gpu_samples, gpus, snapshots)
    # The original's text program reads no other names.
    names = [f"resnet18_{one}_magnitude_50" for one in OPTIMIZERS]
    paths = [Path(PLACE.name) / "foreign" / name / f"gpu_stats_{name}_multi_gpu.json" for name in names]
    for path in paths:
        path.parent.mkdir(parents=True)
    with paths[0].open("w", encoding="utf-8") as file:
        for number, snapshot in enumerate(snapshots):
            file.write(f"{',' if number else '['}\n{json.dumps(multi(snapshot), indent=2)}")
        file.write("]")
    for source, copies in ((paths[0], paths[1:]), (first.gpu_samples, [folder.gpu_samples for folder in others])):
        for path in copies:
            path.hardlink_to(source)
    results = [{"test_id": name, "optimizer": name.split("_")[1], "success": True} for name in names]
    (paths[0].parents[1] / "all_results.json").write_text(json.dumps(results), encoding="utf-8")
    return paths[0].parents[1], matrix.path


def logged(count: int) -> Path:
    """Return a matrix of finished runs with long logs."""
    from large_matrix import make_logged_matrix

    return make_logged_matrix(Path(PLACE.name) / "logged", count, lines=LINES).path


if __name__ == "__main__":
    sys.exit(compare_with_goals(__doc__, measure, "peer", "against"))
