"""Graphs of recordings without a matrix: one over time, or two compared, as the original project draws them.

`python scripts/gputop.py --gen-graph FILE` and `--compare FILE FILE`: recordings of any format, and run directories.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kmatrix.errors import RecordError
from kmatrix.output import run_program
from kmatrix.records.files import write_text
from kmatrix.records.paths import RunDir
from kmatrix.report import figure
from kmatrix.report.gpu.graphs import METRICS, draw_lanes, draw_legend
from kmatrix.report.gpu.load import load
from kmatrix.report.gpu.recordings import Node, recordings_of
from kmatrix.report.gpu.samples import label_of
from kmatrix.report.gpu.timeline import range_of, timeline_of
from kmatrix.text import WIDTH, columns, fixed, plural, shortened_names, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Named = tuple[str, list[Node]]  # with samples


def read_recordings(paths: Sequence[Path]) -> list[Named]:
    """Return the recordings in files or run directories, with their names. Raises RecordError if there is none."""
    found = []
    for path, name in zip(paths, shortened_names([str(path) for path in paths], 40), strict=True):
        if path.is_dir():
            nodes = recordings_of(RunDir(path))
        else:
            samples = load(path)
            nodes = [Node(folder=RunDir(path.parent), samples=samples, notes=samples.notes)]
        tables = [one for node in nodes if (one := node.samples) is not None]
        if not tables:
            hint = "pass the directory of a recorded run, or a gpu_stats*.json or gpu_metrics*.csv file"
            why = "; ".join(note for node in nodes for note in node.notes)
            raise RecordError(f"{path} contains no recording", why=why, hint=hint)
        found.append((f"{name}{' (simulated)' if tables[0].simulated else ''}", nodes))
    return found


def draw(recordings: Sequence[Named]) -> Figure | str:
    """Return a figure with a panel per quantity: of one recording a line per GPU, of two the GPUs of each together."""
    known = [(name, one) for name, found in recordings if (one := timeline_of(found))]
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


def summary(recordings: Sequence[Named]) -> str:
    """Return mean, minimum and maximum of each quantity: of one recording per GPU, of two over the GPUs of each."""
    lines, rows = [], []
    for name, nodes in recordings:
        samples = [one for node in nodes if (one := node.samples) is not None]
        length, seconds = plural(sum(map(len, samples)), "sample"), sum(one.seconds for one in samples)
        lines.append(f"{name}: {length} in {seconds:,.1f} s")
        lines += [f"! {note}" for node in nodes for note in node.notes]
    for quantity, (word, unit, size) in METRICS.items():
        for name, nodes in recordings:
            of_each = [
                (f"{label_of(device, node.host, is_cpu=False)}, {device.name}", values / size)
                for node in nodes
                if (one := node.samples) is not None
                for device, values in zip(one.devices, one[quantity].T, strict=True)
            ]
            if len(recordings) > 1:
                of_each = [(name, np.concatenate([values for _, values in of_each]))]
            for label, values in of_each:
                if len(known := values[~np.isnan(values)]):
                    numbers = (fixed(float(number), 2) for number in (known.mean(), known.min(), known.max()))
                    rows.append([f"{word}, {unit}", label, *numbers])
    rendered = table(columns(["quantity", "of", "mean", "minimum", "maximum"], (0, 1)), rows, WIDTH)
    return "\n".join([*lines, "", *rendered, ""])


def main(argv: Sequence[str]) -> int:
    """Draw what the options of gputop ask for, and print the written files. Raises KmatrixError for user errors."""
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


def run(argv: Sequence[str]) -> int:
    """Run it as a program: print errors, and return the exit status."""
    return run_program(lambda: main(argv))
