"""The section of the page on: runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.report.numbers import MatrixNumbers
from kmatrix.report.page.parts.groups import PageGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsSection:
    """What the section shows."""


def runs(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> RunsSection | None:
    """Return the section, or None if there is nothing to show."""
    del numbers, groups
    return None
