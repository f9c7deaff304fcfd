"""Graphs of single recordings, without a matrix: one over time, or two compared, as the original project draws them.

`python scripts/gputop.py --gen-graph FILE` and `--compare FILE FILE`: statistics files of this or of the original
project, also truncated ones, CSV files, and run directories with gpu_samples.bin.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.errors import RecordError, reason_of
from kmatrix.gpu.formats.binary import damage_note, read_samples
from kmatrix.gpu.formats.columns import SampleBlock, read_columns
from kmatrix.output import run_program
from kmatrix.records.files import write_text
from kmatrix.records.paths import RunDir
from kmatrix.report.figure import COLOURS, draw_jobs, figure_grid, mark_of, plain_ticks, subtitle, time_unit
from kmatrix.report.gpu.graphs.heat_maps import colour_limits, draw_map
from kmatrix.report.gpu.graphs.palette import DEVICE_COLOURS
from kmatrix.report.gpu.graphs.shared import MIB_PER_GIB, draw_capacity, draw_line, some_places
from kmatrix.report.gpu.numbers import CPU, SIMULATED
from kmatrix.report.gpu.parts import gap_s
from kmatrix.report.gpu.stream import MAX_GAP_S, Checks, sample_blocks
from kmatrix.text import first_names, shortened_names, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 1500  # points of a line: two per pixel
QUANTITIES: Mapping[str, str] = {  # column -> title of its panel
    "utilization": "utilization, %",
    "memory_used": "memory, GiB",
    "power": "power, W",
    "temperature": "temperature, C",
    "sm_clock": "SM clock, MHz",
}
COMPARED = (COLOURS["adamw"], COLOURS["muon"])  # of the first and the second recording
BINS = 30  # of a histogram


@dataclass(slots=True)
class ThinnedLine:
    """A line of at most 2 x MOST points in constant memory: adjacent ones are merged when there are more."""

    times: list[float] = field(default_factory=list)  # s
    values: list[float] = field(default_factory=list)  # NaN: unknown
    _each: int = 1  # samples per point
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # of the newest point: time, value, known
    _pending: int = 0
    _last: float = math.nan  # s, of the newest sample

    def add(self, time: float, value: float, longest: float = math.inf) -> None:
        """Add a sample. NaN: unknown. longest: s between two samples of a line; more is a gap, with a NaN at its ends.

        Points are merged with NaN to NaN, so that a gap never becomes a line.
        """
        if time - self._last > longest:
            self.finish()
            for end in (self._last, time):
                self._sums, self._pending = [end, 0.0, 0.0], 1
                self._close()
        self._last = time
        self._sums[0] += time
        if not math.isnan(value):
            self._sums[1] += value
            self._sums[2] += 1
        self._pending += 1
        if self._pending == self._each:
            self._close()

    def finish(self) -> None:
        """Add the samples of an incomplete last point."""
        if self._pending:
            self._close()

    def _close(self) -> None:
        self.times.append(self._sums[0] / self._pending)
        self.values.append(self._sums[1] / self._sums[2] if self._sums[2] else math.nan)
        self._sums, self._pending = [0.0, 0.0, 0.0], 0
        if len(self.values) >= 2 * MOST:
            self.times = [(a + b) / 2 for a, b in zip(self.times[::2], self.times[1::2], strict=True)]
            self.values = [_mean(pair) for pair in zip(self.values[::2], self.values[1::2], strict=True)]
            self._each *= 2


@dataclass(slots=True)
class Extent:
    """Mean, minimum and maximum of all samples of a quantity."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.count, self.total = self.count + 1, self.total + value
        self.least, self.most = min(self.least, value), max(self.most, value)


