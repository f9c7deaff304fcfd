"""The numbers of a run's devices, computed from its GPU recording: values and arithmetic, no files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kmatrix.gpu.balance import Balance, balance_of
from kmatrix.gpu.xid import xid_text
from kmatrix.records.runs import RunFile
from kmatrix.stats import complete_sum
from kmatrix.status.stragglers import HIDDEN_STRAGGLER, RankNumbers
from kmatrix.text import money, time_of_day

SIMULATED = "(simulated)"  # suffix of a simulated GPU's name
CPU = "cpu"  # device type of a run on the CPU
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Mean, deviation and range of one quantity over a recording, in its own unit."""

    mean: float
    deviation: float | None  # population standard deviation
    minimum: float
    maximum: float
    count: int = 0  # number of values; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class XidNumbers:
    """The XID errors of one code that a GPU reported."""

    code: int
    count: int
    first: float  # Unix seconds
    last: float  # Unix seconds

    @property
    def text(self) -> str:
        """The errors with their meaning, number and time."""
        first, last = (time_of_day(time, utc=True) for time in (self.first, self.last))
        when = f"at {first}" if first == last else f"from {first} to {last}"
        return f"{xid_text(self.code)} ({'once' if self.count == 1 else f'{self.count:,} times'}, {when})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNumbers:
    """The numbers of one GPU of a run, or of one rank on the CPU. None: unknown."""

    gpu_index: int
    gpu_name: str
    rank: int | None = None
    host: str = ""  # of a run over several nodes
    uuid: str = ""
    samples: int = 0
    memory_total: float | None = None  # MiB
    memory_used: Statistics | None = None  # MiB
    utilization: Statistics | None = None  # percent
    power: Statistics | None = None  # W
    temperature: Statistics | None = None  # degrees C
    sm_clock: Statistics | None = None  # MHz
    joules: float | None = None  # J over the recording
    lost_at: float | None = None  # Unix seconds; None: the device responds
    lost_s: float = 0.0  # seconds without a response
    throttled_s: tuple[tuple[str, float], ...] = ()  # (reason, seconds)
    foreign: tuple[str, ...] = ()  # processes of others with memory on this GPU
    ecc_uncorrected: int = 0  # uncorrected memory errors
    xids: tuple[XidNumbers, ...] = ()  # XID errors by code, in the order of their first time
    extras: Mapping[str, float] = field(default_factory=dict)  # means of gpu.devices.EXTRA_METRICS


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One point of the memory timeline: the mean over an interval, or the begin or the end of a gap."""

    seconds: float  # since the start of the recording
    memory: tuple[float | None, ...]  # MiB per device of this attempt; None: no sample; empty in a gap
    capacity: float | None = None  # MiB, of the devices of this attempt; None: unknown

    @property
    def total(self) -> float | None:
        """Memory of all devices, MiB; None if it is unknown for one: what is left is not less memory in use."""
        return complete_sum(self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPhase:
    """A part of a recording in which the run did not train."""

    name: str  # set-up, evaluation, checkpoint or ending
    begin: float  # seconds since the start of the recording
    end: float  # seconds since the start of the recording
    joules: float | None = None  # J, all devices
    is_earlier: bool = False  # in the recording of an earlier attempt on other devices


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFactors:
    """Prices and emission factors from the configuration. None: not set."""

    energy_price: float | None = None  # $/kWh
    co2: float | None = None  # g/kWh
    gpu_hour_price: float | None = None  # $/GPU-hour
    machine_hour_price: float | None = None  # $/hour of a run on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The energy, money and CO2 that a run used. None: unknown."""

    kwh: float | None = None
    energy_cost: float | None = None  # $
    co2_g: float | None = None  # grams
    gpu_hours: float | None = None  # GPUs x hours; None on the CPU
    gpu_cost: float | None = None  # $, of the run (`kmatrix.status.cost`); None on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodNumbers:
    """The numbers of all devices over a recording, or over the part of it in which the run trained."""

    devices: tuple[DeviceNumbers, ...]
    seconds: float | None  # length
    total_mean: float | None = None  # MiB, all devices
    joules: float | None = None  # J, all devices
    joules_per_token: float | None = None  # None if the recording does not cover the training
    consistent: bool = True  # False: the recording contains values that cannot be true
    is_mixed: bool = False  # time and energy include attempts on other devices

    @property
    def mean_power(self) -> float | None:
        """Power of all devices, W; None if unknown for a device, also if it did not respond for some time."""
        if any(is_incomplete(device) for device in self.devices):
            return None
        power = complete_sum([device.power.mean if device.power else None for device in self.devices])
        if power is None or not self.is_mixed:
            return power
        return self.joules / self.seconds if self.joules is not None and self.seconds else None

    @property
    def utilization(self) -> float | None:
        """Mean over the devices with known utilization, percent."""
        known = [device.utilization.mean for device in self.devices if device.utilization]
        return math.fsum(known) / len(known) if known else None

    @property
    def tokens_per_joule(self) -> float | None:
        return 1.0 / self.joules_per_token if self.joules_per_token else None

    def balance(self, quantity: str) -> Balance | None:
        """Return the balance of "memory_used", "utilization" or "power"; None if unknown for a device."""
        if not self.consistent or (quantity == "power" and any(map(is_incomplete, self.devices))):
            return None
        measured = [getattr(device, quantity) for device in self.devices]
        known = [statistics.mean for statistics in measured if isinstance(statistics, Statistics)]
        return balance_of(known) if len(known) == len(measured) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNumbers:
    """The numbers of all devices of one run, over the whole recording unless named otherwise."""

    evidence: str  # source file, <run>/<file>; "" if nothing was recorded
    device_type: str  # "nvidia", CPU or "" (unknown)
    devices: tuple[DeviceNumbers, ...]
    samples: int
    seconds: float | None  # length of the recording
    hz: float | None = None  # samples/s that the recorder reached
    final: bool = True  # False: the recorder was killed, or is still running
    simulated: bool = False
    energy_source: str | None = None  # counter or power
    total_mean: float | None = None  # MiB, all devices of the last attempt
    total_max: float | None = None  # MiB, maximum of the sum over the devices of the last attempt
    joules: float | None = None  # J, all devices
    joules_per_token: float | None = None  # None if the recording does not cover the training
    training: PeriodNumbers | None = None  # without set-up, evaluations, checkpoints and ending; None: unknown
    consistent: bool = True  # False: the recording contains values that cannot be true
    ranks: RankNumbers | None = None
    mfu: float | None = None  # model FLOPs utilization of the training, 0 to 1
    wall_s: float | None = None  # s, of all attempts of the run in its matrix; None for a recording without a run
    gpu_hours: float | None = None  # held in this time; None on the CPU
    dollars: float | None = None  # their cost; None without a price
    reused: bool = False  # recorded in another matrix
    factors: CostFactors = field(default_factory=CostFactors)
    phases: tuple[RecordedPhase, ...] = ()  # sorted by begin; of the first recorded node of several
    earlier: tuple[GpuNumbers, ...] = field(default=(), repr=False)  # attempts on other devices: in samples, s and J
    nodes: Mapping[int, GpuNumbers] = field(default_factory=dict, repr=False)  # of a run over several, by their number
    notes: tuple[str, ...] = ()  # limits of these numbers, one sentence each
    timeline: tuple[TimelinePoint, ...] = field(default=(), repr=False)

    @property
    def unit(self) -> str:
        """Name of one device: "GPU", or "rank" on the CPU."""
        return "rank" if self.device_type == CPU else "GPU"

    @property
    def has_earlier(self) -> bool:
        """True if time and energy include attempts on other devices."""
        return bool(self.earlier) or any(part.earlier for part in self.nodes.values())

    @property
    def run_max(self) -> float | None:
        """The maximum of the sum over devices in any attempt, MiB."""
        return max((one.total_max for one in (self, *self.earlier) if one.total_max is not None), default=None)

    @property
    def whole(self) -> PeriodNumbers:
        """The numbers over the whole recording."""
        return PeriodNumbers(
            devices=self.devices,
            seconds=self.seconds,
            total_mean=self.total_mean,
            joules=self.joules,
            joules_per_token=self.joules_per_token,
            consistent=self.consistent,
            is_mixed=self.has_earlier,
        )

    @property
    def main(self) -> PeriodNumbers:
        """The numbers that reports show first: of the training, or of the whole recording if that is unknown."""
        return self.training or self.whole

    @property
    def mean_power(self) -> float | None:
        """Power of all devices during the main period, W; None if unknown for a device."""
        return self.main.mean_power

    @property
    def utilization(self) -> float | None:
        """Mean over the devices with known utilization during the main period, percent."""
        return self.main.utilization

    def balance(self, quantity: str) -> Balance | None:
        """Return the balance of a quantity during the main period; None if unknown for a device."""
        return self.main.balance(quantity)

    @property
    def cost(self) -> Cost:
        """Cost of the recorded energy, and of the run. A reused run has no cost of energy in its new matrix."""
        factors = replace(self.factors, energy_price=None) if self.reused else self.factors
        hours = self.gpu_hours
        if self.wall_s is None and self.seconds is not None and self.device_type != CPU:
            hours = self.seconds * len(self.devices) / 3600  # without a run: from start to end of the recording
        return cost_of(self.joules, hours, None if hours is None else self.dollars, factors)

    @property
    def hides_straggler(self) -> bool:
        """True if the memory CV is Excellent although ranks wait for a slow one."""
        memory = self.balance("memory_used")
        even = memory is not None and memory.quality == "Excellent"
        return even and self.ranks is not None and self.ranks.waiting > HIDDEN_STRAGGLER

    def extra(self, name: str) -> float | None:
        """Return the mean of an extra value over the devices; None if one device lacks it."""
        known = [device.extras.get(name) for device in self.devices]
        total = complete_sum(known)
        return None if total is None else total / len(known)

    def phase_seconds(self, name: str) -> float:
        """Return the total length of all phases of this name."""
        return math.fsum(phase.end - phase.begin for phase in self.phases if phase.name == name)

    def phase_joules(self, name: str) -> float | None:
        """Return the energy of all phases of this name on all nodes, J; None if unknown for one of them."""
        parts = self.nodes.values() or [self]
        if any(not part.phases for part in parts):
            return None
        return complete_sum([phase.joules for part in parts for phase in part.phases if phase.name == name])

    def capacity_of(self, device: DeviceNumbers) -> float | None:
        """Return the memory of a GPU, MiB; None if unknown, and for a rank: all ranks share that of their machine."""
        return None if self.device_type == CPU else device.memory_total or None

    @property
    def capacity(self) -> float | None:
        """The memory of all GPUs, MiB; None if one is unknown, and on the CPU."""
        return complete_sum([self.capacity_of(device) for device in self.devices])

    def label(self, device: DeviceNumbers) -> str:
        """Return "GPU 2", or "rank 0" on the CPU; over several nodes with the host: "GPU 2 on n1"."""
        on = f" on {device.host}" if device.host else ""
        if self.device_type == CPU:
            return f"rank {device.gpu_index if device.rank is None else device.rank}{on}"
        return f"GPU {device.gpu_index}{on}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGpus:
    """A run and the numbers of its devices."""

    name: str
    optimizer: str
    status: str  # "" if unknown (a recording of the original project)
    gpu: GpuNumbers | None  # None: nothing was recorded


