"""Moments that follow one another, as columns of numbers: what long recordings are read as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kmatrix.gpu.formats.values import GpuSample, Snapshot

MEASURED = ("memory_used", "utilization", "power", "temperature", "sm_clock", "energy_j")
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a block holds of one GPU; what it is called there, and its memory in MiB, are those of its last sample.

    rows: in which of the block's moments it is, ascending.
    columns: name in MEASURED -> (len(rows),) values, NaN: not known.
    """

    gpu_index: int
    gpu_name: str
    uuid: str
    memory_total: float | None
    rows: NDArray[np.intp]
    columns: Mapping[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Moments that follow one another. times: (N,) Unix seconds."""

    times: Floats
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return len(self.times)


def block_of(snapshots: Sequence[Snapshot]) -> Block:
    """Return snapshots as columns."""
    rows: dict[int, list[int]] = {}
    samples: dict[int, list[GpuSample]] = {}
    for row, snapshot in enumerate(snapshots):
        for sample in snapshot.samples:
            rows.setdefault(sample.gpu_index, []).append(row)
            samples.setdefault(sample.gpu_index, []).append(sample)
    parts = tuple(
        Part(
            gpu_index=index,
            gpu_name=mine[-1].gpu_name,
            uuid=mine[-1].uuid,
            memory_total=mine[-1].memory_total,
            rows=np.array(rows[index]),
            columns={name: np.array([getattr(sample, name) for sample in mine], dtype=float) for name in MEASURED},
        )
        for index, mine in samples.items()
    )
    return Block(times=np.array([snapshot.time for snapshot in snapshots], dtype=float), parts=parts)
