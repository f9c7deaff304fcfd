"""Lines of a CSV -> a block: a column at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kmatrix.gpu.formats.blocks import MEASURED, Block, Floats, Part
from kmatrix.gpu.formats.reading import Table, number_in, time_of


def table_block(rows: Sequence[list[str]], table: Table) -> Block | None:
    """Return the block of those lines that are whole and have a time; None where none is."""
    timed = [(time, row) for row in rows if len(row) == table.width and (time := time_of(row[0])) is not None]
    if not timed:
        return None
    columns = list(zip(*(row for _, row in timed), strict=True))
    parts = []
    for index, places in table.gpus.items():
        values = {name: _floats(columns[at]) for at, name in places}
        total = values.get("memory_total")
        parts.append(
            Part(
                gpu_index=index,
                gpu_name=f"GPU {index}",
                uuid="",
                memory_total=None if total is None or np.isnan(total[-1]) else float(total[-1]),
                rows=np.arange(len(timed)),
                columns={name: values[name] if name in values else np.full(len(timed), np.nan) for name in MEASURED},
            )
        )
    return Block(times=np.array([time for time, _ in timed], dtype=float), parts=tuple(parts))


def _floats(cells: Sequence[str]) -> Floats:
    """Return the numbers of a column; NaN for a cell that is none."""
    try:
        values = np.array(cells, dtype=float)
    except ValueError:
        values = np.array([number_in(cell) for cell in cells], dtype=float)
    values[~np.isfinite(values)] = np.nan
    return values
