"""Graphs of single recordings, without a matrix: one over time, or two compared, as the original project draws them.

`python scripts/gputop.py --gen-graph FILE` and `--compare FILE FILE`: statistics files of this or of the original
project, also truncated ones, tables, and run directories with all of their recordings.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kmatrix.errors import RecordError, reason_of
from kmatrix.output import run_program
from kmatrix.records.files import write_text
from kmatrix.records.paths import RunDir
from kmatrix.report.figure import draw_jobs, mark_of, subtitle, time_unit
from kmatrix.report.gpu.graphs import DEVICE_COLOURS, MIB_PER_GIB, draw_line, legend, panel_grid
from kmatrix.report.gpu.load import load
from kmatrix.report.gpu.recordings import Recording, RunRecordings, recordings_of
from kmatrix.report.gpu.samples import Array, DeviceFacts
from kmatrix.report.gpu.timeline import Lane, Timeline, banded, timeline_of
from kmatrix.text import WIDTH, columns, fixed, shortened_names, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 720  # columns of time
BINS = 30  # of a histogram
QUANTITIES = {  # quantity -> title of its panel, recorded units per unit of the panel
    "utilization": ("utilization, %", 1.0),
    "memory_used": ("memory, GiB", MIB_PER_GIB),
    "power": ("power, W", 1.0),
    "temperature": ("temperature, C", 1.0),
    "sm_clock": ("SM clock, MHz", 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recording, or all of a run."""

    path: Path
    recordings: tuple[Recording, ...]
    timeline: Timeline
    notes: tuple[str, ...]

    @property
    def simulated(self) -> bool:
        return any(one.samples.simulated for one in self.recordings)

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
            if quantity in samples.values:
                found.append(samples.values[quantity][:, places].ravel())
        every = np.concatenate(found)
        return every[~np.isnan(every)] / QUANTITIES[quantity][1]


def read_recording(path: Path) -> Recorded:
    """Return a recording, or those of a run directory. Raises RecordError if there is none."""
    if path.is_dir():
        found = recordings_of(RunDir(path))
    else:
        found = RunRecordings(recordings=(Recording(evidence=str(path), samples=load(path)),))
    if not found.recordings:
        hint = "pass the directory of a recorded run, or a gpu_stats*.json or gpu_metrics*.csv file"
        raise RecordError(f"{path} contains no recording", why="; ".join(found.notes), hint=hint)
    timeline = timeline_of(found, list(QUANTITIES), POINTS)
    if timeline is None:
        raise RecordError(f"{path} has a single sample", hint="record again")
    notes = (*found.notes, *(note for one in found.recordings for note in one.samples.notes))
    return Recorded(path=path, recordings=found.recordings, timeline=timeline, notes=notes)


def draw_recording(one: Recorded) -> Figure:
    """Return the figure of a recording: a panel per quantity, a line per GPU, or of many their range and the worst."""
    found = {name: lines for name in QUANTITIES if (lines := banded(one.timeline, name))}
    figure, panels = _grid(one.path.name, "GPU recording", list(found), [one])
    places: dict[str, int] = {}
    time_name, seconds = time_unit(one.timeline.seconds)
    for axes, (name, devices) in zip(panels, found.items(), strict=False):
        axes.set_xlabel(f"time ({time_name})")
        for place, device in enumerate(devices):
            draw_line(axes, one.timeline.centres / seconds, device.lanes[name], QUANTITIES[name][1], place=place)
            places.setdefault(device.label, place)
    legend(figure, places)
    return figure


def draw_comparison(both: Sequence[Recorded], names: Sequence[str]) -> Figure:
    """Return the figure of two recordings: a panel per quantity, the GPUs of each over time: mean, lowest, highest."""
    devices = {name: [_lanes(one.timeline, name) for one in both] for name in QUANTITIES}
    known = [name for name, lanes in devices.items() if any(lanes)]
    figure, panels = _grid(" and ".join(names), "GPU comparison", known, both)
    time_name, seconds = time_unit(max(one.timeline.seconds for one in both))
    for axes, name in zip(panels, known, strict=False):
        axes.set_xlabel(f"time ({time_name})")
        for place, (one, lanes) in enumerate(zip(both, devices[name], strict=True)):
            if lanes:
                draw_line(axes, one.timeline.centres / seconds, _over(lanes), QUANTITIES[name][1], place=place)
    legend(figure, {label: place for place, label in enumerate(_labels(both, names))})
    return figure


def draw_histograms(both: Sequence[Recorded], names: Sequence[str]) -> Figure:
    """Return the figure of the distributions of two recordings: a panel per quantity, both with the same bins."""
    every = {name: [one.values(name) for one in both] for name in QUANTITIES}
    known = [name for name, values in every.items() if any(map(len, values))]
    figure, panels = _grid(" and ".join(names), "GPU comparison: distributions", known, both)
    for axes, name in zip(panels, known, strict=False):
        edges = np.histogram_bin_edges(np.concatenate(every[name]), BINS).tolist()
        for place, values in enumerate(every[name]):
            shares = np.full(len(values), 100 / max(1, len(values)))
            style: dict[str, Any] = {"color": DEVICE_COLOURS[place], "linestyle": ("-", "--")[place]}
            axes.hist(values, bins=edges, weights=shares, histtype="step", linewidth=1.5, **style)
        axes.set_ylabel("% of the samples")
    legend(figure, {label: place for place, label in enumerate(_labels(both, names))})
    return figure