@dataclass(slots=True)
class SingleRecording:
    """One recording: a line per GPU and quantity. Times are seconds since the first sample."""

    path: Path
    names: dict[int, str] = field(default_factory=dict)  # GPU index -> name
    capacity: float | None = None  # GiB, of the largest GPU
    samples: int = 0
    seconds: float = 0.0
    lines: dict[str, dict[int, ThinnedLine]] = field(default_factory=lambda: {name: {} for name in QUANTITIES})
    ranges: dict[str, dict[int, Extent]] = field(default_factory=lambda: {name: {} for name in QUANTITIES})
    longest: float = MAX_GAP_S  # s between two samples without a gap
    is_simulated: bool = False
    notes: list[str] = field(default_factory=list)  # what could not be read, cannot be true, or is not drawn
    omitted: str = ""  # in the graph: names of files that are not drawn

    def known(self, quantity: str) -> dict[int, ThinnedLine]:
        """Return the lines of the GPUs that have a value of a quantity."""
        return {gpu: line for gpu, line in self.lines[quantity].items() if gpu in self.ranges[quantity]}


def read_recording(path: Path) -> SingleRecording:
    """Read a recording in constant memory. Raises RecordError if there is none, or no sample in it."""
    found = SingleRecording(path)
    begin: float | None = None
    for block in _blocks(path, found):
        begin = block.times[0] if begin is None else begin
        found.samples += len(block)
        found.seconds = max(found.seconds, block.times[-1] - begin)
        for part in block.parts:
            if part.gpu_index in block.repeated:
                continue
            found.names[part.gpu_index] = part.gpu_name
            found.is_simulated = found.is_simulated or part.gpu_name.endswith(SIMULATED)
            if part.memory_total:
                found.capacity = max(found.capacity or 0.0, part.memory_total / MIB_PER_GIB)
            for quantity in QUANTITIES:
                scale = MIB_PER_GIB if quantity == "memory_used" else 1.0
                line = found.lines[quantity].setdefault(part.gpu_index, ThinnedLine())
                for row, value in zip(part.rows, part.columns[quantity], strict=True):
                    line.add(block.times[row] - begin, value / scale, found.longest)
                    if not math.isnan(value):
                        found.ranges[quantity].setdefault(part.gpu_index, Extent()).add(value / scale)
    for lines in found.lines.values():
        for line in lines.values():
            line.finish()
    if not found.samples:
        raise RecordError(f"{path} contains no sample", hint="record again: gputop --stats-file, or GPU_MONITOR=y")
    return found


def _blocks(path: Path, found: SingleRecording) -> Iterator[SampleBlock]:
    """Yield the samples of a file or of the recording in a folder. Values that cannot be true are unknown."""
    run, checks = RunDir(path), Checks()
    if run.gpu_samples.is_file() or path.suffix == run.gpu_samples.suffix:
        source = run.gpu_samples if run.gpu_samples.is_file() else path
        if earlier := run.earlier_gpu_samples() if path.is_dir() else []:
            found.omitted = first_names(one.name for one in earlier)
            how = f"draw each alone, as --gen-graph {shown(earlier[0])}"
            found.notes.append(f"without earlier attempts on other GPUs, {found.omitted}: {how}")
        recording = read_samples(source)
        found.longest = gap_s(recording)
        found.notes += damage_note(source, recording.damaged)
        checks.cpu = recording.header.get("device_type") == CPU
        yield from (checks.possible(block) for block in sample_blocks(recording) if len(block))
    elif path.is_dir():
        raise RecordError(
            f"{path} contains no {run.gpu_samples.name}",
            why="it was not recorded",
            hint="pass the directory of a recorded run, or a gpu_stats*.json or gpu_metrics*.csv file",
        )
    else:
        reader = read_columns(path)
        yield from (checks.possible(block) for block in reader if len(block))
        found.notes += [] if reader.errors is None else [str(reader.errors)]
    found.notes += checks.errors()


def draw_recording(recording: SingleRecording) -> Figure:
    """Return the figure of a recording: a panel per quantity, a line per GPU, or a heat map of many GPUs."""
    quantities = [name for name in QUANTITIES if recording.known(name)]
    note = f": without {recording.omitted}" if recording.omitted else ""
    note += mark_of([recording.is_simulated], "recordings")
    figure, panels = _grid(recording.path.name, "GPU recording", len(quantities), note)
    gpus = list(recording.names)
    for axes, name in zip(panels, quantities, strict=False):
        _frame(axes, name, recording.seconds)
        if len(gpus) > len(DEVICE_COLOURS):
            _draw_map(figure, axes, recording, name)
        else:
            _draw_lines(axes, recording, name, gpus)
    if 1 < len(gpus) <= len(DEVICE_COLOURS):
        _legend(figure, [f"GPU {gpu}" for gpu in gpus], DEVICE_COLOURS)
    return figure


