"""The section of the page on scaling: throughput of a configuration on several numbers of GPUs, next to the ideal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kmatrix.report.numbers import MatrixNumbers, Scaling
from kmatrix.report.page.parts.figures import WIDTH, Panel, Place, Scale, polyline, spread_labels
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.text import name
from kmatrix.text import plural

MOST_LINES = 8  # of the figure
LABEL_GAP = 14  # distance of two names, units of a panel
LABEL_ROOM = 120  # to the right of the figure
LETTERS = 18  # of a name in the figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSize:
    """One number of devices."""

    devices: int
    tokens_per_second: float  # mean over seeds
    low: float  # of the runs, tokens/s
    high: float
    speedup: float
    efficiency: float  # 1 is ideal
    global_batch: int | None  # sequences per step
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFamily:
    """One configuration on several numbers of devices."""

    short: str
    colour: str
    dash: int
    index: int  # of the configuration with the fewest devices: data-g
    device: str  # "GPU" or "rank"
    sizes: tuple[ScalingSize, ...]  # fewest first

    @property
    def batches_differ(self) -> bool:
        """True if the global batch grows with the devices: a step is then not the same amount of work."""
        return len({size.global_batch for size in self.sizes}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLine:
    """One configuration in the figure."""

    short: str
    colour: str
    dash: int
    points: str  # of a polyline
    marks: tuple[tuple[float, float, str], ...]  # place, and what a pointer that rests on it shows
    label_y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSection:
    """What the section shows."""

    families: tuple[ScalingFamily, ...]
    panel: Panel = field(repr=False)
    lines: tuple[ScalingLine, ...] = field(repr=False)
    ideal: str  # of a polyline
    device: str  # "GPUs" or "ranks"
    batches: str  # a sentence about the global batch; "" if it is the same for all sizes

    @property
    def omitted(self) -> int:
        """Number of configurations that are in the table only."""
        return len(self.families) - len(self.lines)


def scaling(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> ScalingSection | None:
    """Return the section, or None if no configuration finished on two numbers of devices."""
    by_run = {run.name: group for group in groups for run in group.runs}
    speeds = {run.name: run.tokens_per_second for run in numbers.runs if run.tokens_per_second}
    families = [_family(one, by_run, speeds) for one in numbers.scalings]
    if not families:
        return None
    families.sort(key=lambda family: family.index)
    panel, x, y = _axes(families[:MOST_LINES])
    sizes = sorted({size.devices for family in families[:MOST_LINES] for size in family.sizes})
    ideal = polyline((x.at(math.log2(size)), y.unbounded(math.log2(size / sizes[0]))) for size in (sizes[0], sizes[-1]))
    return ScalingSection(
        families=tuple(families),
        panel=panel,
        lines=_lines(families[:MOST_LINES], panel, x, y),
        ideal=ideal,
        device="ranks" if all(family.device == "rank" for family in families) else "GPUs",
        batches=_batches(families),
    )


def _family(one: Scaling, by_run: Mapping[str, PageGroup], speeds: Mapping[str, float]) -> ScalingFamily:
    group = by_run[one.rows[0].runs[0]]
    rows = []
    for row in one.rows:
        each = [speeds[run] for run in row.runs]
        rows.append(
            ScalingSize(
                devices=row.world_size,
                tokens_per_second=row.tokens_per_second,
                low=min(each),
                high=max(each),
                speedup=row.speedup,
                efficiency=row.efficiency,
                global_batch=row.global_batch,
                runs=len(row.runs),
            )
        )
    return ScalingFamily(
        short=name(one.name),
        colour=group.colour,
        dash=group.dash,
        index=group.index,
        device="rank" if one.device == "cpu" else "GPU",
        sizes=tuple(rows),
    )


def _batches(families: Sequence[ScalingFamily]) -> str:
    """Return what the global batch means for these numbers; "" if it is the same for all numbers of devices."""
    grows = [family for family in families if family.batches_differ]
    if not grows:
        return ""
    which = "" if len(grows) == len(families) else f" of {plural(len(grows), 'configuration')}"
    return (
        f"The global batch{which} differs between the numbers of devices (weak scaling): a step is more work on more "
        "devices, and the losses are those of other training runs."
    )


def _axes(families: Sequence[ScalingFamily]) -> tuple[Panel, Scale, Scale]:
    """Return the panel and its scales, both logarithmic to base 2."""
    sizes = sorted({size.devices for family in families for size in family.sizes})
    speedups = [size.speedup for family in families for size in family.sizes]
    ideal = sizes[-1] / sizes[0]
    low, high = min(1.0, *speedups), max(ideal, *speedups)
    panel = Panel(title="Speed-up", x_label="number of devices", right=WIDTH - LABEL_ROOM)
    x = Scale(math.log2(sizes[0]) - 0.08, math.log2(sizes[-1]) + 0.08, panel.left, panel.right)
    y = Scale(math.log2(low * 0.85), math.log2(high * 1.1), panel.bottom, panel.top)
    powers = range(math.ceil(y.low), math.floor(y.high) + 1)
    placed = replace(
        panel,
        x_ticks=tuple((x.at(math.log2(size)), f"{size}") for size in sizes),
        y_ticks=tuple((y.at(power), f"{2.0**power:g}×") for power in powers),
    )
    return placed, x, y


def _lines(families: Sequence[ScalingFamily], panel: Panel, x: Scale, y: Scale) -> tuple[ScalingLine, ...]:
    ends = spread_labels(
        [y.at(math.log2(family.sizes[-1].speedup)) for family in families], LABEL_GAP, panel.top + 6, panel.bottom
    )
    lines = []
    for family, label in zip(families, ends, strict=True):
        places: list[Place] = [(x.at(math.log2(one.devices)), y.at(math.log2(one.speedup))) for one in family.sizes]
        tips = [
            f"{family.short}, {plural(one.devices, family.device)}: {one.speedup:.2f}×, {one.efficiency:.0%} of ideal"
            for one in family.sizes
        ]
        lines.append(
            ScalingLine(
                short=family.short if len(family.short) <= LETTERS else f"{family.short[: LETTERS - 1]}…",
                colour=family.colour,
                dash=family.dash,
                points=polyline(places),
                marks=tuple((px, py, tip) for (px, py), tip in zip(places, tips, strict=True)),
                label_y=round(label + 4, 1),
            )
        )
    return tuple(lines)
