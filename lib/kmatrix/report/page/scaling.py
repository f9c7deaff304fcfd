"""The section of the page on: scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.report.numbers import MatrixNumbers
from kmatrix.report.page.parts.groups import PageGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSection:
    """What the section shows."""


def scaling(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> ScalingSection | None:
    """Return the section, or None if there is nothing to show."""
    del numbers, groups
    return None
