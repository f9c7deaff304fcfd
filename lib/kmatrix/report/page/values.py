"""The values that the page shows: one per section, from the numbers of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.report.page.axes import AxesSection, axes
from kmatrix.report.page.cost import CostSection, cost
from kmatrix.report.page.curves import CurvesSection, curves
from kmatrix.report.page.devices import DevicesSection, devices
from kmatrix.report.page.failures import FailuresSection, failures
from kmatrix.report.page.parts.groups import PageGroup, page_groups
from kmatrix.report.page.parts.text import shown
from kmatrix.report.page.provenance import ProvenanceSection, provenance
from kmatrix.report.page.ranking import RankingSection, ranking
from kmatrix.report.page.runs import RunsSection, runs
from kmatrix.report.page.scaling import ScalingSection, scaling
from kmatrix.report.page.settings import SettingsSection, settings
from kmatrix.report.page.target import TargetSection, target
from kmatrix.report.page.verdict import VerdictSection, verdict

NAME, VALUE, LABEL = (
    300,
    60,
    60,
)  # characters of a run's name, of a value of an axis and of an axis in the script's data


@dataclass(frozen=True, slots=True, kw_only=True)
class PageValues:
    """All that the page shows. A section that is None is absent."""

    name: str  # of the matrix; can be displayed
    created: float | None  # Unix seconds
    cpu: bool  # all runs trained on the CPU: devices are ranks
    groups: tuple[PageGroup, ...]
    verdict: VerdictSection | None
    ranking: RankingSection | None
    curves: CurvesSection | None
    target: TargetSection | None
    cost: CostSection | None
    axes: AxesSection | None
    scaling: ScalingSection | None
    devices: DevicesSection | None
    settings: SettingsSection | None
    failures: FailuresSection | None
    provenance: ProvenanceSection | None
    runs: RunsSection | None


def page_of(numbers: MatrixNumbers) -> PageValues:
    """Return the values of the page."""
    groups = page_groups(numbers)
    return PageValues(
        name=shown(numbers.name, NAME),
        created=numbers.created,
        cpu=numbers.devices == ("cpu",),
        groups=groups,
        verdict=verdict(numbers, groups),
        ranking=ranking(numbers, groups),
        curves=curves(numbers, groups),
        target=target(numbers, groups),
        cost=cost(numbers, groups),
        axes=axes(numbers, groups),
        scaling=scaling(numbers, groups),
        devices=devices(numbers, groups),
        settings=settings(numbers, groups),
        failures=failures(numbers, groups),
        provenance=provenance(numbers, groups),
        runs=runs(numbers, groups),
    )


def script_data(page: PageValues, numbers: MatrixNumbers) -> dict[str, object]:
    """Return what the scripts draw and filter. The keys of runs and groups are short: a page may hold 1,000 of them."""
    sections = {name: getattr(page, name) for name in ("curves", "target", "devices", "runs")}
    return {
        "name": page.name,
        "axes": [
            {"label": shown(label, LABEL), "values": [shown(value, VALUE) for value in values]}
            for label, values in numbers.axes.items()
        ],
        "groups": [
            {
                "name": group.short,
                "full": group.full,
                "colour": group.colour,
                "dash": group.dash,
                "rank": group.rank,
                "ranking": group.ranking,
                "runs": group.places,
            }
            for group in page.groups
        ],
        "run": _runs(numbers),
        **{name: getattr(section, "script", None) for name, section in sections.items()},
    }


def _runs(numbers: MatrixNumbers) -> list[dict[str, object]]:
    """Return each run with short keys.

    n: name, s: status, e: seed, a: value of each axis by its number (-1: none), f: final loss, w: ranks,
    """
    numbered = {label: {value: at for at, value in enumerate(values)} for label, values in numbers.axes.items()}
    return [
        {
            "n": shown(run.name, NAME),
            "s": str(run.status),
            "e": run.seed,
            "a": _axis_values(run, numbered),
            "f": run.final_val_loss if run.counts else None,
            "w": run.world_size,
        }
        for at, run in enumerate(numbers.runs)
    ]


def _axis_values(run: RunNumbers, numbered: Mapping[str, Mapping[str, int]]) -> list[int]:
    return [values.get(run.axes.get(label, ""), -1) for label, values in numbered.items()]
