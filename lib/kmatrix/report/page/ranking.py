"""The section of the page on: ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.report.numbers import MatrixNumbers
from kmatrix.report.page.parts.groups import PageGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingSection:
    """What the section shows."""


def ranking(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> RankingSection | None:
    """Return the section, or None if there is nothing to show."""
    del numbers, groups
    return None
