"""What a recording says of the devices of a run, as values: spreads, devices, balance, ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.report.energy import Cost, Factors, cost_of
from kmatrix.stats import balance_quality, coefficient_of_variation

SIMULATED = "(simulated)"  # how the name of a simulated GPU ends
HIDDEN_STRAGGLER = 0.05  # share of the time of a run, above which a straggler is told
CPU = "cpu"
MOMENTS = 512  # stretches of a timeline, at least, once there were so many samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What one quantity did over a recording, in its own unit. deviation: of the population."""

    mean: float
    deviation: float | None
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNumbers:
    """One GPU of a run, or one rank on the CPU. None is unknown, never 0.

    memory_total, memory_used: MiB.  utilization: percent.  power: W.  temperature: degrees C.  sm_clock: MHz.
    joules: over the recording.  lost_at: Unix seconds.  throttled_s: seconds by reason.
    foreign: who else had memory on this GPU.  ecc_uncorrected: errors of its memory.
    extras: means of what is asked once a second, by the names of gpu.source.Extra.
    """

    gpu_index: int
    gpu_name: str
    rank: int | None = None
    uuid: str = ""
    samples: int = 0
    memory_total: float | None = None
    memory_used: Spread | None = None
    utilization: Spread | None = None
    power: Spread | None = None
    temperature: Spread | None = None
    sm_clock: Spread | None = None
    joules: float | None = None
    lost_at: float | None = None
    throttled_s: tuple[tuple[str, float], ...] = ()
    foreign: tuple[str, ...] = ()
    ecc_uncorrected: int = 0
    extras: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly devices were used. cv: population deviation / mean of their means, in percent."""

    cv: float
    quality: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNumbers:
    """How long each rank computed before it waited for the others.

    compute_ms: mean a step, by rank.  efficiency: mean / max of compute_ms, 1 is ideal.
    waiting: share of the step time that the ranks spent on average waiting for the slowest of each step, 0 to 1.
    slowest: the rank that was the slowest in most steps.  slowest_share: in how many of them, 0 to 1.
    """

    compute_ms: tuple[tuple[int, float], ...]
    step_ms: float
    efficiency: float
    waiting: float
    slowest: int
    slowest_share: float
    steps: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A stretch of the memory timeline. seconds: since the recording began.  memory: mean MiB, by device."""

    seconds: float
    memory: tuple[float | None, ...]

    @property
    def total(self) -> float | None:
        """Over the devices that answered; None where none did."""
        known = [value for value in self.memory if value is not None]
        return math.fsum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch in which a run did not train. name: set-up, evaluation, checkpoint, ending.

    begin, end: seconds since the recording began.  joules: of all devices in it, None where that is not known.
    """

    name: str
    begin: float
    end: float
    joules: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNumbers:
    """The devices of one run.

    evidence: the file that the numbers come from.  device_type: "nvidia", "amd" or "cpu".  hz: samples a second.
    final: whether the recorder came to its own end.  total_high: the greatest memory of all devices together, MiB.
    joules_per_token: None where the recording and the tokens are not of the same stretch.
    mfu: of the training, 0 to 1.  factors: what energy and hours cost.  phases: what was no training, by time.
    notes: what a reader must know before using these numbers.
    """

    evidence: str
    device_type: str
    devices: tuple[DeviceNumbers, ...]
    samples: int
    seconds: float | None
    hz: float | None = None
    final: bool = True
    simulated: bool = False
    energy_source: str | None = None
    total_mean: float | None = None
    total_high: float | None = None
    joules: float | None = None
    joules_per_token: float | None = None
    ranks: RankNumbers | None = None
    mfu: float | None = None
    factors: Factors = field(default_factory=Factors)
    phases: tuple[Phase, ...] = ()
    notes: tuple[str, ...] = ()
    timeline: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def word(self) -> str:
        """What one device is called."""
        return "rank" if self.device_type == CPU else "GPU"

    @property
    def mean_power(self) -> float | None:
        """Of all devices together, W; None where one is unknown."""
        return _sum([device.power.mean if device.power else None for device in self.devices])

    @property
    def utilization(self) -> float | None:
        """Mean over the devices, percent; None where none is known."""
        known = [device.utilization.mean for device in self.devices if device.utilization]
        return math.fsum(known) / len(known) if known else None

    def extra(self, name: str) -> float | None:
        """Return the mean over the devices of an extra value; None where one does not say it."""
        known = [device.extras.get(name) for device in self.devices]
        total = _sum(known)
        return None if total is None else total / len(known)

    @property
    def tokens_per_joule(self) -> float | None:
        return 1.0 / self.joules_per_token if self.joules_per_token else None

    @property
    def cost(self) -> Cost:
        """What the recorded stretch cost; GPU-hours are those of the GPUs recorded, none on the CPU."""
        seconds = None if self.seconds is None or self.device_type == CPU else self.seconds * len(self.devices)
        return cost_of(self.joules, seconds, self.factors)

    def balance(self, quantity: str) -> Balance | None:
        """Return how even "memory_used", "utilization" or "power" is; None with fewer than two known devices."""
        spreads = [getattr(device, quantity) for device in self.devices]
        known = [spread.mean for spread in spreads if isinstance(spread, Spread)]
        return balance_of(known) if len(known) == len(spreads) else None

    def phase_seconds(self, name: str) -> float:
        """Return how long all phases of a kind lasted."""
        return math.fsum(phase.end - phase.begin for phase in self.phases if phase.name == name)

    def phase_joules(self, name: str) -> float | None:
        """Return what all phases of a kind used; None where one is not known."""
        return _sum([phase.joules for phase in self.phases if phase.name == name])

    @property
    def hides_a_straggler(self) -> bool:
        """Whether memory looks even while ranks wait for a slow one."""
        memory = self.balance("memory_used")
        even = memory is not None and memory.quality == "Excellent"
        return even and self.ranks is not None and self.ranks.waiting > HIDDEN_STRAGGLER

    def label(self, device: DeviceNumbers) -> str:
        """Return "GPU 2", or "rank 0" on the CPU."""
        if self.device_type == CPU:
            return f"rank {device.gpu_index if device.rank is None else device.rank}"
        return f"GPU {device.gpu_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGpus:
    """A run beside what was recorded of it. status: "" where nothing says how it ended."""

    name: str
    optimizer: str
    status: str
    gpu: GpuNumbers | None


def balance_of(means: Sequence[float]) -> Balance | None:
    """Return the balance of these means; None with fewer than two."""
    if len(means) < 2:
        return None
    cv = coefficient_of_variation(means)
    return Balance(cv=cv, quality=balance_quality(cv))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if values and len(known) == len(values) else None
