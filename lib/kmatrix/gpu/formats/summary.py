"""gpu_summary.json and the header of gpu_samples.bin, as records."""

from __future__ import annotations

from kmatrix.records.decode import Amount, Count, Number, Record, UnixTime, field


class StatisticsEntry(Record, frozen=True, kw_only=True):
    """The statistics of one quantity."""

    mean: Number | None = None
    deviation: Amount | None = None
    min: Number | None = None
    max: Number | None = None
    count: Count = 0


class ProcessEntry(Record, frozen=True, kw_only=True):
    """A process that does not belong to the run."""

    pid: Count
    name: str | None = None
    memory_mib: Amount | None = None  # MiB


class DeviceEntry(Record, frozen=True, kw_only=True):
    """One device."""

    gpu_index: Count = 0
    gpu_name: str = ""
    uuid: str | None = None
    rank: Count | None = None
    samples: Count = 0
    lost_at: UnixTime | None = None
    lost_s: Amount = 0.0  # s
    energy_gap: bool = False
    memory_total: Amount | None = None  # MiB
    memory_used: StatisticsEntry | None = None  # MiB
    utilization: StatisticsEntry | None = None  # percent
    power: StatisticsEntry | None = None  # W
    temperature: StatisticsEntry | None = None  # degrees Celsius
    sm_clock: StatisticsEntry | None = None  # MHz
    joules: Amount | None = None  # J
    counter_start: Number | None = None  # J: the driver's energy counter - joules; None: unknown, or no counter
    throttled_s: dict[str, Amount] = field(default_factory=dict)  # reason -> s
    foreign: tuple[ProcessEntry, ...] = ()
    ecc_uncorrected: Count | None = None  # memory errors
    # The expensive metrics: gpu.devices.EXTRA_METRICS.
    fan: StatisticsEntry | None = None
    memory_temperature: StatisticsEntry | None = None
    pcie_tx: StatisticsEntry | None = None
    pcie_rx: StatisticsEntry | None = None
    nvlink_tx: StatisticsEntry | None = None
    nvlink_rx: StatisticsEntry | None = None
    sm_active: StatisticsEntry | None = None
    tensor_active: StatisticsEntry | None = None
    dram_active: StatisticsEntry | None = None


class TotalsEntry(Record, frozen=True, kw_only=True):
    """The totals of all devices."""

    joules: Amount | None = None  # J
    memory_used_mean: Amount | None = None  # MiB
    memory_used_max: Amount | None = None  # MiB
    memory_used: StatisticsEntry | None = None  # MiB


class SummaryFile(Record, frozen=True, kw_only=True):
    """gpu_summary.json."""

    device_type: str | None = None
    attempt: Count | None = None  # of the run; None: unknown
    simulated: bool = False
    final: bool = False
    started: UnixTime | None = None
    ended: UnixTime | None = None
    ended_monotonic: Amount | None = None  # s since the boot
    seconds: Amount | None = None
    hz_reached: Amount | None = None
    samples: Count | None = None
    late: Count = 0
    energy_source: str | None = None
    warnings: tuple[str, ...] = ()
    gpus: tuple[DeviceEntry, ...] = ()
    totals: TotalsEntry = field(default_factory=TotalsEntry)


class HeaderDevice(Record, frozen=True, kw_only=True):
    """One device in the header of gpu_samples.bin."""

    gpu_index: Count
    gpu_name: str
    uuid: str | None = None
    rank: Count | None = None
    memory_total: Amount | None = None  # MiB
    power_limit: Amount | None = None  # W


class HeaderRecord(Record, frozen=True, kw_only=True):
    """The header of gpu_samples.bin."""

    columns: tuple[str, ...]
    gpus: tuple[HeaderDevice, ...]
    schema: Count = 0
    types: str = ""
    run_id: str | None = None
    hz: Amount | None = None
    simulated: bool = False
    device_type: str = ""
    energy_source: str | None = None
