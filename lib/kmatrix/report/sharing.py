"""Which runs had the box for themselves, and which shared it: from when their attempts began and ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kmatrix.report.values import RunNumbers

LEAST = 0.01  # share of a run's time below which a neighbour is none: the seconds in which one ends and one begins
NAMED = 3  # neighbours that a line names


@dataclass(frozen=True, slots=True)
class Shared:
    """A run that was not alone. beside: its neighbours.  share: of its time, 0 to 1, in which there was any."""

    run: str
    beside: tuple[str, ...]
    share: float


def shared(runs: Sequence[RunNumbers]) -> list[Shared]:
    """Return the runs that trained at the same time as others of the matrix, in its order."""
    spans = {run.name: list(_spans(run)) for run in runs}
    found = []
    for name, own in spans.items():
        time = sum(end - begin for begin, end in own)
        others = {other: _common(own, theirs) for other, theirs in spans.items() if other != name}
        beside = [other for other, parts in others.items() if time and _length(parts) >= LEAST * time]
        if beside:
            together = _length([part for other in beside for part in others[other]])
            found.append(Shared(name, tuple(beside), together / time))
    return found


def sharing_lines(runs: Sequence[RunNumbers]) -> list[str]:
    """Return what the summary says of it; nothing where every run was alone."""
    lines = []
    for one in shared(runs):
        more = f" and {len(one.beside) - NAMED} more" if len(one.beside) > NAMED else ""
        lines.append(f"{one.run}  {one.share:.0%} of its time beside {', '.join(one.beside[:NAMED])}{more}")
    if lines:
        lines.append("their times, power and host memory are those of a shared box: PARALLEL_JOBS=1 runs one at a time")
    return lines


def _spans(run: RunNumbers) -> Iterator[tuple[float, float]]:
    for attempt in run.attempts:
        begin, end = attempt.get("started"), attempt.get("ended")
        if isinstance(begin, (int, float)) and isinstance(end, (int, float)) and end > begin:
            yield float(begin), float(end)


def _common(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The stretches that lie in both."""
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a in ours for b in theirs]
    return [(begin, end) for begin, end in both if end > begin]


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that are covered by at least one of them."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
