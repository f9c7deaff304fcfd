"""What trackers hold of the runs -> a section of the report: where to look, and what was not sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmatrix.records import MatrixDir
from kmatrix.records.tracking import Sent, commands, not_sent, sent_of

Section = tuple[str, Sequence[str]]


def tracker_section(matrix: MatrixDir) -> list[Section]:
    """Return the section; none where no run has a tracker."""
    runs = [(run.name, sent) for run in matrix.runs() for sent in sent_of(run)]
    if not runs:
        return []
    lines = [*_links(runs), *commands([sent] for _, sent in runs), *not_sent(runs, matrix.name)]
    return [("Trackers", lines)]


def _links(runs: Sequence[tuple[str, Sent]]) -> Iterator[str]:
    """Yield where each run can be looked at."""
    for name, sent in runs:
        if sent.link:
            yield f"{name}  {sent.tracker}  {sent.points} steps  {sent.link}"
