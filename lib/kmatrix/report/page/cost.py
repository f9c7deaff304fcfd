"""The section of the page on cost: what each configuration takes, and which ones no other beats in loss and cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kmatrix.report.numbers import BITS, GroupNumbers, MatrixNumbers, Ranking, RunNumbers
from kmatrix.report.page.parts.figures import SAME_COST, Panel, Point, pareto
from kmatrix.report.page.parts.groups import MOST_ROWS, PageGroup
from kmatrix.report.page.parts.text import fixed, percent
from kmatrix.report.page.parts.units import ENERGY, MEMORY, TIME, TOKEN_ENERGY, Unit, unit_of
from kmatrix.stats import LEVEL, mean, mean_interval

RESAMPLES = 1000  # of the seeds of a front
RESAMPLE_SEED = 20261120  # fixed: the same runs give the same page
LEAST_SEEDS = 3  # of a configuration that resampling says something about: two seeds give three different means
MOST_FRONTS = 3  # rankings with figures


@dataclass(frozen=True, slots=True, kw_only=True)
class CostColumn:
    """One kind of cost. unit: its name in the table; size: the amount of the recorded unit that it stands for."""

    key: str
    title: str
    unit: str
    size: float
    digits: int  # decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What the finished runs of a configuration take, in the unit of its column."""

    mean: float
    half: float | None  # of the confidence interval of the mean; None for a single run
    low: float
    high: float
    runs: int  # for which it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One configuration. amounts: in the order of the columns."""

    group: PageGroup
    amounts: tuple[Amount | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontShare:
    """How often a configuration is on the fronts of loss against each cost, over resampled seeds.

    None: fewer than LEAST_SEEDS runs, or not on the figure.
    """

    group: PageGroup
    shares: tuple[float | None, ...]  # 0 to 1, in the order of Fronts.panels


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronts:
    """The figures of one ranking: loss against each cost."""

    about: str  # what tells the ranking from the others; "" if it is the only one
    panels: tuple[Panel, ...]
    costs: tuple[str, ...]  # titles, as in the columns
    shares: tuple[FrontShare, ...]  # of the configurations that are on a front in at least one resample
    hidden: int  # of them, those that are not in `shares`


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSection:
    """What the section shows."""

    columns: tuple[CostColumn, ...]
    rows: tuple[CostRow, ...]
    hidden: int  # configurations without a row
    level: float  # of all intervals
    fronts: tuple[Fronts, ...] = field(default=(), repr=False)
    missing: tuple[str, ...] = ()  # kinds of cost that are unknown for every run
    simulated: bool = False  # some energy was left out because simulated GPUs have none
    reused: bool = False  # some cost was left out because the runs were paid for in another matrix
    resamples: int = RESAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A kind of cost: where it comes from and how it is shown."""

    key: str
    title: str
    units: tuple[Unit, ...]  # ascending
    pick: Callable[[RunNumbers], float | None]
    on_front: bool = False  # the lower the better, and in a figure


def energy(run: RunNumbers) -> float | None:
    """Return the joules of a run; None unless they were measured over the whole training."""
    gpu = run.gpu
    # Joules per token are known only if the recording holds the training. Simulated GPUs use no energy.
    return None if gpu is None or gpu.simulated or gpu.joules_per_token is None else gpu.joules


def energy_per_token(run: RunNumbers) -> float | None:
    """Return the measured J/token of the training, else of the whole run."""
    if energy(run) is None or run.gpu is None:
        return None
    return run.gpu.main.joules_per_token if run.gpu.main.joules_per_token is not None else run.gpu.joules_per_token


def price(run: RunNumbers) -> float | None:
    """Return the dollars of a run in this matrix; None if it was reused: it was paid for elsewhere."""
    return None if run.reused_from else run.dollars


KINDS = (
    _Kind(key="step_ms", title="time per step", units=((1.0, "ms"),), pick=lambda run: run.step_ms),
    _Kind(key="speed", title="speed", units=((1.0, "tokens/s"),), pick=lambda run: run.tokens_per_second),
    _Kind(key="mfu", title="MFU", units=((0.01, "%"),), pick=lambda run: run.mfu),
    _Kind(key="seconds", title="training time", units=TIME, pick=lambda run: run.seconds, on_front=True),
    _Kind(
        key="memory",
        title="peak memory",
        units=MEMORY,
        pick=lambda run: run.peak_memory_mib,
        on_front=True,
    ),
    _Kind(
        key="joules",
        title="energy",
        units=ENERGY,
        pick=energy,
        on_front=True,
    ),
    _Kind(
        key="per_token",
        title="energy per token",
        units=TOKEN_ENERGY,
        pick=energy_per_token,
    ),
    _Kind(key="dollars", title="price", units=((1.0, "$"),), pick=price, on_front=True),
)


def cost(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> CostSection | None:
    """Return the section, or None if no run finished."""
    counted = [group for group in groups if group.counted]
    if not counted:
        return None
    known = [kind for kind in KINDS if any(group.values(kind.pick) for group in counted)]
    columns = tuple(_column(kind, counted) for kind in known)
    runs = [run for group in counted for run in group.counted]
    rows = tuple(
        CostRow(
            group=group,
            amounts=tuple(
                amount_of(group.values(kind.pick), column.size, numbers.confidence)
                for kind, column in zip(known, columns, strict=True)
            ),
        )
        for group in counted[:MOST_ROWS]
    )
    return CostSection(
        columns=columns,
        rows=rows,
        hidden=len(counted) - len(rows),
        level=numbers.confidence,
        fronts=_fronts(numbers, counted, list(zip(known, columns, strict=True))),
        missing=tuple(kind.title for kind in KINDS if kind not in known),
        simulated=any(run.gpu is not None and run.gpu.simulated for run in runs),
        reused=any(run.reused_from and run.dollars is not None for run in runs),
    )


def amount_of(values: Sequence[float], size: float, level: float = LEVEL) -> Amount | None:
    """Return what runs take, in a unit of this size; None without a value."""
    if not values:
        return None
    scaled = [value / size for value in values]
    interval = mean_interval(scaled, level)
    return Amount(
        mean=mean(scaled),
        half=None if interval is None else (interval.high - interval.low) / 2,
        low=min(scaled),
        high=max(scaled),
        runs=len(scaled),
    )


def front_shares(samples: Sequence[Sequence[tuple[int, float, float]]]) -> list[float]:
    """Return the share of RESAMPLES bootstrap resamples in which each configuration is on the front.

    samples: seed, loss and cost of each run, by configuration. If all configurations have the same seeds, one draw of
    seeds serves all of them, so that what a seed does to all of them cancels out. On the front: no other configuration
    has a lower loss at the same cost (up to SAME_COST) or less.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 6.
    """
    import numpy as np

    random = np.random.default_rng(RESAMPLE_SEED)
    ordered = [sorted(sample) for sample in samples]
    seeds = {tuple(seed for seed, _, _ in sample) for sample in ordered}
    common = random.integers(0, len(ordered[0]), (RESAMPLES, len(ordered[0]))) if len(seeds) == 1 else None
    losses, costs = [], []
    for sample in ordered:
        draws = random.integers(0, len(sample), (RESAMPLES, len(sample))) if common is None else common
        losses.append(np.array([loss for _, loss, _ in sample])[draws].mean(axis=1))
        costs.append(np.array([cost for _, _, cost in sample])[draws].mean(axis=1))
    loss, paid = np.array(losses).T, np.array(costs).T  # (resample, configuration)
    counts = np.zeros(len(samples))
    for one_loss, one_cost in zip(loss, paid, strict=True):
        order = np.argsort(one_cost)
        best = np.minimum.accumulate(one_loss[order])  # lowest loss up to each cost
        affordable = np.searchsorted(one_cost[order], one_cost * SAME_COST, side="right")
        counts += one_loss <= best[affordable - 1]
    return [float(count) / RESAMPLES for count in counts]


def _column(kind: _Kind, groups: Sequence[PageGroup]) -> CostColumn:
    values = [value for group in groups for value in group.values(kind.pick)]
    size, unit = unit_of(kind.units, max(values))
    return CostColumn(key=kind.key, title=kind.title, unit=unit, size=size, digits=_digits(max(values) / size))


def _digits(most: float) -> int:
    """Return the decimals with which a column shows four significant digits."""
    return 3 if most <= 0 else min(6, max(0, 3 - math.floor(math.log10(most))))


def _fronts(
    numbers: MatrixNumbers, groups: Sequence[PageGroup], kinds: Sequence[tuple[_Kind, CostColumn]]
) -> tuple[Fronts, ...]:
    by_name = {group.numbers.name: group for group in groups}
    rankings = [ranking for ranking in numbers.rankings if len(ranking.groups) > 1]
    found = []
    for ranking in rankings[:MOST_FRONTS]:
        members = [(by_name[group.name], group) for group in ranking.groups if group.name in by_name]
        drawn = [
            (panel, column.title, shares)
            for kind, column in kinds
            if kind.on_front and (panel := _panel(ranking, members, kind, column, shares := _shares(members, kind)))
        ]
        if drawn:
            rows = _table_of_shares(members, [shares for _, _, shares in drawn])
            found.append(
                Fronts(
                    about=_about(ranking) if len(numbers.rankings) > 1 else "",
                    panels=tuple(panel for panel, _, _ in drawn),
                    costs=tuple(title for _, title, _ in drawn),
                    shares=rows[:MOST_ROWS],
                    hidden=len(rows[MOST_ROWS:]),
                )
            )
    return tuple(found)


def _about(ranking: Ranking) -> str:
    return "bits per byte" if ranking.metric == BITS else f"data {ranking.data_sha256[:8]}"


def _samples(group: GroupNumbers, kind: _Kind) -> list[tuple[int, float, float]]:
    """Return seed, loss and cost of each finished run with a known cost."""
    pairs = zip(group.losses.items(), group.counted, strict=True)
    return [(seed, loss, paid) for (seed, loss), run in pairs if (paid := kind.pick(run)) is not None]


def _shares(members: Sequence[tuple[PageGroup, GroupNumbers]], kind: _Kind) -> dict[int, float]:
    """Return by configuration how often it is on the front; those with few seeds are in the resamples, but not here."""
    sampled = [(page.index, samples) for page, group in members if (samples := _samples(group, kind))]
    if not any(len(samples) >= LEAST_SEEDS for _, samples in sampled):
        return {}
    shares = front_shares([samples for _, samples in sampled])
    pairs = zip(sampled, shares, strict=True)
    return {index: share for (index, samples), share in pairs if len(samples) >= LEAST_SEEDS}


def _panel(
    ranking: Ranking,
    members: Sequence[tuple[PageGroup, GroupNumbers]],
    kind: _Kind,
    column: CostColumn,
    shares: dict[int, float],
) -> Panel | None:
    """Return the figure of one cost; None if fewer than two configurations have it."""
    points = []
    for page, group in members:
        paid = amount_of([paid for _, _, paid in _samples(group, kind)], column.size)
        if paid is None or group.mean is None:
            continue
        # Two seeds give an interval of ten times their distance: it would hide every other one.
        interval = group.interval if len(group.losses) >= LEAST_SEEDS else None
        tip = f"{page.short}: loss {fixed(group.mean)}, {column.title} {fixed(paid.mean, column.digits)} {column.unit}"
        if page.index in shares:
            tip += f", on the front in {percent(shares[page.index])} of the resamples"
        points.append(
            Point(
                name=page.short if len(page.short) <= 22 else f"{page.short[:21]}…",
                tip=tip,
                colour=page.colour,
                group=page.index,
                x=paid.mean,
                y=group.mean,
                low=interval.low if interval else None,
                high=interval.high if interval else None,
                left=paid.low,
                right=paid.high,
            )
        )
    unit = "bits/byte" if ranking.metric == BITS else "nats/token"
    return pareto(
        f"Loss and {column.title}",
        f"{column.title} ({column.unit})",
        unit,
        points,
    )


def _table_of_shares(
    members: Sequence[tuple[PageGroup, GroupNumbers]], shares: Sequence[dict[int, float]]
) -> tuple[FrontShare, ...]:
    rows = [(page, tuple(one.get(page.index) for one in shares)) for page, _ in members]
    return tuple(FrontShare(group=page, shares=each) for page, each in rows if any(each))