def cost_factors(run: RunFile) -> CostFactors:
    """Return the cost factors in a run.json."""
    return CostFactors(
        energy_price=_number(run.symbols.get("ENERGY_PRICE")),
        co2=_number(run.symbols.get("CO2_FACTOR")),
        gpu_hour_price=run.train.gpu_hour_price,
        machine_hour_price=run.train.machine_hour_price,
    )


def cost_of(joules: float | None, gpu_hours: float | None, dollars: float | None, factors: CostFactors) -> Cost:
    """Return the cost of this energy, next to the GPU-hours and dollars of the run."""
    kwh = None if joules is None else joules / JOULES_PER_KWH
    return Cost(
        kwh=kwh,
        energy_cost=_product(kwh, factors.energy_price),
        co2_g=_product(kwh, factors.co2),
        gpu_hours=gpu_hours,
        gpu_cost=dollars,
    )


def cost_parts(cost: Cost, factors: CostFactors) -> Iterator[str]:
    """Yield the cost of energy, CO2 and GPU-hours, each with its factor."""
    if cost.energy_cost is not None:
        yield f"energy {money(cost.energy_cost)} at ${factors.energy_price:g}/kWh"
    if cost.co2_g is not None:
        weight = f"{cost.co2_g / 1000:.3g} kg" if cost.co2_g >= 1000 else f"{cost.co2_g:.3g} g"
        yield f"{weight} CO2 at {factors.co2:g} g/kWh"
    if cost.gpu_cost is not None and cost.gpu_hours is not None:
        yield f"{cost.gpu_hours:.3g} GPU-hours {money(cost.gpu_cost)} at ${factors.gpu_hour_price:g}"


def is_incomplete(device: DeviceNumbers) -> bool:
    """Return whether a device did not respond for some time: what it used then is unknown."""
    return device.lost_at is not None or device.lost_s > 0


def _product(amount: float | None, factor: float | None) -> float | None:
    return None if amount is None or factor is None else amount * factor


def _number(text: str | None) -> float | None:
    """Return a factor as a float; an empty string means "not set"."""
    try:
        return None if text is None else float(text.strip().strip('"'))
    except ValueError:
        return None
