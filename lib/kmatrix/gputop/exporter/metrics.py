"""The metrics: names and labels of dcgm-exporter where it has the quantity, names of our own for the rest.

Source of names and units: NVIDIA/dcgm-exporter, etc/default-counters.csv, and the DCGM field identifiers. Names before
version 4.9, which renames fields to SI units: dashboards and alerts use them (docs/decisions/0027-exporter.md).
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kmatrix.gpu.formats.events import REASONS
from kmatrix.gpu.formats.samples import GpuSample
from kmatrix.gpu.nvml.facts import DeviceFacts
from kmatrix.gpu.throttled import ThrottledTime
from kmatrix.gputop.view import RunLine, ScreenSample

LABELS = ("gpu", "UUID", "pci_bus_id", "device", "Hostname", "DCGM_FI_DRIVER_VERSION", "run", "rank")
MIB = 2**20  # bytes
Extra = Mapping[str, float]
Value = Callable[[GpuSample, Extra], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMetric:
    """One metric of a GPU."""

    name: str
    help: str
    value: Value


def _extra(name: str, factor: float = 1.0) -> Value:
    return lambda _, extra: None if name not in extra else extra[name] * factor


def _nvlink(_: GpuSample, extra: Extra) -> float | None:
    """Return MB/s over all links, in both directions."""
    known = [extra[name] for name in ("nvlink_tx", "nvlink_rx") if name in extra]
    return sum(known) * MIB / 1e6 if known else None


# Counters of DCGM are gauges here: they have no suffix _total, which Prometheus requires. rate() works all the same,
# except on the bandwidth of NVLink, which is already per second.
DCGM = (
    GpuMetric(name="DCGM_FI_DEV_SM_CLOCK", help="SM clock (MHz).", value=lambda one, _: one.sm_clock),
    GpuMetric(name="DCGM_FI_DEV_GPU_TEMP", help="Temperature (C).", value=lambda one, _: one.temperature),
    GpuMetric(name="DCGM_FI_DEV_MEMORY_TEMP", help="Memory temperature (C).", value=_extra("memory_temperature")),
    GpuMetric(name="DCGM_FI_DEV_POWER_USAGE", help="Power (W).", value=lambda one, _: one.power),
    GpuMetric(
        name="DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        help="Energy since the driver was loaded (mJ).",
        value=lambda one, _: None if one.energy_j is None else 1e3 * one.energy_j,
    ),
    GpuMetric(name="DCGM_FI_DEV_GPU_UTIL", help="Utilization (%).", value=lambda one, _: one.utilization),
    GpuMetric(name="DCGM_FI_DEV_FAN_SPEED", help="Fan speed (%).", value=_extra("fan")),
    GpuMetric(name="DCGM_FI_DEV_XID_ERRORS", help="Newest XID error, 0: none.", value=_extra("xid")),
    GpuMetric(name="DCGM_FI_DEV_FB_USED", help="Used memory (MiB).", value=lambda one, _: one.memory_used),
    GpuMetric(name="DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", help="Uncorrected memory errors.", value=_extra("ecc_uncorrected")),
    GpuMetric(name="DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", help="NVLink traffic (MB/s).", value=_nvlink),
    GpuMetric(name="DCGM_FI_PROF_SM_ACTIVE", help="Active SMs (0 to 1).", value=_extra("sm_active", 0.01)),
    GpuMetric(
        name="DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", help="Tensor cores (0 to 1).", value=_extra("tensor_active", 0.01)
    ),
    GpuMetric(name="DCGM_FI_PROF_DRAM_ACTIVE", help="Memory interface (0 to 1).", value=_extra("dram_active", 0.01)),
    GpuMetric(name="DCGM_FI_PROF_PCIE_TX_BYTES", help="PCIe traffic sent (B/s).", value=_extra("pcie_tx", MIB)),
    GpuMetric(name="DCGM_FI_PROF_PCIE_RX_BYTES", help="PCIe traffic received (B/s).", value=_extra("pcie_rx", MIB)),
)
OWN = (
    GpuMetric(name="kmatrix_gpu_power_limit_watts", help="Enforced power limit.", value=lambda one, _: one.power_limit),
    GpuMetric(
        name="kmatrix_gpu_lost",
        help="1 while the GPU does not respond.",
        value=lambda one, _: float(not one.is_known),
    ),
)
RUNS: tuple[tuple[str, str, Callable[[RunLine], float | None]], ...] = (
    ("kmatrix_run_step", "Newest logged step.", lambda run: run.step),
    ("kmatrix_run_max_steps", "Steps of the whole run.", lambda run: run.max_iters),
    ("kmatrix_run_loss_nats", "Training loss (nats/token).", lambda run: run.loss),
    ("kmatrix_run_tokens_per_second", "Training speed.", lambda run: run.tokens_per_second),
    ("kmatrix_run_mfu_ratio", "Model FLOPs utilization.", lambda run: None if run.mfu is None else run.mfu / 100),
    ("kmatrix_run_left_seconds", "Time left.", lambda run: run.left_s),
    ("kmatrix_run_energy_joules", "Energy so far.", lambda run: None if run.kwh is None else run.kwh * 3.6e6),
)


class GpuCollector(Collector):
    """Turns the newest sample into metrics. A scrape never queries the driver. Unknown values have no sample."""

    def __init__(self, read_facts: Callable[[], Mapping[int, DeviceFacts]]) -> None:
        """Collect nothing yet. read_facts: returns the settings of each GPU by its index, from the driver."""
        self._read_facts, self._host = read_facts, socket.gethostname()
        self._facts: dict[int, DeviceFacts] = {}  # of the GPUs that have answered
        self._sample: ScreenSample | None = None
        self._taken = 0
        self._throttled: dict[int, ThrottledTime] = {}  # GPU index -> throttled time
        self._xids: dict[int, int] = {}  # GPU index -> number of XID errors
        self._before: float | None = None  # time of the sample before, monotonic s if it is known

    def ingest(self, sample: ScreenSample) -> None:
        """Replace the newest sample, and count what adds up over time."""
        # A GPU that did not answer at the start has none until it does.
        if any(gpu.is_known and gpu.gpu_index not in self._facts for gpu in sample.snapshot.samples):
            found = {index: facts for index, facts in self._read_facts().items() if facts != DeviceFacts()}
            self._facts = self._facts | found
        now = sample.snapshot.monotonic or sample.snapshot.time  # somebody may set the clock
        seconds = 0.0 if self._before is None else max(0.0, now - self._before)
        for gpu in sample.snapshot.samples:
            throttled = self._throttled.setdefault(gpu.gpu_index, ThrottledTime())
            throttled.add(sample.throttle.get(gpu.gpu_index) or (), seconds)
            xids = int(dict(gpu.extra).get("xids", 0))
            self._xids[gpu.gpu_index] = max(xids, self._xids.get(gpu.gpu_index, 0))
        self._taken += 1
        # Replaced as a whole, and last: a scrape in another thread sees the old sample or the new one.
        self._before, self._sample = now, sample

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest sample."""
        sample, xids = self._sample, dict(self._xids)
        yield CounterMetricFamily("kmatrix_exporter_samples", "Samples taken.", value=self._taken)
        if sample is None:
            return
        gpus = [(gpu, dict(gpu.extra), self._labels(gpu, sample)) for gpu in sample.snapshot.samples]
        info = GaugeMetricFamily("kmatrix_gpu_info", "Always 1; describes the GPU.", labels=(*LABELS, "name"))
        for gpu, _, labels in gpus:
            info.add_metric((*labels, gpu.gpu_name), 1.0)
        yield info
        for metric in (*DCGM, *OWN):
            family = GaugeMetricFamily(metric.name, metric.help, labels=LABELS)
            for gpu, extra, labels in gpus:
                value = metric.value(gpu, extra)
                if value is not None and math.isfinite(value):
                    family.add_metric(labels, value)
            if family.samples:
                yield family
        seconds = CounterMetricFamily(
            "kmatrix_gpu_throttled_seconds", "Throttled time by reason.", labels=(*LABELS[:2], "Hostname", "reason")
        )
        errors = CounterMetricFamily("kmatrix_gpu_xid_errors", "XID errors.", labels=(*LABELS[:2], "Hostname"))
        for gpu, _, labels in gpus:
            throttled = self._throttled[gpu.gpu_index].seconds
            for reason in REASONS:
                seconds.add_metric((*labels[:2], self._host, reason), throttled.get(reason, 0.0))
            errors.add_metric((*labels[:2], self._host), xids.get(gpu.gpu_index, 0))
        yield from (family for family in (seconds, errors) if family.samples)
        yield from self._runs(sample)

    def _runs(self, sample: ScreenSample) -> Iterator[Metric]:
        """Yield the metrics of the runs on the GPUs."""
        runs = {run.name: run for run in sample.progress}  # two folders may have the same name: the last one counts
        for name, text, value_of in RUNS:
            family = GaugeMetricFamily(name, text, labels=("run", "Hostname"))
            for run in runs.values():
                value = value_of(run)
                if value is not None and math.isfinite(value):
                    family.add_metric((run.name, self._host), value)
            if family.samples:
                yield family

    def _labels(self, gpu: GpuSample, sample: ScreenSample) -> tuple[str, ...]:
        index = gpu.gpu_index
        rank, facts = sample.ranks.get(index), self._facts.get(index, DeviceFacts())
        return (
            str(index),
            gpu.uuid,
            facts.bus_id or "",
            f"nvidia{index}",
            self._host,
            sample.driver_version or "",
            sample.runs.get(index, ""),
            "" if rank is None else str(rank),
        )