def _draw_lines(axes: Axes, recording: SingleRecording, quantity: str, gpus: Sequence[int]) -> None:
    """Draw a quantity as a line per GPU, for memory with its capacity."""
    _, unit = time_unit(recording.seconds)
    for gpu, line in recording.known(quantity).items():
        place = gpus.index(gpu)
        times = [time / unit for time in line.times]
        draw_line(axes, times, line.values, DEVICE_COLOURS[place], place=place, count=len(gpus))
    plain_ticks(axes, "y")
    if quantity != "memory_used":
        return
    most = max(one.most for one in recording.ranges[quantity].values())
    axes.set_ylim(0, 1.15 * max(recording.capacity or 0.0, most))
    if recording.capacity:
        draw_capacity(axes, recording.capacity)
        text = f"capacity {recording.capacity:.1f} GiB"
        where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(text, (0.99, recording.capacity), xytext=(0, 3), ha="right", fontsize=9, **where)


def _draw_map(figure: Figure, axes: Axes, recording: SingleRecording, quantity: str) -> None:
    """Draw a quantity as a row of colours per GPU."""
    import numpy as np

    lines = recording.known(quantity)
    count = max(len(line.values) for line in lines.values())
    centres = (np.arange(count) + 0.5) * recording.seconds / count
    grid = np.full((len(lines), count), np.nan)
    for row, line in zip(grid, lines.values(), strict=True):
        # The nearest point, if it is near: with a gap, they are not at equal distances.
        times, values = np.array(line.times), np.array(line.values)
        nearest = np.searchsorted((times[1:] + times[:-1]) / 2, centres)
        reach = max(recording.longest, 2 * float(np.median(np.diff(times)))) if len(times) > 1 else math.inf
        row[:] = np.where(np.abs(times[nearest] - centres) <= reach, values[nearest], np.nan)
    _, unit = time_unit(recording.seconds)
    low, high = colour_limits([grid], quantity)
    image = draw_map(axes, grid, recording.seconds / unit or 1.0, low, high)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    places = some_places(len(lines), 8)
    axes.set_yticks(places, [f"GPU {list(lines)[place]}" for place in places])
    figure.colorbar(image, ax=axes, pad=0.02)


def _legend(figure: Figure, names: Sequence[str], colours: Sequence[str]) -> None:
    """Name lines outside of the panels, where the legend covers none of them."""
    from matplotlib.lines import Line2D

    pairs = zip(names, colours, strict=False)
    handles = [Line2D([], [], color=colour, linewidth=2.0, label=name) for name, colour in pairs]
    figure.legend(handles=handles, loc="outside lower left", ncols=4)


def draw_comparison(recordings: Sequence[SingleRecording], names: Sequence[str]) -> Figure:
    """Return the figure of two recordings: a panel per quantity, the GPUs of each over time: mean, lowest, highest."""
    quantities = [name for name in QUANTITIES if any(one.known(name) for one in recordings)]
    figure, panels = _grid(" and ".join(names), "GPU comparison", len(quantities), _mark(recordings))
    longest = max(one.seconds for one in recordings)
    _, unit = time_unit(longest)
    for axes, quantity in zip(panels, quantities, strict=False):
        _frame(axes, quantity, longest)
        for recording, colour in zip(recordings, COMPARED, strict=True):
            times, columns = _over_gpus(recording.known(quantity))
            at = [time / unit for time in times]
            if len(recording.known(quantity)) > 1:
                lowest, highest = ([end(column, default=math.nan) for column in columns] for end in (min, max))
                axes.fill_between(at, lowest, highest, color=colour, alpha=0.15, linewidth=0)
            means = [_mean(column) for column in columns]
            draw_line(axes, at, means, colour, place=COMPARED.index(colour), count=len(COMPARED))
        if quantity != "utilization":
            plain_ticks(axes, "y")
    _legend(figure, _labels(recordings, names), COMPARED)
    return figure