def summary_lines(one: Recorded) -> list[str]:
    """Return the summary of a recording: mean, minimum and maximum of each quantity per GPU."""
    devices = list(dict.fromkeys(device for each in one.recordings for device in each.samples.devices))
    rows = []
    for name, (title, _) in QUANTITIES.items():
        for device in devices:
            if len(values := one.values(name, device)):
                numbers = (fixed(float(x), 2) for x in (values.mean(), values.min(), values.max()))
                rows.append([title, str(device.index), *numbers])
    return [
        f"recording  {one.path}",
        f"samples    {one.length}",
        *(f"GPU {device.index}      {device.name}" for device in devices),
        *(["note       simulated, not measured"] if one.simulated else []),
        *(f"note       {note}" for note in one.notes),
        "",
        *table(columns(["quantity", "GPU", "mean", "minimum", "maximum"]), rows, WIDTH),
    ]


def comparison_lines(both: Sequence[Recorded], names: Sequence[str]) -> list[str]:
    """Return the means of two recordings over all GPUs, and their difference."""
    labelled = list(zip(both, _labels(both, names), strict=True))
    lines = [f"{name}: {one.length}" for one, name in labelled]
    lines += [f"note: {name}: {note}" for one, name in labelled for note in one.notes]
    rows = []
    for name, (title, _) in QUANTITIES.items():
        values = [one.values(name) for one in both]
        if all(map(len, values)):
            first, second = (float(each.mean()) for each in values)
            change = f"{100 * (second / first - 1):+.1f} %" if first else "n/a"
            rows.append([title, fixed(first, 2), fixed(second, 2), change])
    return [*lines, "", *table(columns(["quantity, mean", "first", "second", "difference"]), rows, WIDTH)]


def main(argv: Sequence[str]) -> int:
    """Draw what the options of gputop ask for, and print the written files. Raises KmatrixError for user errors."""
    parser = argparse.ArgumentParser(prog="gputop", description=__doc__, allow_abbrev=False)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--gen-graph", type=Path, metavar="FILE", help="draw a recording over time, next to it")
    chosen.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="compare two recordings, in this folder")
    options = parser.parse_args(argv)
    path: Path | None = options.gen_graph
    if path is not None:
        one = read_recording(path)
        base = path / path.resolve().name if path.is_dir() else path.with_name(path.name.removesuffix(".json"))
        summary = base.with_name(f"{base.name}_summary.txt")
        text = "\n".join([*summary_lines(one), ""])
        jobs: dict[Path, Callable[[], Figure]] = {base.with_name(f"{base.name}_plot.png"): lambda: draw_recording(one)}
        written = [*_write(jobs, {summary: text}), summary]
    else:
        both = [read_recording(each) for each in options.compare]
        names = shortened_names([str(each) for each in options.compare], 40)
        text = "\n".join([*comparison_lines(both, names), ""])
        jobs = {
            Path("gpu_comparison.png"): lambda: draw_comparison(both, names),
            Path("gpu_comparison_histograms.png"): lambda: draw_histograms(both, names),
        }
        written = _write(jobs, {})
    print(text, end="")
    print("\n".join(f"wrote {file}" for file in written))
    return 0


def run(argv: Sequence[str]) -> int:
    """Run it as a program: print errors, and return the exit status."""
    return run_program(lambda: main(argv))


def _write(jobs: Mapping[Path, Callable[[], Figure]], texts: Mapping[Path, str]) -> list[Path]:
    """Draw figures and write texts; return the files of the figures. Raises RecordError."""
    try:
        for path, draw in jobs.items():
            draw_jobs([(path.name, draw)], path.parent)
        for path, text in texts.items():
            write_text(path, text)
    except OSError as error:
        hint = "copy the recording to a folder with space"
        raise RecordError(f"cannot write {path}", why=reason_of(error), hint=hint) from None
    return list(jobs)


def _grid(name: str, title: str, quantities: Sequence[str], drawn: Sequence[Recorded]) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel per quantity."""
    if not quantities:
        raise RecordError(f"{name} has no known value", hint="record again")
    shape = (math.ceil(len(quantities) / 2), 1 if len(quantities) == 1 else 2)
    mark = mark_of([one.simulated for one in drawn], "recordings")
    figure, panels = panel_grid(name, title, shape, mark, shared="")
    for axes, quantity in zip(panels, quantities, strict=False):
        subtitle(axes, QUANTITIES[quantity][0])
    for spare in panels[len(quantities) :]:
        spare.set_axis_off()
    return figure, panels


def _labels(both: Sequence[Recorded], names: Sequence[str]) -> list[str]:
    """Return the names of recordings, each with its mark if its GPUs were simulated."""
    return [f"{name} (simulated)" if one.simulated else name for one, name in zip(both, names, strict=True)]


def _lanes(timeline: Timeline, quantity: str) -> list[Lane]:
    return [one.lanes[quantity] for one in timeline.devices if quantity in one.lanes]


def _over(lanes: Sequence[Lane]) -> Lane:
    """Return the mean, the lowest and the highest of the devices that are known in each column."""
    means = np.ma.masked_invalid([lane.mean for lane in lanes])
    return Lane(*(each.filled(np.nan) for each in (means.mean(axis=0), means.min(axis=0), means.max(axis=0))))
