"""The section on loss curves: what the script draws, and a static figure for print and for readers without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kmatrix.report.metrics import Evaluations, Metrics, TrainingLosses, thinned
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.figures import Panel, Scale, polyline, spread_labels
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.stats import critical, mean

TRAINING_BYTES = 1_000_000  # of all training curves in a page
POINT_BYTES = 18  # of one point
MOST_TRAINING, LEAST_TRAINING = 200, 40  # points per training curve
LOSS_DIGITS = 4  # of training losses
EVALUATION_BYTES = 1_000_000  # of all validation losses in a page
EXACT_BYTES, SHORT_BYTES = 34, 9  # of one evaluation: with all digits, seconds and joules, or the loss alone
SHORT_DIGITS = 7  # significant digits of a validation loss, if all of them would be too long
LEAST_EVALUATIONS = 40  # per run
MOST_KNOTS = 10  # places in a run at which its tokens, seconds and joules are given
CRITICAL = 30  # degrees of freedom for which the script knows Student's t; beyond, that of 30

STATIC_LINES = 8  # configurations in the static figure
STATIC_POINTS = 120  # per line
STATIC_NAME = 24  # characters of a name
STATIC_WIDTH, STATIC_HEIGHT, STATIC_NAMES = 800, 340, 170  # of the figure, and of the names in it
FALL = 0.08  # share of a run after which its first steep fall is over
LABEL_LINE = 14  # height of a name


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticLine:
    """The mean validation loss of a configuration over the steps that all of its finished runs have."""

    name: str
    colour: str
    dash: int
    points: str  # of a polyline
    band: str  # of a polygon from the lowest to the highest seed; "": a single seed
    label_y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticCurves:
    """The static figure."""

    panel: Panel
    low: float  # nats/token: the losses that it shows
    high: float
    last: float  # step
    lines: tuple[StaticLine, ...]
    label_x: float
    is_cut: bool  # curves begin above the figure
    more: int  # configurations that it leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesSection:
    """The curves of all runs."""

    static: StaticCurves | None  # None: no configuration has two evaluations in all of its finished runs
    reference: str  # "leader" or "baseline": what differences are to
    is_drawn: bool  # some run has two losses of one kind
    is_simulated: bool  # energy is that of simulated GPUs
    script: Mapping[str, object]


def curves(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> CurvesSection | None:
    """Return the curves, or None if no run has a loss."""
    if not any(run.val.step or run.metrics.train.step for run in numbers.runs):
        return None
    most_freedom = min(CRITICAL, max(len(group.runs) for group in groups) - 1)  # 0: no interval, and no need of SciPy
    most = training_points(sum(bool(run.metrics.train.step) for run in numbers.runs))
    evaluations = evaluations_of(sum(len(run.val.step) for run in numbers.runs), len(numbers.runs))
    baselines = _baselines(numbers, groups)
    return CurvesSection(
        reference="baseline" if baselines else "leader",
        static=static_curves(groups),
        is_drawn=any(max(len(run.val.step), len(run.metrics.train.step)) > 1 for run in numbers.runs),
        is_simulated=any(is_simulated(run) for run in numbers.runs),
        script={
            "level": numbers.confidence,
            "baselines": baselines,
            "runs": [curve_of(run, most, evaluations) for run in numbers.runs],
            "t": [round(critical((1 - numbers.confidence) / 2, freedom), 4) for freedom in range(1, most_freedom + 1)],
        },
    )


def _baselines(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> list[int]:
    """Return the places of the baselines of all rankings among the groups; without one, differences are to leaders."""
    names = [group.numbers.name for group in groups]
    found = [ranking.verdict.rules.baseline for ranking in numbers.rankings]
    return [names.index(name) for name in found if name in names]


def is_simulated(run: RunNumbers) -> bool:
    """Return whether the energy of a run is that of simulated GPUs."""
    return run.gpu is not None and run.gpu.simulated


def training_points(curves_: int) -> int:
    """Return the number of points of each of so many training curves: all of them together stay within their size."""
    return max(LEAST_TRAINING, min(MOST_TRAINING, TRAINING_BYTES // (max(1, curves_) * POINT_BYTES)))


def evaluations_of(total: int, runs: int) -> int | None:
    """Return the most evaluations per run in a page, None for all of them with all digits.

    total: evaluations of all runs.
    """
    if total * EXACT_BYTES <= EVALUATION_BYTES:
        return None
    return max(LEAST_EVALUATIONS, EVALUATION_BYTES // (runs * SHORT_BYTES))


def curve_of(run: RunNumbers, most: int, evaluations: int | None = None) -> dict[str, object]:
    """Return the curves of one run, with short keys. most: points of its training loss.

    evaluations: at most so many, of SHORT_DIGITS, None for all of them with all digits, seconds and joules.
    v: evaluations, with x (steps), y (losses), s (seconds), j (joules).
    t: training losses, with x (steps) and m (losses).
    k, s, j: tokens, seconds and joules over steps; d: dollars per second. What is unknown is absent.
    """
    own: Metrics = run.metrics
    found: dict[str, object] = {}
    if own.val.step:
        found["v"] = _evaluations(own.val) if evaluations is None else _short_evaluations(own.val, evaluations)
        stride = -(-len(own.val.step) // MOST_KNOTS)
        columns = (("k", own.val.tokens, 0), ("s", own.val.seconds, 1), ("j", own.val.joules, 0))
        for key, column, digits in columns:
            known = [(x, y) for x, y in zip(own.val.step, column, strict=True) if y is not None]
            if known:
                knots = [*known[:-1:stride], known[-1]]
                found[key] = [[x for x, _ in knots], [round(y, digits or None) for _, y in knots]]
    if own.train.step:
        found["t"] = _training(own.train, most)
    if run.dollars and run.wall_s:
        found["d"] = float(f"{run.dollars / run.wall_s:.6g}")
    return found


def series(steps: Sequence[float]) -> object:
    """Return ascending steps as short as possible: a, d and n (first, distance, number) if they are evenly spaced.

    >>> series([0, 10, 20, 30]), series([0, 10, 25])
    ({'a': 0, 'd': 10, 'n': 4}, [0, 10, 25])
    """
    values = [int(step) if float(step).is_integer() else step for step in steps]
    if len(values) > 3:
        gap = values[1] - values[0]
        if all(after - before == gap for before, after in pairwise(values)):
            return {"a": values[0], "d": gap, "n": len(values)}
    return values


def static_curves(groups: Sequence[PageGroup]) -> StaticCurves | None:
    """Return the static figure, or None if there is nothing to draw."""
    means = [(group, found) for group in groups if len((found := _mean_curve(group)).steps) > 1]
    if not means:
        return None
    drawn = means[:STATIC_LINES]
    curves_ = [curve for _, curve in drawn]
    panel = Panel(
        x_label="steps",
        width=STATIC_WIDTH,
        height=STATIC_HEIGHT,
        right=STATIC_WIDTH - STATIC_NAMES,
        top=12,
        bottom=STATIC_HEIGHT - 44,
    )
    top = max(curve.after_fall for curve in curves_)
    bottom = min(min(curve.low) for curve in curves_)
    room = 0.04 * (top - bottom) or 0.01 * abs(top) or 1.0
    x = Scale(0, max(curve.steps[-1] for curve in curves_), panel.left, panel.right)
    y = Scale(bottom - room, top + room, panel.bottom, panel.top)
    ends = [y.at(curve.mean[-1]) for curve in curves_]
    labels = spread_labels(ends, LABEL_LINE, panel.top + LABEL_LINE / 2, panel.bottom)
    return StaticCurves(
        panel=Panel(
            x_label=panel.x_label,
            width=panel.width,
            height=panel.height,
            right=panel.right,
            top=panel.top,
            bottom=panel.bottom,
            x_ticks=x.ticks(6),
            y_ticks=y.ticks(5),
        ),
        low=bottom,
        high=top,
        last=x.high,
        lines=tuple(
            _static_line(group, curve, x, y, label) for (group, curve), label in zip(drawn, labels, strict=True)
        ),
        label_x=panel.right + 12,
        is_cut=max(curve.mean[0] for curve in curves_) > y.high,
        more=len(means) - len(drawn),
    )


@dataclass(frozen=True, slots=True)
class _MeanCurve:
    """Mean, lowest and highest validation loss of the finished runs of a configuration, at the steps that all have."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int

    @property
    def after_fall(self) -> float:
        """The highest mean after the first steep fall."""
        return max(loss for step, loss in zip(self.steps, self.mean, strict=True) if step >= FALL * self.steps[-1])