def draw_histograms(recordings: Sequence[SingleRecording], names: Sequence[str]) -> Figure:
    """Return the figure of the distributions of two recordings: a panel per quantity, both with the same bins."""
    quantities = [name for name in QUANTITIES if any(one.known(name) for one in recordings)]
    figure, panels = _grid(" and ".join(names), "GPU comparison: distributions", len(quantities), _mark(recordings))
    for axes, quantity in zip(panels, quantities, strict=False):
        subtitle(axes, QUANTITIES[quantity])
        both = [
            [value for line in one.known(quantity).values() for value in line.values if not math.isnan(value)]
            for one in recordings
        ]
        least, most = min(map(min, filter(None, both))), max(map(max, filter(None, both)))
        if least == most:
            least, most = least - 0.5, most + 0.5
        width = (most - least) / BINS
        edges = [least + width * at for at in range(BINS + 1)]
        for values, colour in zip(both, COMPARED, strict=True):
            share = [100.0 / len(values)] * len(values) if values else []
            axes.hist(values, bins=edges, weights=share, color=colour, alpha=0.35)
            # The edges of both are visible where they are equal.
            dashes = (0, (4, 4)) if colour == COMPARED[1] else "-"
            axes.hist(values, bins=edges, weights=share, color=colour, histtype="step", linestyle=dashes, linewidth=1.5)
        axes.set_ylabel("% of the samples")
        plain_ticks(axes, "x")
    _legend(figure, _labels(recordings, names), COMPARED)
    return figure


def summary_lines(recording: SingleRecording) -> list[str]:
    """Return the summary of a recording: mean, minimum and maximum of each quantity per GPU."""
    lines = [
        f"recording  {recording.path}",
        f"samples    {recording.samples:,} in {recording.seconds:,.1f} s",
        *(f"GPU {gpu}      {name}" for gpu, name in sorted(recording.names.items())),
        *(["note       simulated, not measured"] if recording.is_simulated else []),
        *(f"note       {note}" for note in recording.notes),
        "",
        f"{'quantity':20}{'GPU':>5}{'mean':>12}{'minimum':>12}{'maximum':>12}",
    ]
    for quantity, title in QUANTITIES.items():
        for gpu, found in sorted(recording.ranges[quantity].items()):
            mean = found.total / found.count
            lines.append(f"{title:20}{gpu:>5}{mean:>12,.2f}{found.least:>12,.2f}{found.most:>12,.2f}")
    return lines


def comparison_lines(recordings: Sequence[SingleRecording], names: Sequence[str]) -> list[str]:
    """Return the means of two recordings over all GPUs, and their difference."""
    both = list(zip(recordings, _labels(recordings, names), strict=True))
    lines = [f"{name}: {one.samples:,} samples in {one.seconds:,.1f} s" for one, name in both]
    notes = ((one, name, note) for one, name in both for note in one.notes)
    # Some begin with the path.
    lines += [f"note: {note if note.startswith(str(one.path)) else f'{name}: {note}'}" for one, name, note in notes]
    lines += ["", f"{'quantity, mean':20}{'first':>12}{'second':>12}{'difference':>12}"]
    for quantity, title in QUANTITIES.items():
        first, second = (_mean_of(one.ranges[quantity].values()) for one in recordings)
        if first is None or second is None:
            continue
        change = f"{100 * (second / first - 1):+.1f} %" if first else "n/a"
        lines.append(f"{title:20}{first:>12,.2f}{second:>12,.2f}{change:>12}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Draw what the options of gputop ask for, and print the written files. Raises KmatrixError for user errors."""
    parser = argparse.ArgumentParser(prog="gputop", description=__doc__, allow_abbrev=False)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--gen-graph", type=Path, metavar="FILE", help="draw a recording over time, next to it")
    chosen.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="compare two recordings, in this folder")
    options = parser.parse_args(argv)
    if options.gen_graph is not None:
        return _generate(options.gen_graph)
    return _compare(options.compare)


