"""Graphs of single recordings, without a matrix: one over time, or two compared, as the original project draws them.

`python scripts/gputop.py --gen-graph FILE` and `--compare FILE FILE`: statistics files of this or of the original
project, also truncated ones, tables, and run directories with all of their recordings.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kmatrix.errors import RecordError, reason_of
from kmatrix.output import run_program
from kmatrix.records.files import write_text
from kmatrix.records.paths import RunDir
from kmatrix.report.figure import draw_jobs, mark_of, new_figure, subtitle, time_unit
from kmatrix.report.gpu.graphs import METRICS, POINTS, draw_line, legend
from kmatrix.report.gpu.load import load
from kmatrix.report.gpu.recordings import Recording, RunRecordings, recordings_of
from kmatrix.report.gpu.samples import Array, DeviceFacts
from kmatrix.report.gpu.timeline import Lane, Timeline, banded, range_of, timeline_of
from kmatrix.text import WIDTH, columns, fixed, shortened_names, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = tuple[str, Array, Lane]  # name in the legend, times (s), values


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recording, or all of a run."""

    name: str
    recordings: tuple[Recording, ...]
    timeline: Timeline
    notes: tuple[str, ...]

    @property
    def simulated(self) -> bool:
        return any(one.samples.simulated for one in self.recordings)

    @property
    def label(self) -> str:
        return f"{self.name} (simulated)" if self.simulated else self.name

    @property
    def length(self) -> str:
        """The number of samples and the time that they cover, without that between two recordings."""
        samples = [one.samples for one in self.recordings]
        return f"{sum(map(len, samples)):,} samples in {sum(float(np.ptp(one.time)) for one in samples):,.1f} s"

    def values(self, quantity: str, device: DeviceFacts | None = None) -> Array:
        """Return the known values of a device, by default of all, in the unit of the panel of a quantity."""
        found = [np.empty(0)]
        for samples in (one.samples for one in self.recordings):
            places = [place for place, one in enumerate(samples.devices) if device in (None, one)]
            found.append(samples.values[quantity][:, places].ravel())
        every = np.concatenate(found)
        return every[~np.isnan(every)] / METRICS[quantity][2]


def read_recording(path: Path, name: str = "") -> Recorded:
    """Return a recording, or those of a run directory. Raises RecordError if there is none."""
    if path.is_dir():
        found = recordings_of(RunDir(path))
    else:
        found = RunRecordings(recordings=(Recording(evidence=str(path), samples=load(path)),))
    if not found.recordings:
        hint = "pass the directory of a recorded run, or a gpu_stats*.json or gpu_metrics*.csv file"
        raise RecordError(f"{path} contains no recording", why="; ".join(found.notes), hint=hint)
    timeline = timeline_of(found, list(METRICS), POINTS)
    if timeline is None:
        raise RecordError(f"{path} has a single sample", hint="record again")
    notes = (*found.notes, *(note for one in found.recordings for note in one.samples.notes))
    return Recorded(name=name or path.name, recordings=found.recordings, timeline=timeline, notes=notes)


def draw(drawn: Sequence[Recorded]) -> Figure:
    """Return a figure with a panel per quantity: of one recording a line per GPU, of two the GPUs of each together."""
    every = {name: [line for one in drawn for line in _lines(one, name, alone=len(drawn) == 1)] for name in METRICS}
    known = {name: lines for name, lines in every.items() if lines}
    names = " and ".join(one.name for one in drawn)
    if not known:
        raise RecordError(f"{names} has no known value", hint="record again")
    title = "GPU recording" if len(drawn) == 1 else "GPU comparison"
    mark = mark_of([one.simulated for one in drawn], "recordings")
    figure, panels = new_figure(names, title, (math.ceil(len(known) / 2), min(2, len(known))), note=mark)
    time_name, seconds = time_unit(max(one.timeline.seconds for one in drawn))
    places: dict[str, int] = {}
    for axes, (name, lines) in zip(panels, known.items(), strict=False):
        word, unit, size = METRICS[name]
        subtitle(axes, f"{word}, {unit}")
        axes.set_xlabel(f"time ({time_name})")
        for label, times, lane in lines:
            place = places.setdefault(label, len(places))
            draw_line(axes, times / seconds, lane, size, place=place)
    for spare in panels[len(known) :]:
        spare.set_axis_off()
    legend(figure, places)
    return figure


def _lines(one: Recorded, quantity: str, *, alone: bool) -> list[Line]:
    """Return a line per GPU (of many their range and the worst); or one of all: their mean, lowest and highest."""
    times, devices = one.timeline.centres, one.timeline.devices
    if alone:
        return [(device.label, times, device.lanes[quantity]) for device in banded(one.timeline, quantity)]
    lanes = [device.lanes[quantity] for device in devices if quantity in device.lanes]
    return [(one.label, times, range_of(lanes))] if lanes else []


def summary(drawn: Sequence[Recorded]) -> str:
    """Return mean, minimum and maximum of each quantity: of one recording per GPU, of two over the GPUs of each."""
    rows, lines = [], []
    for one in drawn:
        lines += [f"{one.label}: {one.length}", *(f"! {note}" for note in one.notes)]
    for name, (word, unit, _) in METRICS.items():
        for one in drawn:
            devices = dict.fromkeys(device for each in one.recordings for device in each.samples.devices)
            for device in devices if len(drawn) == 1 else (None,):
                if len(values := one.values(name, device)):
                    numbers = (fixed(float(x), 2) for x in (values.mean(), values.min(), values.max()))
                    rows.append(
                        [f"{word}, {unit}", f"GPU {device.index}, {device.name}" if device else one.label, *numbers]
                    )
    found = table(columns(["quantity", "of", "mean", "minimum", "maximum"], (0, 1)), rows, WIDTH)
    return "\n".join([*lines, "", *found, ""])


def main(argv: Sequence[str]) -> int:
    """Draw what the options of gputop ask for, and print the written files. Raises KmatrixError for user errors."""
    parser = argparse.ArgumentParser(prog="gputop", description=__doc__, allow_abbrev=False)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--gen-graph", type=Path, metavar="FILE", help="draw a recording over time, next to it")
    chosen.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="compare two recordings, in this folder")
    options = parser.parse_args(argv)
    path: Path | None = options.gen_graph
    if path is not None:
        drawn, folder = [read_recording(path)], path if path.is_dir() else path.parent
        stem = path.resolve().name.removesuffix(".json")
    else:
        names = shortened_names([str(each) for each in options.compare], 40)
        drawn = [read_recording(each, name) for each, name in zip(options.compare, names, strict=True)]
        folder, stem = Path(), "gpu_comparison"
    text, file = summary(drawn), folder / f"{stem}_summary.txt"
    try:
        written, _ = draw_jobs([(f"{stem}_plot.png", partial(draw, drawn))], folder)
        write_text(file, text)
    except OSError as error:
        hint = "copy the recording to a folder with space"
        raise RecordError(f"cannot write {error.filename or folder}", why=reason_of(error), hint=hint) from None
    print(text, end="")
    print("\n".join(f"wrote {path}" for path in (*written, file)))
    return 0


def run(argv: Sequence[str]) -> int:
    """Run it as a program: print errors, and return the exit status."""
    return run_program(lambda: main(argv))
