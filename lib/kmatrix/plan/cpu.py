"""Describe the CPU of this machine for plans: its matrix units, without importing PyTorch, and its expected speed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmatrix.records.train_config import TrainConfig

CPUINFO = Path("/proc/cpuinfo")
# No training reaches this per core, in FLOP/s: a CPU with AMX at 4 GHz has a peak of 8 TFLOP/s in bfloat16.
PEAK = 8e12
# FLOP/s per core that training reaches, from slow to fast machines, before anything was measured on this one.
# A Xeon with AMX at 2.1 GHz reaches 68 (4 layers of width 128) to 113 (124M) GFLOP/s in 32 bits, and 106 to 308 in
# bfloat16, in CPU time of one thread (docs/plan.md); docs/decisions/0003 has times of two other processors. The slow
# ends are a third of the lowest for older and shared cores, which also convert bfloat16; the fast ends leave room
# for clocks of 5 GHz.
ASSUMED = {"fp32": (25e9, 300e9), "bf16": (25e9, 1000e9)}
SPREAD = 1.5  # a run may be faster or slower by this factor than earlier runs: other sizes, other processes


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSpeed:
    """The training speed of one core, in FLOP/s."""

    slow: float  # a run is hardly ever slower
    fast: float  # a run is hardly ever faster
    source: str  # such as "measured in 3 runs on this machine"

    @property
    def text(self) -> str:
        """The speed and its source, for a message."""
        return f"{self.slow / 1e9:.0f} to {self.fast / 1e9:.0f} GFLOP/s per core, {self.source}"


def cpu_speed(dtype: str, measured: Sequence[float] = ()) -> CpuSpeed:
    """Return the expected speed of a core. measured: FLOP/s per core of earlier runs in this dtype on this machine."""
    if measured:
        runs = f"{len(measured)} earlier run{'s' if len(measured) > 1 else ''}"
        return CpuSpeed(slow=min(measured) / SPREAD, fast=max(measured) * SPREAD, source=f"from {runs} on this machine")
    slow, fast = ASSUMED[dtype]
    return CpuSpeed(slow=slow, fast=fast, source="assumed: no run was measured on this machine")


def cores_used(train: TrainConfig, cores: int) -> int:
    """Return how many cores of this machine the ranks of a run compute on. cores: those of the machine."""
    return min(cores, train.num_gpus * train.cpu_threads) if train.cpu_threads else cores


def has_amx() -> bool:
    """Return whether this CPU has AMX tiles, with which 32-bit attention is fused (gpt2.model.attention_path)."""
    return _has_amx(CPUINFO)


@functools.cache
def _has_amx(cpuinfo: Path) -> bool:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    # All cores have the same flags; PyTorch looks at the same two (torch.cpu.get_capabilities).
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return not {"amx_bf16", "amx_tile"}.isdisjoint(flags)