def run(argv: Sequence[str]) -> int:
    """Run it as a program: print errors, and return the exit status."""
    return run_program(lambda: main(argv))


def _generate(path: Path) -> int:
    recording = read_recording(path)
    base = path / path.resolve().name if path.is_dir() else path.with_name(path.name.removesuffix(".json"))
    summary = base.with_name(f"{base.name}_summary.txt")
    text = "\n".join([*summary_lines(recording), ""])
    (plot,) = _drawn({base.with_name(f"{base.name}_plot.png"): lambda: draw_recording(recording)})
    try:
        write_text(summary, text)
    except OSError as error:
        raise RecordError(f"cannot write {summary}", why=reason_of(error)) from None
    print(text, end="")
    print(f"wrote {plot}\nwrote {summary}")
    return 0


def _compare(paths: Sequence[Path]) -> int:
    recordings = [read_recording(path) for path in paths]
    names = shortened_names([str(path) for path in paths], 40)
    print("\n".join(comparison_lines(recordings, names)))
    jobs: dict[Path, Callable[[], Figure]] = {
        Path("gpu_comparison.png"): lambda: draw_comparison(recordings, names),
        Path("gpu_comparison_histograms.png"): lambda: draw_histograms(recordings, names),
    }
    for path in _drawn(jobs):
        print(f"wrote {path}")
    return 0


def _drawn(jobs: Mapping[Path, Callable[[], Figure]]) -> list[Path]:
    """Draw figures into files, and return these."""
    try:
        for path, draw in jobs.items():
            draw_jobs([(path.name, draw)], path.parent)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}", why=reason_of(error), hint="copy the recording to a folder with space"
        ) from None
    return list(jobs)


def _mark(recordings: Sequence[SingleRecording]) -> str:
    return mark_of([one.is_simulated for one in recordings], "recordings")


def _labels(recordings: Sequence[SingleRecording], names: Sequence[str]) -> list[str]:
    """Return the names of recordings, each with its mark if its GPUs were simulated."""
    pairs = zip(recordings, names, strict=True)
    return [f"{name} {SIMULATED}" if one.is_simulated else name for one, name in pairs]


def _grid(name: str, title: str, panels: int, note: str) -> tuple[Figure, list[Axes]]:
    if not panels:
        raise RecordError(f"{name} has no known value", hint="record again")
    shape = (panels, 1) if panels == 1 else (math.ceil(panels / 2), 2)
    figure, axes = figure_grid(name, title, shape, 1.2 + 2.9 * shape[0], note=note, shared="")
    for spare in axes[panels:]:
        spare.set_axis_off()
    return figure, axes


def _frame(axes: Axes, quantity: str, seconds: float) -> None:
    """Set title, axes and limits of a panel over time."""
    name, unit = time_unit(seconds)
    subtitle(axes, QUANTITIES[quantity])
    axes.set_xlim(0, seconds / unit or 1.0)  # a single sample has no length
    axes.set_xlabel(name)
    if quantity == "utilization":
        axes.set_ylim(0, 105)


def _over_gpus(lines: Mapping[int, ThinnedLine]) -> tuple[list[float], list[list[float]]]:
    """Return the times of the longest line, and the known values of all GPUs at each of them."""
    if not lines:
        return [], []
    longest = max(lines.values(), key=lambda line: len(line.times))
    whole = [line.values for line in lines.values() if len(line.values) == len(longest.values)]
    columns: Iterable[Any] = zip(*whole, strict=True)
    return longest.times, [[value for value in values if not math.isnan(value)] for values in columns]


def _mean(known: Sequence[float]) -> float:
    return sum(known) / len(known) if known else math.nan


def _mean_of(ranges: Iterable[Extent]) -> float | None:
    found = list(ranges)
    count = sum(one.count for one in found)
    return sum(one.total for one in found) / count if count else None
