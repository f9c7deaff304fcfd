"""Graphs of single recordings, without a matrix: one over time, or two compared, as the original project draws them.

`python scripts/gputop.py --gen-graph FILE` and `--compare FILE FILE`: statistics files of this or of the original
project, also truncated ones, tables, and run directories with gpu_samples.bin.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
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
from kmatrix.report.gpu.recordings import Recording, RunRecordings
from kmatrix.report.gpu.samples import Array
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


def read_recording(path: Path) -> Recording:
    """Return a recording, or the last one in a run directory. Raises RecordError if there is none."""
    source = RunDir(path).gpu_samples if path.is_dir() else path
    if path.is_dir() and not source.is_file():
        hint = "pass the directory of a recorded run, or a gpu_stats*.json or gpu_metrics*.csv file"
        raise RecordError(f"{path} contains no {source.name}", why="it was not recorded", hint=hint)
    return Recording(evidence=str(path), samples=load(source))


def draw_recording(one: Recording) -> Figure:
    """Return the figure of a recording: a panel per quantity, a line per GPU, or of many their range and the worst."""
    timeline = _timeline(one)
    found = {name: banded(timeline, name) for name in QUANTITIES}
    figure, panels = _grid(Path(one.evidence).name, "GPU recording", [name for name in found if found[name]], [one])
    places: dict[str, int] = {}
    for axes, (name, devices) in zip(panels, ((name, each) for name, each in found.items() if each), strict=False):
        time_name, seconds = time_unit(timeline.seconds)
        axes.set_xlabel(f"time ({time_name})")
        for place, device in enumerate(devices):
            draw_line(axes, timeline.centres / seconds, device.lanes[name], QUANTITIES[name][1], place=place)
            places.setdefault(device.label, place)
    legend(figure, places)
    return figure


def draw_comparison(recordings: Sequence[Recording], names: Sequence[str]) -> Figure:
    """Return the figure of two recordings: a panel per quantity, the GPUs of each over time: mean, lowest, highest."""
    timelines = [_timeline(one) for one in recordings]
    known = [name for name in QUANTITIES if any(name in each.lanes for one in timelines for each in one.devices)]
    figure, panels = _grid(" and ".join(names), "GPU comparison", known, recordings)
    time_name, seconds = time_unit(max(one.seconds for one in timelines))
    for axes, name in zip(panels, known, strict=False):
        axes.set_xlabel(f"time ({time_name})")
        for place, timeline in enumerate(timelines):
            lanes = [one.lanes[name] for one in timeline.devices if name in one.lanes]
            if lanes:
                draw_line(axes, timeline.centres / seconds, _over_devices(lanes), QUANTITIES[name][1], place=place)
    legend(figure, {label: place for place, label in enumerate(_labels(recordings, names))})
    return figure


def draw_histograms(recordings: Sequence[Recording], names: Sequence[str]) -> Figure:
    """Return the figure of the distributions of two recordings: a panel per quantity, both with the same bins."""
    every = {name: [_known(one, name) for one in recordings] for name in QUANTITIES}
    known = [name for name, both in every.items() if any(len(each) for each in both)]
    figure, panels = _grid(" and ".join(names), "GPU comparison: distributions", known, recordings)
    for axes, name in zip(panels, known, strict=False):
        edges = np.histogram_bin_edges(np.concatenate(every[name]), BINS).tolist()
        for place, values in enumerate(every[name]):
            shares = np.full(len(values), 100 / max(1, len(values)))
            style: dict[str, Any] = {
                "color": DEVICE_COLOURS[place],
                "histtype": "step",
                "linestyle": ("-", "--")[place],
            }
            axes.hist(values, bins=edges, weights=shares, linewidth=1.5, **style)
        axes.set_ylabel("% of the samples")
    legend(figure, {label: place for place, label in enumerate(_labels(recordings, names))})
    return figure


def summary_lines(one: Recording) -> list[str]:
    """Return the summary of a recording: mean, minimum and maximum of each quantity per GPU."""
    samples = one.samples
    rows = []
    for name, (title, size) in QUANTITIES.items():
        for place, device in enumerate(samples.devices):
            values = samples.values[name][:, place] / size if name in samples.values else np.empty(0)
            if len(values := values[~np.isnan(values)]):
                rows.append(
                    [title, str(device.index), *(fixed(x, 2) for x in (values.mean(), values.min(), values.max()))]
                )
    return [
        f"recording  {one.evidence}",
        f"samples    {len(samples):,} in {samples.time[-1]:,.1f} s",
        *(f"GPU {device.index}      {device.name}" for device in samples.devices),
        *(["note       simulated, not measured"] if samples.simulated else []),
        *(f"note       {note}" for note in samples.notes),
        "",
        *table(columns(["quantity", "GPU", "mean", "minimum", "maximum"]), rows, WIDTH),
    ]


def comparison_lines(recordings: Sequence[Recording], names: Sequence[str]) -> list[str]:
    """Return the means of two recordings over all GPUs, and their difference."""
    both = list(zip(recordings, _labels(recordings, names), strict=True))
    lines = [f"{name}: {len(one.samples):,} samples in {one.samples.time[-1]:,.1f} s" for one, name in both]
    lines += [f"note: {name}: {note}" for one, name in both for note in one.samples.notes]
    rows = []
    for name, (title, _) in QUANTITIES.items():
        values = [_known(one, name) for one in recordings]
        if all(len(each) for each in values):
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


def _timeline(one: Recording) -> Timeline:
    found = timeline_of(RunRecordings(recordings=(one,)), list(QUANTITIES), POINTS)
    if found is None:
        raise RecordError(f"{one.evidence} has a single sample", hint="record again")
    return found


def _grid(
    name: str, title: str, quantities: Sequence[str], recordings: Sequence[Recording]
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel per quantity."""
    if not quantities:
        raise RecordError(f"{name} has no known value", hint="record again")
    shape = (math.ceil(len(quantities) / 2), 1 if len(quantities) == 1 else 2)
    mark = mark_of([one.samples.simulated for one in recordings], "recordings")
    figure, panels = panel_grid(name, title, shape, mark, shared="")
    for axes, quantity in zip(panels, quantities, strict=False):
        subtitle(axes, QUANTITIES[quantity][0])
    for spare in panels[len(quantities) :]:
        spare.set_axis_off()
    return figure, panels


def _labels(recordings: Sequence[Recording], names: Sequence[str]) -> list[str]:
    """Return the names of recordings, each with its mark if its GPUs were simulated."""
    pairs = zip(recordings, names, strict=True)
    return [f"{name} (simulated)" if one.samples.simulated else name for one, name in pairs]


def _known(one: Recording, quantity: str) -> Array:
    """Return the known values of all GPUs, in the unit of its panel."""
    values = one.samples.values[quantity] if quantity in one.samples.values else np.empty(0)
    return values[~np.isnan(values)] / QUANTITIES[quantity][1]


def _over_devices(lanes: Sequence[Lane]) -> Lane:
    """Return the mean, the lowest and the highest of the devices that are known in each column."""
    means = np.ma.masked_invalid([lane.mean for lane in lanes])
    return Lane(*(each.filled(np.nan) for each in (means.mean(axis=0), means.min(axis=0), means.max(axis=0))))
