"""Draw the devices of runs as PNG: memory, balance, and each quantity over time. Each picture has one layout.

`python scripts/gputop.py --gen-graph FILE` and `--compare FILE FILE` draw recordings of any format.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kmatrix.gpu.balance import cv_text
from kmatrix.output import run_program
from kmatrix.records.files import write_text
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.report import figure
from kmatrix.report.gpu.recordings import Node, load, recordings_of
from kmatrix.report.gpu.results import Device, Gpu
from kmatrix.report.gpu.samples import Samples
from kmatrix.report.gpu.timeline import CHECKPOINT, ENDING, EVALUATION, SET_UP, Lane, Timeline, range_of, timeline_of
from kmatrix.report.results import Run
from kmatrix.text import UNKNOWN, WIDTH, columns, first_names, fixed, plural, shortened_names, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DEVICES = 16  # with a panel of their own
MIB_PER_GIB = 1024.0
# Those that occur together differ for readers with any kind of colour blindness. Phases are pale backgrounds.
PHASE_COLOURS = {SET_UP: "#C6E8C8", EVALUATION: "#FBE7A1", CHECKPOINT: "#A9B8F0", ENDING: "#AAAAAA"}
DEVICE_COLOURS = ("#009E73", "#332288", "#E69F00", "#B34700", "#AA4499", "#661100", "#005F56", "#222222")
METRICS = {  # quantity -> its words, its unit, recorded units per unit
    "utilization": ("utilization", "%", 1.0),
    "memory_used": ("memory", "GiB", MIB_PER_GIB),
    "power": ("power", "W", 1.0),
    "temperature": ("temperature", "°C", 1.0),
    "sm_clock": ("SM clock", "MHz", 1.0),
}
MARKS = "bar: mean   dot: peak   red: capacity"
Recorded = tuple[Run, Gpu]
Recording = tuple[str, Samples, Timeline | None]  # name, and what was recorded


def draw(
    root: Path, runs: Sequence[Run], timelines: Mapping[str, Timeline | None], folder: Path
) -> tuple[list[Path], list[str]]:
    """Draw the pictures of the devices into `folder`; return the files, and the reason for each that was not drawn.

    root: contains the folders of the runs. timelines: those that are read. Both are empty if no run has a recording.
    """
    name = root.name
    unread = [f"{run.name}: {note}" for run in runs if run.gpu and not run.gpu.gpus for note in run.gpu.notes]
    known = [(run, run.gpu) for run in runs if run.gpu and run.gpu.gpus]
    # Ranks on the CPU are not drawn next to GPUs: their memory is another quantity.
    known = [(run, gpu) for run, gpu in known if gpu.unit == "GPU"] or known
    if not known:
        return [], unread
    about, rows = figure.first_of(name, known, "runs")
    for run in (run for run, _ in rows if run.name not in timelines):
        nodes = recordings_of(RunDir(root / run.name))
        timelines = {**timelines, run.name: timeline_of(nodes, running=run.status == Status.RUNNING)}
    timed = [(row, one) for row in rows if (one := timelines[row[0].name])]
    jobs: list[figure.Job] = [
        ("gpu_memory_comparison.png", partial(bars, name, known)),
        ("per_gpu_memory_breakdown.png", partial(per_gpu, name, known)),
        ("gpu_load_balance_analysis.png", partial(balance, name, known)),
    ]
    for quantity in METRICS:
        file = "gpu_memory_timeline.png" if quantity == "memory_used" else f"gpu_timeline_{quantity}.png"
        jobs.append((file, partial(over_time, about, timed, quantity)))
    files, missing = figure.draw_jobs(jobs, folder)
    return files, [*unread, *missing]


def bars(name: str, known: Sequence[Recorded]) -> Figure | str:
    """Draw a row per run: the memory of all its devices."""
    every = [(run, gpu) for run, gpu in known if gpu.main.memory_used_mean is not None]
    if not every:
        return "no run recorded its memory"
    about, rows = figure.first_of(name, every, "runs")
    numbers = [(gpu.main.memory_used_mean, None, gpu.memory_used_max, gpu.memory_total) for _, gpu in rows]
    labels = [
        f"{label}\n{_gib(mean)} GiB on {plural(len(gpu.gpus), gpu.unit)}, peak {_gib(peak)}"
        + (f" of {_gib(capacity)}" if gpu.unit == "GPU" else "")
        for label, (_, gpu), (mean, _, peak, capacity) in zip(_labels(rows), rows, numbers, strict=True)
    ]
    drawn, (axes,) = figure.new_figure(about, "Memory per run", labels=labels)
    _draw_memory(axes, rows, numbers)
    axes.set_xlabel(f"memory used (GiB), sum over the devices of a run   {MARKS}")
    return drawn


def per_gpu(name: str, known: Sequence[Recorded]) -> Figure | str:
    """Draw a panel per device with a row per run: its memory. 1x2 panels for 2 GPUs, 2x2 for 4, 2x4 for 8."""
    every = [(run, gpu) for run, gpu in known if any("memory_used" in one.whole for one in gpu.gpus)]
    most = max((len(gpu.gpus) for _, gpu in every), default=0)
    if most < 2:
        return f"no run was recorded on at least two {known[0][1].unit}s"
    about, rows = figure.first_of(name, every, "runs")
    about, places = figure.first_of(about, range(most), "devices", MOST_DEVICES)
    grid = len(places), math.ceil(len(places) / math.isqrt(len(places)))  # panels, columns
    title = f"Memory per {rows[0][1].unit}"
    drawn, panels = figure.new_figure(about, title, *grid, labels=_labels(rows), shared=True)
    for place, axes in zip(places, panels, strict=True):
        devices = [gpu.gpus[place] if place < len(gpu.gpus) else None for _, gpu in rows]
        axes.set_title(first_names(dict.fromkeys(one.label for one in devices if one), 2))
        _draw_memory(axes, rows, [_memory_of(one) for one in devices])
    drawn.supxlabel(f"memory used (GiB)   {MARKS}   whisker: standard deviation", fontsize=10)
    return drawn


def _draw_memory(axes: Axes, rows: Sequence[Recorded], numbers: Sequence[Sequence[float | None]]) -> None:
    """Draw mean, deviation, peak and capacity of each run, MiB. None: unknown, not drawn."""
    mean, deviation, peak, capacity = np.array(numbers, dtype=float).T / MIB_PER_GIB
    places = range(len(rows))
    axes.barh(places, mean, height=0.6, xerr=deviation, color=_colours(rows))
    axes.plot(peak, places, ".", color=figure.DARK)
    if rows[0][1].unit == "GPU":  # ranks share the memory of their machine
        axes.plot(capacity, places, "|", color=figure.ALARM, markersize=14, markeredgewidth=1.5)
    axes.set_xlim(left=0)


def _memory_of(device: Device | None) -> tuple[float | None, ...]:
    memory = device and device.main.get("memory_used")
    if not device or not memory:
        return (None,) * 4
    return memory.mean, memory.deviation, device.whole["memory_used"].max, device.memory_total


def balance(name: str, known: Sequence[Recorded]) -> Figure | str:
    """Draw a row per run: the memory of each device relative to their mean, and the CVs with their classes."""
    every = [(run, gpu) for run, gpu in known if "memory_used" in gpu.main.balance]
    if not every:
        return "no run recorded the memory of at least two devices"
    about, rows = figure.first_of(name, every, "runs")
    labels, shares = [], []
    for label, (_, gpu) in zip(_labels(rows), rows, strict=True):
        used = sorted((one.main["memory_used"].mean, one.label) for one in gpu.gpus)  # known of all: it has a balance
        centre = statistics.fmean(mean for mean, _ in used)
        shares.append([100 * (mean / centre - 1) for mean, _ in used])
        labels.append(f"{label}\nlowest {used[0][1]}, highest {used[-1][1]}")
        if gpu.ranks and gpu.ranks.hidden:
            labels[-1] += f", waits {100 * gpu.ranks.straggler_time_share:.0f} % for rank {gpu.ranks.slowest_rank}"
    drawn, panels = figure.new_figure(about, "Load balance", 4, 4, labels=labels)
    colours = _colours(rows)
    for place, share in enumerate(shares):
        panels[0].plot(share, [place] * len(share), marker="o", color=colours[place], alpha=0.7)
    reach = max(1.0, *(abs(share) for share in chain(*shares)))  # %: equal devices are not drawn far apart
    panels[0].set_xlim(-1.1 * reach, 1.1 * reach)
    panels[0].set_xlabel("memory of each device,\n% from their mean")
    for axes, quantity in zip(panels[1:], ("memory_used", "utilization", "power"), strict=True):
        found = [gpu.main.balance.get(quantity) for _, gpu in rows]
        drawn_bars = axes.barh(range(len(rows)), [one.cv if one else 0.0 for one in found], height=0.5, color=colours)
        texts = [f"{cv_text(one.cv)} {one.quality}" if one else "unknown" for one in found]
        axes.bar_label(drawn_bars, texts, padding=4)
        axes.set_xlim(0, max(8.0, 2.5 * max((one.cv for one in found if one), default=0.0)))  # with room for the texts
        axes.set_xlabel(f"CV of {METRICS[quantity][0]} (%)")
    return drawn


def over_time(about: str, timed: Sequence[tuple[Recorded, Timeline]], quantity: str) -> Figure | str:
    """Draw a panel per run with a line per device; of many their mean, lowest and highest, and the worst by name."""
    word, unit, size = METRICS[quantity]
    drawn = [(row, one) for row, one in timed if one.knows(quantity)]
    if not drawn:
        return f"no run recorded its {word} over time"
    title = f"{word[0].upper()}{word[1:]} over time, each {drawn[0][0][1].unit}"
    picture, panels = figure.new_figure(about, title, len(drawn), min(2, len(drawn)), shared=True)
    time_name, seconds = figure.time_unit(max(one.seconds for _, one in drawn))
    for axes, label, (_, one) in zip(panels, _labels([row for row, _ in drawn]), drawn, strict=True):
        lanes, worst = one.lines(quantity)
        _draw_lanes(axes, lanes, seconds, size)
        axes.set_title(f"{label}, {worst}" if worst else label)
        if quantity == "memory_used" and one.capacity:
            axes.axhline(one.capacity / size, color=figure.ALARM, linewidth=1.1, linestyle="--", label="capacity")
        for span in one.spans:
            ends = span.begin / seconds, span.end / seconds
            axes.axvspan(*ends, color=PHASE_COLOURS[span.phase], linewidth=0, zorder=0, label=span.phase)
    panels[0].locator_params(nbins=5)
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlim(left=0)
    for axes in panels[-2:]:
        axes.set_xlabel(f"time since the start of the recording ({time_name})")
    picture.supylabel(f"{word} ({unit})", fontsize=10)
    _draw_legend(picture)
    return picture


def _draw_lanes(axes: Axes, lanes: Sequence[Lane], seconds: float, size: float) -> None:
    """Draw a line per lane with its range; NaN is a gap. seconds, size: of a unit of the axes, as recorded."""
    for place, one in enumerate(lanes):
        colour, dash = DEVICE_COLOURS[place % len(DEVICE_COLOURS)], figure.DASHES[place % len(figure.DASHES)]
        time = one.time / seconds
        axes.fill_between(time, one.low / size, one.high / size, color=colour, alpha=0.15, linewidth=0)
        axes.plot(time, one.mean / size, color=colour, linewidth=1.3, linestyle=dash, label=one.label)


def _draw_legend(picture: Figure) -> None:
    """Name what the panels show, outside of them."""
    found = {label: one for axes in picture.axes for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    picture.legend(found.values(), found.keys(), loc="outside lower left", ncols=5)


# ---- recordings without a matrix: one over time, or two compared ---------------------------------------------------


def read_recordings(paths: Sequence[Path]) -> list[Recording]:
    """Return the recordings in files. Raises RecordError if there is none."""
    found: list[Recording] = []
    for path, name in zip(paths, shortened_names([str(path) for path in paths], 40), strict=True):
        node = Node(folder=RunDir(path.parent), samples=(samples := load(path)))
        found.append((f"{name}{' (simulated)' * samples.simulated}", samples, timeline_of([node])))
    return found


def draw_recordings(recordings: Sequence[Recording]) -> Figure | str:
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
        _draw_lanes(axes, lanes, seconds, size)
        axes.set_title(f"{word}, {unit}{worst and f': {worst}'}")
        axes.set_xlabel(f"time ({time_name})")
    _draw_legend(picture)
    return picture


def summary(recordings: Sequence[Recording]) -> str:
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
    parser = argparse.ArgumentParser(prog="gputop", description="Draw recordings of any format.", allow_abbrev=False)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--gen-graph", type=Path, metavar="FILE", help="draw a recording over time, next to it")
    chosen.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="compare two recordings, in this folder")
    options = parser.parse_args(argv)
    path: Path | None = options.gen_graph
    stem = "gpu_comparison" if path is None else str(path.absolute()).removesuffix(".json")
    recordings = read_recordings(options.compare if path is None else [path])
    text, file = summary(recordings), Path(f"{stem}_summary.txt")
    written, missing = figure.draw_jobs([(f"{stem}_plot.png", partial(draw_recordings, recordings))], Path())
    write_text(file, text)
    print(text, *(f"wrote {one}" for one in (*written, file)), *missing, sep="\n")
    return 0


def _labels(rows: Sequence[Recorded]) -> list[str]:
    """Return the names of runs, with a mark if one is simulated or did not finish."""
    short = shortened_names([run.name for run, _ in rows], figure.MOST_NAME)
    return [
        name + " (simulated)" * gpu.simulated + f" ({run.status})" * (run.status != Status.FINISHED)
        for name, (run, gpu) in zip(short, rows, strict=True)
    ]


def _colours(rows: Sequence[Recorded]) -> list[str]:
    return [figure.PALETTE[figure.colour_of(run.optimizer)][0] for run, _ in rows]


def _gib(mib: float | None) -> str:
    return UNKNOWN if mib is None else f"{mib / MIB_PER_GIB:,.2f}"
