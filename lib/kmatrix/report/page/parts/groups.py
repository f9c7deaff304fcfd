"""The configurations of a matrix as the page shows them: in the order of the rankings, with colours and dashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kmatrix.report.numbers import GroupNumbers, MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.colours import colour_classes, dashes
from kmatrix.report.page.parts.text import known, name, shown

SHORT = 60  # characters of a short name
MOST_ROWS = 200  # configurations in a table; the table of runs and the files for programs have all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    """A configuration, whose runs differ only in their seed."""

    index: int  # place on the page, from 0: data-g
    numbers: GroupNumbers = field(repr=False)
    places: tuple[int, ...]  # of its runs in MatrixNumbers.runs
    colour: str  # class: k0 to k7, r0 to r6
    dash: int  # 0 to 3: class d0 to d3
    short: str  # its name without what all configurations have in common; can be displayed
    rank: int | None = None  # in its ranking, from 1; None: not ranked
    ranking: int = 0  # number of its ranking

    @property
    def full(self) -> str:
        """The whole name, as results.json has it, but such that it can be displayed."""
        return name(self.numbers.name)

    @property
    def runs(self) -> tuple[RunNumbers, ...]:
        return self.numbers.runs

    @property
    def counted(self) -> tuple[RunNumbers, ...]:
        """The finished runs, which rankings and means are made of."""
        return self.numbers.counted

    def values(self, pick: Callable[[RunNumbers], float | None]) -> list[float]:
        """Return a number of each finished run for which it is known."""
        found = [pick(run) for run in self.counted]
        return [float(value) for value in found if value is not None and known(value)]


def page_groups(numbers: MatrixNumbers) -> tuple[PageGroup, ...]:
    """Return the configurations in the order of the rankings, then those that are in none."""
    places: dict[str, tuple[int, int]] = {}
    for which, ranking in enumerate(numbers.rankings):
        for rank, group in enumerate(ranking.groups, 1):
            places.setdefault(group.name, (which, rank))
    last = (len(numbers.rankings), 0)
    ordered = sorted(numbers.groups, key=lambda group: places.get(group.name, last))
    by_name = {run.name: at for at, run in enumerate(numbers.runs)}
    classes = colour_classes([group.axes for group in ordered], numbers.axes)
    shorts = short_names([group.name for group in ordered])
    return tuple(
        PageGroup(
            index=index,
            numbers=group,
            places=tuple(by_name[run.name] for run in group.runs),
            colour=classes[index],
            dash=dash,
            short=shorts[index],
            rank=places[group.name][1] if group.name in places else None,
            ranking=places.get(group.name, (0, 0))[0],
        )
        for index, (group, dash) in enumerate(zip(ordered, dashes(classes), strict=True))
    )


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without the parts that all of them have: "muon, 4 GPUs" is "muon" if every one has 4 GPUs."""
    parts = [one.split(", ") for one in names]
    common = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    return [
        shown(", ".join(part for part in mine if part not in common) or whole, SHORT)
        for whole, mine in zip(names, parts, strict=True)
    ]
