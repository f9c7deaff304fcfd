"""The expected speed of the CPU of this machine, for plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.packing import usable_cores
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import plural

# FLOP/s per core that training reaches, from slow to fast machines, before anything was measured on this one.
# A Xeon with AMX at 2.1 GHz reaches 68 (4 layers of width 128) to 113 (124M) GFLOP/s in 32 bits, and 106 to 308 in
# bfloat16, in CPU time of one thread (docs/plan.md); docs/decisions/0003 has times of two other processors. The slow
# ends are a third of the lowest for older and shared cores, which also convert bfloat16; the fast ends leave room
# for clocks of 5 GHz.
ASSUMED = {"fp32": (25e9, 300e9), "bf16": (25e9, 1000e9)}
# A run may be slower or faster than earlier ones by these factors: other sizes, and other processes, which more often
# slowed an earlier run down than they will leave the machine to a new one.
SLOWER, FASTER = 1.5, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSpeed:
    """The expected training speed of a run on the CPU of this machine."""

    cores: int  # that the ranks of the run compute on
    slow: float  # FLOP/s per core; a run is hardly ever slower
    fast: float  # FLOP/s per core; a run is hardly ever faster
    source: str  # such as "from 3 earlier runs on this machine"

    @property
    def text(self) -> str:
        """The speed and its source, for a message."""
        speeds = " to ".join(f"{speed / 1e9:.{0 if speed > 10e9 else 1}f}" for speed in (self.slow, self.fast))
        return f"{plural(self.cores, 'core')} at {speeds} GFLOP/s per core, {self.source}"


def cpu_speed(train: TrainConfig, measured: Sequence[float] = (), *, there: int | None = None) -> CpuSpeed:
    """Return the expected speed of a run. measured: FLOP/s per core of earlier runs like it on this machine.

    there: cores of the nodes of a run on a cluster.
    """
    cores = cores_used(train, there)
    if measured:
        slow, fast = min(measured) / SLOWER, max(measured) * FASTER
        source = f"from {plural(len(measured), 'earlier run')} on this machine"
    else:
        slow, fast = ASSUMED["bf16" if train.dtype == "bf16" else "fp32"]
        source = "assumed: no run like it was measured on this machine"
    return CpuSpeed(cores=cores, slow=slow, fast=fast, source=source)


def cores_used(train: TrainConfig, there: int | None = None) -> int:
    """Return how many cores the ranks of a run compute on: of this machine, or of `there` cores."""
    cores = usable_cores() if there is None else there
    return min(cores, (train.num_gpus or 1) * train.cpu_threads) if train.cpu_threads else cores
