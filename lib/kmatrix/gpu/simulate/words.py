"""The words of a scenario: its settings, the quantities of a GPU with unit and range, errors and throttle reasons."""

from __future__ import annotations

from dataclasses import dataclass

MOST_GPUS = 64  # as in play.h


@dataclass(frozen=True, slots=True)
class Range:
    """From low to high, both allowed."""

    low: float
    high: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Quantity:
    """One field of a GPU: what it is where nothing is said. numeric: whether it can be given a number.

    code: the error with which it answers until it is given one; 0: none.
    """

    default: float
    range: Range
    numeric: bool = True
    code: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """A number for the whole scenario. word, scale: its name and unit in the table that table.c reads.

    No word: it is not there by itself.
    """

    default: float
    range: Range
    word: str
    scale: float = 1.0


PERCENT = Range(0, 100)
COUNT = Range(0, 2**32 - 1, whole=True)

# In the order of enum Field in play.h. util, memutil, fan, smact, smocc, tensor, dram: %; mem, memtotal: MiB;
# power, limit: W; temp: C; smclk, memclk: MHz; pcie_tx, pcie_rx: KB/s; energy: J. average and instant can only fail:
# their values are power's.
QUANTITIES = {
    "util": Quantity(95, PERCENT),
    "memutil": Quantity(60, PERCENT),
    "mem": Quantity(12800, Range(0, 1e9)),
    "memtotal": Quantity(23028, Range(1, 1e9)),
    "power": Quantity(150, Range(0, 1e5)),
    "average": Quantity(0, Range(0, 0), numeric=False),
    "instant": Quantity(0, Range(0, 0), numeric=False),
    "limit": Quantity(300, Range(0, 1e5)),
    "temp": Quantity(60, Range(0, 200)),
    "smclk": Quantity(1710, Range(0, 1e5)),
    "memclk": Quantity(6251, Range(0, 1e5)),
    "fan": Quantity(40, PERCENT),
    "throttle": Quantity(0, COUNT),
    "pcie_tx": Quantity(20000, COUNT),
    "pcie_rx": Quantity(10000, COUNT),
    "ecc_c": Quantity(0, COUNT),
    "ecc_u": Quantity(0, COUNT),
    "pstate": Quantity(0, Range(0, 15, whole=True)),
    "smact": Quantity(0, PERCENT, code=3),  # performance metrics: of Hopper and newer, so not supported unless set
    "smocc": Quantity(0, PERCENT, code=3),
    "tensor": Quantity(0, PERCENT, code=3),
    "dram": Quantity(0, PERCENT, code=3),
    "energy": Quantity(0, Range(0, 1e12)),
    "all": Quantity(0, Range(0, 0), numeric=False),
}
ONCE = ("energy", "all", "process")  # what a loop does not repeat

SETTINGS = {
    "loop": Setting(0, Range(0.001, 1e9), "loop"),
    "period_ms": Setting(100, Range(0.1, 1e6), "", 1e-3),
    "window_ms": Setting(1000, Range(0, 1e6), "window", 1e-3),
    "instant_ms": Setting(0, Range(0, 1e6), "instant", 1e-3),
    "call_us": Setting(0, Range(0, 1e6), "call", 1e-6),
    "speed": Setting(1, Range(0.001, 1e6), "speed"),
    "freeze": Setting(-1, Range(0, 1e9), "freeze"),
    "init": Setting(0, Range(0, 999), "init"),
}
GROUPS = ("nvlink", "switch", "numa")  # settings that hold groups of GPUs: bridged, below a PCIe switch, on a node
TEXTS = {"name": "NVIDIA A10G", "driver": "580.00.00"}

ERRORS = {  # nvmlReturn_t
    "invalid": 2,
    "not_supported": 3,
    "no_permission": 4,
    "no_driver": 9,
    "timeout": 10,
    "lost": 15,
    "reset_required": 16,
    "version_mismatch": 18,
    "no_data": 21,
    "unknown": 999,
}
THROTTLES = {  # nvmlClocksEventReasons
    "none": 0,
    "idle": 0x1,
    "clocks_setting": 0x2,
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
    "display": 0x100,
}