def _mean_curve(group: PageGroup) -> _MeanCurve:
    own = [dict(zip(run.val.step, run.val.loss, strict=True)) for run in group.counted]
    common = sorted(set(own[0]).intersection(*own[1:])) if own else []
    stride = max(1, -(-len(common) // STATIC_POINTS))
    steps = [*common[:-1:stride], *common[-1:]]
    losses = [[curve[step] for curve in own] for step in steps]
    return _MeanCurve(
        steps, [mean(at) for at in losses], [min(at) for at in losses], [max(at) for at in losses], len(own)
    )


def _static_line(group: PageGroup, curve: _MeanCurve, x: Scale, y: Scale, label: float) -> StaticLine:
    places = [x.at(step) for step in curve.steps]
    upper = list(zip(places, map(y.unbounded, curve.high), strict=True))
    lower = list(zip(places, map(y.unbounded, curve.low), strict=True))
    return StaticLine(
        name=_label(group.short),
        colour=group.colour,
        dash=group.dash,
        points=polyline(zip(places, map(y.unbounded, curve.mean), strict=True)),
        band=polyline([*upper, *reversed(lower)]) if curve.seeds > 1 else "",
        label_y=round(label + 4, 1),
    )


def _label(short: str) -> str:
    """Return a short name that fits next to its line. It may have been shortened, so its length says nothing."""
    return short if len(short) <= STATIC_NAME else f"{short[: STATIC_NAME - 1]}…"


def _evaluations(val: Evaluations) -> dict[str, object]:
    columns: dict[str, object] = {"x": series(val.step), "y": list(val.loss)}
    seconds, joules = _rounded(val.seconds, 1), _rounded(val.joules, 0)
    if any(value is not None for value in seconds):
        columns["s"] = seconds
    if any(value is not None for value in joules):
        columns["j"] = joules
    return columns


def _short_evaluations(val: Evaluations, most: int) -> dict[str, object]:
    """Return losses alone: the script finds seconds and joules between the knots."""
    kept = thinned(val.loss, most).tolist()
    return {"x": series([val.step[at] for at in kept]), "y": [float(f"{val.loss[at]:.{SHORT_DIGITS}g}") for at in kept]}


def _training(train: TrainingLosses, most: int) -> dict[str, object]:
    kept = thinned(train.loss, most).tolist()
    return {"x": series([train.step[at] for at in kept]), "m": _rounded([train.loss[at] for at in kept], LOSS_DIGITS)}


def _rounded(values: Iterable[float | None], digits: int) -> list[float | None]:
    """Return numbers as short as JSON writes them; null: unknown."""
    return [None if value is None else round(value, digits or None) for value in values]
