"""Graphs of recordings without a matrix: one over time, or two compared, as the original project draws them.

`python scripts/gputop.py --gen-graph FILE` and `--compare FILE FILE`: recordings of any format.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kmatrix.output import run_program
from kmatrix.records.files import write_text
from kmatrix.records.paths import RunDir
from kmatrix.report import figure
from kmatrix.report.gpu.graphs import METRICS, draw_lanes, draw_legend
from kmatrix.report.gpu.recordings import Node, load
from kmatrix.report.gpu.samples import Samples
from kmatrix.report.gpu.timeline import Timeline, range_of, timeline_of
from kmatrix.text import WIDTH, columns, fixed, plural, shortened_names, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Recorded = tuple[str, Samples, Timeline | None]  # name, and what was recorded


def read_recordings(paths: Sequence[Path]) -> list[Recorded]:
    """Return the recordings in files. Raises RecordError if there is none."""
    found: list[Recorded] = []
    for path, name in zip(paths, shortened_names([str(path) for path in paths], 40), strict=True):
        node = Node(folder=RunDir(path.parent), samples=(samples := load(path)))
        found.append((f"{name}{' (simulated)' * samples.simulated}", samples, timeline_of([node])))
    return found


def draw(recordings: Sequence[Recorded]) -> Figure | str:
    """Return a figure with a panel per quantity: of one recording a line per GPU, of two the GPUs of each together."""
    known = [(name, one) for name, _, one in recordings if one]
    shown = [quantity for quantity in METRICS if any(one.knows(quantity) for _, one in known)]
    if not shown:
        return "there are no two samples with a value"
    names = " and ".join(name for name, _ in known)
    picture, panels = figure.new_figure(names, "GPU recording", len(shown), min(2, len(shown)))
    time_name, seconds = figure.time_unit(max(one.seconds for _, one in known))
    for axes, quantity in zip(panels, shown, strict=True):
        word, unit, size = METRICS[quantity]
        lanes, worst = known[0][1].lines(quantity)
        if len(known) > 1:
            lanes, worst = [range_of(name, one.lanes[quantity]) for name, one in known], ""
        draw_lanes(axes, lanes, seconds, size)
        axes.set_title(f"{word}, {unit}{worst and f': {worst}'}")
        axes.set_xlabel(f"time ({time_name})")
    draw_legend(picture)
    return picture


def summary(recordings: Sequence[Recorded]) -> str:
    """Return mean, minimum and maximum of each quantity: of one recording per GPU, of two over the GPUs of each."""
    lines, rows = [], []
    for name, one, _ in recordings:
        lines.append(f"{name}: {plural(len(one), 'sample')} in {one.seconds:,.1f} s")
        lines += [f"! {note}" for note in one.notes]
    for quantity, (word, unit, size) in METRICS.items():
        for name, one, _ in recordings:
            labels = [f"{each.name_on('')}, {each.gpu_name}" for each in one.devices]
            of_each = zip(labels, one[quantity].T, strict=True) if len(recordings) == 1 else [(name, one[quantity])]
            for label, values in of_each:
                if len(known := values[~np.isnan(values)] / size):
                    numbers = (fixed(float(number), 2) for number in (known.mean(), known.min(), known.max()))
                    rows.append([f"{word}, {unit}", label, *numbers])
    rendered = table(columns(["quantity", "of", "mean", "minimum", "maximum"], (0, 1)), rows, WIDTH)
    return "\n".join([*lines, "", *rendered, ""])


def main(argv: Sequence[str]) -> int:
    """Draw what the options of gputop ask for, print the written files or the error, and return the exit status."""
    return run_program(partial(_main, argv))


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gputop", description=__doc__, allow_abbrev=False)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--gen-graph", type=Path, metavar="FILE", help="draw a recording over time, next to it")
    chosen.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="compare two recordings, in this folder")
    options = parser.parse_args(argv)
    path: Path | None = options.gen_graph
    stem = "gpu_comparison" if path is None else str(path.absolute()).removesuffix(".json")
    recordings = read_recordings(options.compare if path is None else [path])
    text, file = summary(recordings), Path(f"{stem}_summary.txt")
    written, missing = figure.draw_jobs([(f"{stem}_plot.png", partial(draw, recordings))], Path())
    write_text(file, text)
    print(text, *(f"wrote {one}" for one in (*written, file)), *missing, sep="\n")
    return 0
