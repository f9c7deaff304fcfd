"""The sound records of a recording: those whose times can be true.

A power loss leaves zeros where records were not on the disk yet; a failing disk or another writer leaves anything.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import cast, overload

from kmatrix.gpu.formats.limits import MONOTONIC, Limits

BLOCK = 1 << 16  # records in memory at once
Range = tuple[int, int]  # indices of the first record, and of the one after the last


def sound_ranges(times: Sequence[float], limits: Limits, monotonic: Sequence[float]) -> list[Range]:
    """Return the ranges of records whose times can be true.

    times: Unix s, with these limits. monotonic: s since the boot.
    """
    clocks = [(times, limits), (monotonic, MONOTONIC)]
    found: list[Range] = []
    for begin in range(0, len(times), BLOCK):
        end = min(begin + BLOCK, len(times))
        columns = [(as_list(values[begin:end]), between) for values, between in clocks]
        if all(_all_between(values, between) for values, between in columns):
            _append(found, begin, end)
            continue
        good = [[low <= value <= high for value in values] for values, (low, high) in columns]
        for at, is_good in enumerate(map(all, zip(*good, strict=True)), begin):
            if is_good:
                _append(found, at, at + 1)
    return found


def as_list(values: Sequence[float]) -> list[float]:
    """Return a copy of the values of a column."""
    # A third faster than list() for the views of a file.
    return cast(list[float], values.tolist()) if isinstance(values, memoryview) else list(values)


def _all_between(values: Sequence[float], limits: Limits) -> bool:
    # In C. The sum is NaN if a value is: the minimum and the maximum may not be.
    return limits[0] <= min(values) and max(values) <= limits[1] and not math.isnan(sum(values))


def _append(found: list[Range], begin: int, end: int) -> None:
    """Add a range, which continues the last one if that ends at its begin."""
    if found and found[-1][1] == begin:
        found[-1] = (found[-1][0], end)
    else:
        found.append((begin, end))


class SoundRecords:
    """Selects ranges of the records of a file without a copy: a recording may be larger than the memory."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.begins = array("q", [begin for begin, _ in ranges])  # indices in the file
        self.ends = array("q", [end for _, end in ranges])
        self.starts = array("q", accumulate((end - begin for begin, end in ranges), initial=0))  # without the others

    def __len__(self) -> int:
        return self.starts[-1]

    def of(self, column: Sequence[float]) -> Sequence[float]:
        """Return the values of the selected records of a column."""
        if len(self.begins) == 1:
            return column[self.begins[0] : self.ends[0]]
        return _SoundColumn(column, self)


class _SoundColumn(Sequence[float]):
    """A column without the damaged records."""

    __slots__ = ("_column", "_records")

    def __init__(self, column: Sequence[float], records: SoundRecords) -> None:
        self._column, self._records = column, records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                return [self[at] for at in range(begin, end, step)]
            return list(self._values(begin, end))
        at = range(len(self))[index]
        place = bisect_right(self._records.starts, at) - 1
        return self._column[self._records.begins[place] + at - self._records.starts[place]]

    def __iter__(self) -> Iterator[float]:
        return self._values(0, len(self))

    def _values(self, begin: int, end: int) -> Iterator[float]:
        """Return the values of the records begin to end - 1."""
        records = self._records
        first, last = bisect_right(records.starts, begin) - 1, bisect_right(records.starts, end - 1)
        shifts = ((records.begins[at] - records.starts[at], at) for at in range(first, last))
        pieces = (
            self._column[max(begin, records.starts[at]) + shift : min(end, records.starts[at + 1]) + shift]
            for shift, at in shifts
        )
        return chain.from_iterable(pieces)
