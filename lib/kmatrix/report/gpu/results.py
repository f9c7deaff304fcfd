"""The numbers of the devices of a run, as results.json has them: plain values with their units."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kmatrix.gpu.balance import Balance
from kmatrix.records.decode import Record, field
from kmatrix.status.stragglers import Ranks


class Statistics(Record, frozen=True, kw_only=True):
    """One quantity of one device over a period, in its own unit."""

    mean: Annotated[float, Meta(description="arithmetic mean of the samples")]
    deviation: Annotated[float | None, Meta(description="population standard deviation")] = None
    min: Annotated[float, Meta(description="lowest sample")]
    max: Annotated[float, Meta(description="highest sample")]
    count: Annotated[int, Meta(description="samples with a value")] = 0


class Xid(Record, frozen=True, kw_only=True):
    """The XID errors of one code that a GPU reported."""

    code: Annotated[int, Meta(description="code of the NVIDIA driver")]
    count: Annotated[int, Meta(description="number of errors")]
    first: Annotated[float, Meta(description="time of the first one, Unix s")]
    last: Annotated[float, Meta(description="time of the last one, Unix s")]


class MeasuredDevice(Record, frozen=True, kw_only=True):
    """One GPU of a run, or one rank on the CPU, over a period."""

    label: Annotated[str, Meta(description="GPU 2, rank 0; over several nodes with the host: GPU 2 on n1")]
    gpu_index: Annotated[int, Meta(description="index of the driver; on the CPU, the rank")]
    uuid: Annotated[str | None, Meta(description="UUID of the GPU")] = None
    rank: Annotated[int | None, Meta(description="rank of the run that uses the device")] = None
    host: Annotated[str | None, Meta(description="its machine, of a run over several nodes")] = None
    memory_used: Annotated[Statistics | None, Meta(description="memory in use, MiB; of a rank, its RSS")] = None
    utilization: Annotated[Statistics | None, Meta(description="time with a kernel, %; of a rank, % of a core")] = None
    power: Annotated[Statistics | None, Meta(description="power, W; null if it did not respond for some time")] = None
    temperature: Annotated[Statistics | None, Meta(description="temperature, degrees Celsius")] = None
    sm_clock: Annotated[Statistics | None, Meta(description="clock of the SMs, MHz")] = None


class Device(MeasuredDevice, frozen=True, kw_only=True):
    """One device over the whole recording of the last attempt."""

    gpu_name: Annotated[str, Meta(description="product name")] = ""
    samples: Annotated[int, Meta(description="samples with any value")] = 0
    lost_at: Annotated[float | None, Meta(description="since when it does not respond, Unix s")] = None
    lost_s: Annotated[float, Meta(description="time without a response, s")] = 0.0
    memory_total: Annotated[float | None, Meta(description="memory of the GPU, MiB; of a rank, of its host")] = None
    capacity: Annotated[float | None, Meta(description="memory of the GPU, MiB; null for ranks, which share it")] = None
    joules: Annotated[float | None, Meta(description="energy, J; null if a part of it is unknown")] = None
    throttled_s: Annotated[dict[str, float], Meta(description="time with reduced clocks by reason, s")] = field(
        default_factory=dict
    )
    foreign: Annotated[tuple[str, ...], Meta(description="processes that do not belong to the run")] = ()
    ecc_uncorrected: Annotated[int, Meta(description="uncorrected memory errors")] = 0
    xids: Annotated[tuple[Xid, ...], Meta(description="XID errors by code")] = ()
    extras: Annotated[dict[str, float], Meta(description="means of further metrics of the driver")] = field(
        default_factory=dict
    )


class Balances(Record, frozen=True, kw_only=True):
    """The balance of each quantity; null for one device, and if a device is unknown."""

    memory: Annotated[Balance | None, Meta(description="of the memory in use")] = None
    utilization: Annotated[Balance | None, Meta(description="of the utilization")] = None
    power: Annotated[Balance | None, Meta(description="of the power")] = None
    unknown: Annotated[str, Meta(description="why that of the memory is null")] = ""


class Period(Record, frozen=True, kw_only=True):
    """All devices over a period. null: unknown, also if it is for one device."""

    seconds: Annotated[float | None, Meta(description="sampled time, s")] = None
    memory_used_mean: Annotated[float | None, Meta(description="memory of all devices, mean, MiB")] = None
    mean_power: Annotated[float | None, Meta(description="power of all devices, mean, W")] = None
    utilization: Annotated[float | None, Meta(description="mean over the devices that have one, %")] = None
    joules: Annotated[float | None, Meta(description="energy of all devices, J")] = None
    joules_per_token: Annotated[float | None, Meta(description="energy per trained token, J/token")] = None
    tokens_per_joule: Annotated[float | None, Meta(description="its inverse, tokens/J")] = None


class Training(Period, frozen=True, kw_only=True):
    """A recording without set-up, evaluations, checkpoints, ending, and the time between attempts."""

    balance: Annotated[Balances, Meta(description="balance of the means of the devices")]
    gpus: Annotated[tuple[MeasuredDevice, ...], Meta(description="each device, as in gpus")]


class Totals(Period, frozen=True, kw_only=True):
    """The whole recording of a run, with all attempts in time and energy, and what it cost."""

    memory_used_max: Annotated[float | None, Meta(description="highest sum over the devices of an attempt, MiB")] = None
    memory_total: Annotated[float | None, Meta(description="memory of all GPUs, or of all hosts, MiB")] = None
    capacity: Annotated[float | None, Meta(description="memory of all GPUs, MiB")] = None
    mfu: Annotated[float | None, Meta(description="model FLOPs utilization of the training, 0 to 1")] = None
    kwh: Annotated[float | None, Meta(description="energy, kWh")] = None
    energy_cost: Annotated[float | None, Meta(description="of the energy, $")] = None
    co2_g: Annotated[float | None, Meta(description="emissions of the energy, g")] = None
    gpu_hours: Annotated[float | None, Meta(description="GPUs x hours of all attempts; null on the CPU")] = None
    gpu_cost: Annotated[float | None, Meta(description="of the GPU-hours, $")] = None
    machine_cost: Annotated[float | None, Meta(description="of the hours of a run on the CPU, $")] = None


class Factors(Record, frozen=True, kw_only=True):
    """Prices and emissions, as configured. null: not set."""

    energy_price: Annotated[float | None, Meta(description="$/kWh")] = None
    co2: Annotated[float | None, Meta(description="g/kWh")] = None
    gpu_hour_price: Annotated[float | None, Meta(description="$/GPU-hour")] = None
    machine_hour_price: Annotated[float | None, Meta(description="$/hour of a run on the CPU")] = None


class Phase(Record, frozen=True, kw_only=True):
    """All time of a run in one phase without training."""

    seconds: Annotated[float, Meta(description="sampled time, s; over several nodes, that of the first one")]
    joules: Annotated[float | None, Meta(description="energy of all devices, J; null if it is not known of 90 %")]


class Gpu(Record, frozen=True, kw_only=True):
    """The devices of a run: over the whole recording, and over its training alone."""

    evidence: Annotated[str | None, Meta(description="file of the recording; null: nothing was recorded")] = None
    device_type: Annotated[str | None, Meta(description="nvidia or cpu; null: unknown")] = None
    unit: Annotated[str, Meta(description="word for a device: GPU or rank")] = "GPU"
    names: Annotated[str, Meta(description="product names of the devices")] = ""
    simulated: Annotated[bool, Meta(description="the GPUs were simulated: nothing was measured")] = False
    samples: Annotated[int, Meta(description="samples of all recordings")] = 0
    hz_reached: Annotated[float | None, Meta(description="samples per second")] = None
    energy_source: Annotated[str | None, Meta(description="counter, or power (integrated)")] = None
    gpus: Annotated[tuple[Device, ...], Meta(description="each device of the last attempt")] = ()
    totals: Annotated[Totals, Meta(description="all devices over the whole recording")] = Totals()
    balance: Annotated[Balances, Meta(description="balance over the whole recording")] = Balances()
    training: Annotated[Training | None, Meta(description="the training alone; null: unknown")] = None
    phases: Annotated[dict[str, Phase], Meta(description="phase without training -> time and energy")] = field(
        default_factory=dict
    )
    factors: Annotated[Factors, Meta(description="prices and emissions")] = Factors()
    reused: Annotated[bool, Meta(description="recorded in another matrix: no cost in this one")] = False
    has_earlier: Annotated[bool, Meta(description="time and energy include attempts on other devices")] = False
    ranks: Annotated[Ranks | None, Meta(description="compute time of each rank; null: unknown")] = None
    problems: Annotated[tuple[str, ...], Meta(description="what impaired a device, one sentence each")] = ()
    notes: Annotated[tuple[str, ...], Meta(description="limits of these numbers, one sentence each")] = ()


class RecordedRun(Record, frozen=True, kw_only=True):
    """A run with a recording, as far as a folder of recordings tells."""

    name: Annotated[str, Meta(description="name of its folder")]
    optimizer: Annotated[str, Meta(description="empty: unknown")] = ""
    status: Annotated[str, Meta(description="as of a run; empty: unknown")] = ""
    gpu: Annotated[Gpu | None, Meta(description="null: nothing was recorded")] = None
